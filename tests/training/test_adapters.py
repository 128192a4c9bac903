"""QLoRA: which modules are quantized and adapted, whole runs, and how adapters are loaded and merged."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig


bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

from modeling_normllava import NormLlavaForConditionalGeneration  # noqa: E402
from normllava.files import weights_fingerprint  # noqa: E402
from script_runs import INSTRUCT, ROOT, collate, load_weights, read_steps, run  # noqa: E402
from training import sft  # noqa: E402
from training.folders.loading import load_base, prepare_model  # noqa: E402
from training.merge import merge  # noqa: E402
from training.modules.adapters import add_adapters, quantization_config  # noqa: E402
from training.modules.stages import ModuleGroup, Stage, describe_stage  # noqa: E402
from training.options.arguments import RunArguments, TrainingConfig  # noqa: E402


QLORA = {"stage": "adapt", "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8, "learning_rate": 5e-3}


@pytest.fixture
def quantized_model(make_model_folder: Callable[..., Path]) -> NormLlavaForConditionalGeneration:
    return NormLlavaForConditionalGeneration.from_pretrained(
        make_model_folder(), dtype=torch.float32, quantization_config=quantization_config(torch.float32)
    )


def test_only_the_decoders_linear_layers_are_quantized(quantized_model: NormLlavaForConditionalGeneration) -> None:
    for name, module in quantized_model.named_modules():
        if isinstance(module, torch.nn.Linear):  # Linear4bit, the class of quantized layers, is a subclass
            is_quantized = isinstance(module, bnb.nn.Linear4bit)
            assert is_quantized == name.startswith("model.language_model.layers."), name
    assert quantized_model.model.multi_modal_projector.norm.weight.dtype == torch.float32


def test_the_table_of_a_stage_counts_quantized_weights(
    make_model_folder: Callable[..., Path], quantized_model: NormLlavaForConditionalGeneration
) -> None:
    """A quantized tensor has two weights in each byte. Its `numel` counts bytes, so the table can't use `numel`."""
    unquantized_model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    num_weights = unquantized_model.model.language_model.num_parameters()
    parameters = dict(quantized_model.model.language_model.named_parameters())
    group = ModuleGroup("language_model", parameters, learning_rate=None)
    assert f" {num_weights:,} " in describe_stage(Stage.ADAPT, [group])


def test_adapters_of_quantized_layers_and_the_projector_are_trained(
    quantized_model: NormLlavaForConditionalGeneration,
) -> None:
    modules = quantized_model.named_modules()
    quantized_layers = {name for name, module in modules if isinstance(module, bnb.nn.Linear4bit)}
    adapted_model = add_adapters(quantized_model, rank=4, alpha=8)

    # PEFT has changed `quantized_model` in place: each adapted layer has a new module `lora_A`.
    adapted_layers = set()
    for name, _ in quantized_model.named_modules():
        if name.endswith(".lora_A"):
            adapted_layers.add(name.removesuffix(".lora_A"))
    assert adapted_layers == quantized_layers

    # Each adapter has two weights. The projector has the weights and biases of two linear layers and a norm layer.
    trained = [name for name, parameter in adapted_model.named_parameters() if parameter.requires_grad]
    trained_in_adapters = [name for name in trained if ".lora_" in name]
    trained_in_projector = [name for name in trained if ".multi_modal_projector.modules_to_save." in name]
    assert len(trained_in_adapters) == 2 * len(adapted_layers)
    assert len(trained_in_projector) == 6
    assert len(trained) == len(trained_in_adapters) + len(trained_in_projector)


def has_lora(model: torch.nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


def test_adapters_in_float32_get_a_bfloat16_input_as_it_is(make_model_folder: Callable[..., Path]) -> None:
    """PEFT by itself casts the input to the adapter's float32, and autocast casts the input back to bfloat16."""
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.bfloat16)
    adapted = add_adapters(model, rank=2, alpha=4)
    layer = adapted.base_model.model.model.language_model.layers[0].self_attn.q_proj
    dtypes = []
    layer.lora_A["default"].register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 32, dtype=torch.bfloat16))
    assert layer.lora_A["default"].weight.dtype == torch.float32
    assert dtypes == [torch.bfloat16]


def test_a_recipes_fields_reach_the_adapters(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    fields = {"lora_r": 3, "lora_alpha": 5, "lora_dropout": 0.2, "use_rslora": True}
    run_args = RunArguments(model_name_or_path=str(make_model_folder()), dataset_name="", stage="adapt", **fields)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    base = load_base(run_args, args)
    adapted_model, _ = prepare_model(base, run_args, args, args.frozen_dtype)
    config = adapted_model.peft_config["default"]
    assert config.r == 3
    assert config.lora_alpha == 5
    assert config.lora_dropout == 0.2
    assert config.use_rslora


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}],
    ids=["unquantized", "4 bits"],
)
def test_an_adapter_loads_only_on_a_base_with_all_weights(
    make_model_folder: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    base = shutil.copytree(make_model_folder(), tmp_path / "base")
    model = NormLlavaForConditionalGeneration.from_pretrained(base)
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter", **options)
    assert has_lora(loaded)
    devices = {parameter.device.type for parameter in loaded.parameters()}
    assert devices == {"cpu"}  # and not "meta", whose parameters have no data

    # Delete the weight and the bias of a linear layer from the base.
    weights = load_weights(base)
    remaining = {name: weight for name, weight in weights.items() if "multi_modal_projector.linear_1" not in name}
    save_file(remaining, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="Weights missing: 2 of multi_modal_projector"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter", **options)


def test_an_adapters_base_is_quantized_once(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's base is opened twice: to load its weights, and to check that none is missing.

    The check must not quantize the weights again.
    """
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path)

    quantize_4bit = bnb.functional.quantize_4bit
    quantized_shapes: list[torch.Size] = []

    def quantize_and_record_shape(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        quantized_shapes.append(weight.shape)
        return quantize_4bit(weight, *args, **options)

    monkeypatch.setattr(bnb.functional, "quantize_4bit", quantize_and_record_shape)
    in_4bit = BitsAndBytesConfig(load_in_4bit=True)
    NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), quantization_config=in_4bit)
    shapes_of_base = sorted(quantized_shapes)  # without an adapter, each weight is quantized once
    assert len(shapes_of_base) > 0

    quantized_shapes.clear()
    AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=in_4bit)
    assert sorted(quantized_shapes) == shapes_of_base


def test_an_adapter_loads_on_a_base_that_was_saved_in_4_bits(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    in_4bit = quantization_config(torch.float32)
    base = NormLlavaForConditionalGeneration.from_pretrained(
        make_model_folder(), dtype=torch.float32, quantization_config=in_4bit
    )
    base.save_pretrained(tmp_path / "base")
    base = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    add_adapters(base, rank=2, alpha=4).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter")
    assert has_lora(loaded)


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16"])
def adapter(
    request: pytest.FixtureRequest,
    make_model_folder: Callable[..., Path],
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The output folder of a QLoRA run, in float32 or bfloat16. Tests only read it."""
    folder = tmp_path_factory.mktemp("qlora")
    fields = {
        **QLORA,
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
        "num_train_epochs": 6,
    }
    is_bfloat16 = request.param
    fields |= {"logging_steps": 8, "gradient_checkpointing": True, "bf16": is_bfloat16}
    run(folder, **fields, output_dir=str(folder / "adapter"))
    return folder / "adapter"


def test_a_run_learns(adapter: Path) -> None:
    steps = read_steps(adapter)
    losses = [step["loss"] for step in steps]
    assert losses == sorted(losses, reverse=True)  # the loss falls from each logged step to the next
    # The LM head is random and frozen, so the loss can't fall far, but the right token often becomes the likeliest.
    assert steps[0]["mean_token_accuracy"] < 0.2
    assert steps[-1]["mean_token_accuracy"] > 0.5


def test_weights_are_trained_and_saved_in_float32(make_model_folder: Callable[..., Path], adapter: Path) -> None:
    saved = load_weights(adapter, "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    gain = saved["base_model.model.model.multi_modal_projector.norm.weight"]
    gain_before = load_weights(make_model_folder())["model.multi_modal_projector.norm.weight"]
    assert (gain != gain_before).all()  # in bfloat16, rounding would have left some gains unchanged


def load_on_base(folder: Path, adapter: Path) -> peft.PeftModel:
    """An adapter on its base, which is loaded from `folder` in float32."""
    base = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter).eval()


def test_an_adapter_loads_with_the_weights_that_its_run_saved(
    make_model_folder: Callable[..., Path], adapter: Path
) -> None:
    saved = load_weights(adapter, "adapter_model.safetensors")
    adapted_model = load_on_base(make_model_folder(), adapter)
    for name, tensor in peft.get_peft_model_state_dict(adapted_model).items():
        assert torch.equal(tensor, saved[name]), name


def test_a_merged_model_is_a_complete_folder_that_gives_the_logits_of_the_adapter(
    make_model_folder: Callable[..., Path], data: Path, adapter: Path, tmp_path: Path
) -> None:
    merged_folder = tmp_path / "merged"
    options = ["--adapter", str(adapter), "--output_dir", str(merged_folder)]
    command = [sys.executable, "training/merge.py", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"Merged {adapter} into its base model, and saved to {merged_folder}" in result.stderr
    # Others may read the weights, as all other files.
    modes = {path.stat().st_mode for path in merged_folder.iterdir()}
    assert len(modes) == 1

    file_names = {path.name for path in merged_folder.iterdir()}
    assert file_names >= {
        "config.json", "model.safetensors", "modeling_normllava.py", "processor_config.json", "chat_template.jinja",
    }  # fmt: skip
    # The merged folder also has the run's files, from which a model card is made.
    for name in ("run.json", "trainer_state.json"):
        assert (merged_folder / name).read_bytes() == (adapter / name).read_bytes()

    merged_model = AutoModelForImageTextToText.from_pretrained(merged_folder).eval()
    assert not has_lora(merged_model)
    row = {
        "images": [str(data.parent / "7.png")],
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "number 7"}],
        "source": "row",
    }
    batch = collate(adapter, [row])
    adapted_model = load_on_base(make_model_folder(), adapter)
    with torch.no_grad():
        logits = merged_model(**batch).logits
        expected_logits = adapted_model(**batch).logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def changed_base(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """The base model of `adapter` with other weights, as if it had been trained again into its folder."""
    folder = shutil.copytree(make_model_folder(), tmp_path / "base")
    weights = load_weights(folder)
    changed = {name: weight + 0.01 if "q_proj" in name else weight for name, weight in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_adapter_is_merged_only_into_the_weights_that_it_was_trained_on(
    make_model_folder: Callable[..., Path], adapter: Path, changed_base: Path, tmp_path: Path
) -> None:
    trained_on = weights_fingerprint(make_model_folder())
    now = weights_fingerprint(changed_base)
    with pytest.raises(ValueError, match=f"fingerprint {trained_on}, and those of {changed_base} now have {now}"):
        merge(adapter, str(changed_base))

    # The same weights may have moved.
    moved_base = shutil.copytree(make_model_folder(), tmp_path / "moved")
    merge(adapter, str(moved_base))

    # An adapter without a record is merged, since nothing says that it doesn't fit.
    unrecorded = shutil.copytree(adapter, tmp_path / "unrecorded", ignore=shutil.ignore_patterns("checkpoint-*"))
    (unrecorded / "run.json").unlink()
    merge(unrecorded, str(changed_base))


def test_an_adapter_is_resumed_only_on_the_weights_that_it_was_trained_on(
    make_model_folder: Callable[..., Path], adapter: Path, changed_base: Path
) -> None:
    """Only a checkpoint of stage 'adapt' lacks the base's weights."""
    run_args: Any = SimpleNamespace(model_name_or_path=str(changed_base), model_revision=None)
    trained_on = weights_fingerprint(make_model_folder())
    with pytest.raises(ValueError, match=f"trained on weights with the fingerprint {trained_on}"):
        sft.find_start_weights(run_args, Stage.ADAPT, checkpoint=adapter)
    # A run that goes on says what it started from.
    assert sft.find_start_weights(run_args, Stage.INSTRUCT, checkpoint=adapter) == trained_on
    assert sft.find_start_weights(run_args, Stage.ADAPT, checkpoint=None) == weights_fingerprint(changed_base)


def test_a_run_that_starts_from_an_adapter_is_refused(data: Path, adapter: Path, tmp_path: Path) -> None:
    """The run would save the adapter alone, and not a whole model."""
    fields = {**INSTRUCT, "model_name_or_path": str(adapter), "dataset_name": str(data)}
    with pytest.raises(ValueError, match=r"is an adapter, not a whole model. Merge it .*training/merge.py"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "next"))


def test_an_adapter_without_all_of_its_weights_is_refused(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path)
    # Delete one weight from the adapter's file: first the gain of the projector's norm, then a LoRA matrix.
    weights = load_weights(tmp_path, "adapter_model.safetensors")
    for part_of_name in ("multi_modal_projector.norm.weight", "layers.0.self_attn.q_proj.lora_A"):
        (missing,) = [name for name in weights if part_of_name in name]
        remaining = {name: weight for name, weight in weights.items() if name != missing}
        save_file(remaining, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"adapter does not fit. Weights missing: 1, first .*(norm|lora_A)"):
            AutoModelForImageTextToText.from_pretrained(tmp_path)
        # For a weight of the projector, PEFT raises a KeyError before our check raises its ValueError.
        with pytest.raises((KeyError, ValueError), match=part_of_name):
            merge(tmp_path)


def test_a_folder_without_an_adapter_cannot_be_merged(make_model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="holds no adapter: give the output folder of a run of stage 'adapt'"):
        merge(make_model_folder())


def test_merging_loads_the_base_once_at_the_revision_that_was_trained_on(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4, revision="v1.0").save_pretrained(tmp_path / "adapter")

    from_pretrained = AutoModelForImageTextToText.from_pretrained
    loaded_revisions = []

    def load_and_record_revision(*args: Any, **options: Any) -> NormLlavaForConditionalGeneration:
        loaded_revisions.append(options["revision"])
        return from_pretrained(*args, **options)

    monkeypatch.setattr("training.merge.AutoModelForImageTextToText.from_pretrained", load_and_record_revision)
    merged = merge(tmp_path / "adapter")
    assert loaded_revisions == ["v1.0"]
    base.save_pretrained(tmp_path / "copy")
    merge(tmp_path / "adapter", base=str(tmp_path / "copy"))
    assert loaded_revisions == ["v1.0", None]  # another repository doesn't have the base's revision

    assert merged.lm_head.weight.dtype == torch.bfloat16  # the dtype of the base
    assert merged.model.multi_modal_projector.norm.weight.dtype == torch.float32  # the norm is float32 in any model
