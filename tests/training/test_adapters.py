"""QLoRA: which modules are quantized and trained, the run, loading its adapter, and merging it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig


bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

from modeling_normllava import NormLlavaForConditionalGeneration  # noqa: E402
from script_runs import INSTRUCT, ROOT, collate, read_metrics, run  # noqa: E402
from training.adapters import add_adapters, quantization_config  # noqa: E402
from training.arguments import RunArguments, TrainingConfig  # noqa: E402
from training.loading import load_base, prepare_model  # noqa: E402
from training.merge import merge  # noqa: E402
from training.stages import ModuleGroup, Stage, describe_stage  # noqa: E402


QLORA = {"stage": "adapt", "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8, "learning_rate": 5e-3}


def test_the_language_model_alone_is_quantized_and_adapted(composed: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), dtype=torch.float32, quantization_config=quantization_config(torch.float32)
    )
    linear_layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantized_layers = {name for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert quantized_layers == {name for name in linear_layers if name.startswith("model.language_model.layers.")}
    assert model.model.multi_modal_projector.norm.weight.dtype == torch.float32

    # A quantized tensor holds two weights in each byte. The table of a stage still counts weights, not bytes.
    unquantized_decoder = NormLlavaForConditionalGeneration.from_pretrained(composed()).model.language_model
    num_weights = unquantized_decoder.num_parameters()
    group = ModuleGroup("language_model", dict(model.model.language_model.named_parameters()), None)
    assert f" {num_weights:,} " in describe_stage(Stage.ADAPT, [group])

    adapted_model = add_adapters(model, rank=4, alpha=8)
    adapted_layers = set()
    for name, _ in model.named_modules():  # PEFT puts `<layer>.lora_A` into each layer that it adapts
        if name.endswith(".lora_A"):
            adapted_layers.add(name.removesuffix(".lora_A"))
    assert adapted_layers == quantized_layers

    # Each adapter has two weights. The projector has the weights and biases of two linear layers and of its norm.
    trained = [name for name, parameter in adapted_model.named_parameters() if parameter.requires_grad]
    of_adapters = [name for name in trained if ".lora_" in name]
    of_projector = [name for name in trained if ".multi_modal_projector.modules_to_save." in name]
    assert len(of_adapters) == 2 * len(adapted_layers)
    assert len(of_projector) == 6
    assert len(trained) == len(of_adapters) + len(of_projector)


def has_lora(model: torch.nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


def test_a_recipes_fields_reach_the_adapters(composed: Callable[..., Path], tmp_path: Path) -> None:
    fields = {"lora_r": 3, "lora_alpha": 5, "lora_dropout": 0.2, "use_rslora": True}
    run_args = RunArguments(model_name_or_path=str(composed()), dataset_name="", stage="adapt", **fields)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    trained_model, _ = prepare_model(load_base(run_args, args), run_args, args, args.frozen_dtype)
    config = trained_model.peft_config["default"]
    assert config.r == 3
    assert config.lora_alpha == 5
    assert config.lora_dropout == 0.2
    assert config.use_rslora


@pytest.mark.parametrize("options", [{}, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}])
def test_an_adapter_loads_only_on_a_base_with_all_weights(
    composed: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    base = shutil.copytree(composed(), tmp_path / "base")
    model = NormLlavaForConditionalGeneration.from_pretrained(base)
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter", **options)
    assert has_lora(loaded)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}  # none is left without data

    weights = load_file(base / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "multi_modal_projector.linear_1" not in name}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="Weights missing: 2 of multi_modal_projector"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter", **options)


def test_an_adapters_base_is_quantized_once(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading an adapter opens the base a second time to know which weights it has, but must not load these again."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path)

    quantize_4bit = bnb.functional.quantize_4bit
    quantized_shapes: list[torch.Size] = []

    def record_shape(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        quantized_shapes.append(weight.shape)
        return quantize_4bit(weight, *args, **options)

    monkeypatch.setattr(bnb.functional, "quantize_4bit", record_shape)
    in_4bit = BitsAndBytesConfig(load_in_4bit=True)
    NormLlavaForConditionalGeneration.from_pretrained(composed(), quantization_config=in_4bit)
    shapes_of_base = sorted(quantized_shapes)
    assert len(shapes_of_base) > 0

    quantized_shapes.clear()
    AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=in_4bit)
    assert sorted(quantized_shapes) == shapes_of_base


def test_an_adapter_loads_on_a_base_that_was_saved_in_4_bits(composed: Callable[..., Path], tmp_path: Path) -> None:
    in_4bit = quantization_config(torch.float32)
    base = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), dtype=torch.float32, quantization_config=in_4bit
    )
    base.save_pretrained(tmp_path / "base")
    base = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    add_adapters(base, rank=2, alpha=4).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter")
    assert has_lora(loaded)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_a_run_learns_saves_reloads_and_merges(
    composed: Callable[..., Path], data: Path, tmp_path: Path, bf16: bool
) -> None:
    fields = {**QLORA, "model_name_or_path": str(composed()), "dataset_name": str(data), "num_train_epochs": 6}
    fields |= {"logging_steps": 8, "gradient_checkpointing": True, "bf16": bf16}
    run(tmp_path, **fields, output_dir=str(tmp_path / "adapter"))
    steps = [line for line in read_metrics(tmp_path / "adapter") if "loss" in line]
    losses = [step["loss"] for step in steps]
    assert losses == sorted(losses, reverse=True)
    # The head is random and frozen, so that the loss can't fall far; but the right token becomes the most likely one.
    assert steps[0]["mean_token_accuracy"] < 0.2
    assert steps[-1]["mean_token_accuracy"] > 0.5

    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    gain = saved["base_model.model.model.multi_modal_projector.norm.weight"]
    gain_before = load_file(composed() / "model.safetensors")["model.multi_modal_projector.norm.weight"]
    assert (gain != gain_before).all()  # in bfloat16, rounding would have kept some gains where they were

    # Loaded on the base, the adapter has the saved weights. Its logits are what the merged model shall give.
    row = {
        "images": [str(data.parent / "7.png")],
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "number 7"}],
        "source": "row",
    }
    batch = collate(tmp_path / "adapter", [row])
    base = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for name, tensor in peft.get_peft_model_state_dict(adapted).items():
        assert torch.equal(tensor, saved[name]), name
    with torch.no_grad():
        expected_logits = adapted(**batch).logits

    # The merged model is a complete folder, and gives the same logits.
    command = [sys.executable, "training/merge.py", "--adapter", str(tmp_path / "adapter")]
    result = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "merged")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {
        "config.json", "model.safetensors", "modeling_normllava.py", "processor_config.json", "chat_template.jinja",
    }  # fmt: skip
    # The model card is made of these files.
    for name in ("run.json", "trainer_state.json", "metrics.jsonl"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected_logits, rtol=1e-4, atol=1e-5)

    # A run that starts from the adapter is refused: it would save the adapter alone.
    fields = {**INSTRUCT, "model_name_or_path": str(tmp_path / "adapter"), "dataset_name": str(data)}
    with pytest.raises(ValueError, match=r"is an adapter, not a whole model. Merge it .*training/merge.py"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "next"))


def test_an_adapter_without_all_of_its_weights_is_refused(composed: Callable[..., Path], tmp_path: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no adapter: give the output folder of a run of stage 'adapt'"):
        merge(composed())

    # Take one weight out of the adapter's file: once the projector's norm, once a matrix of an adapter.
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for part in ("multi_modal_projector.norm.weight", "layers.0.self_attn.q_proj.lora_A"):
        (missing,) = [name for name in weights if part in name]
        remaining = {name: weight for name, weight in weights.items() if name != missing}
        save_file(remaining, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"adapter does not fit. Weights missing: 1, first .*(norm|lora_A)"):
            AutoModelForImageTextToText.from_pretrained(tmp_path)
        with pytest.raises((KeyError, ValueError), match=part):
            merge(tmp_path)


def test_merging_loads_the_base_once_at_the_revision_that_was_trained_on(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4, revision="v1.0").save_pretrained(tmp_path / "adapter")

    load = AutoModelForImageTextToText.from_pretrained
    loaded_revisions = []

    def record_revision(*args: Any, **options: Any) -> NormLlavaForConditionalGeneration:
        loaded_revisions.append(options["revision"])
        return load(*args, **options)

    monkeypatch.setattr("training.merge.AutoModelForImageTextToText.from_pretrained", record_revision)
    merged = merge(tmp_path / "adapter")
    assert loaded_revisions == ["v1.0"]
    assert merged.lm_head.weight.dtype == torch.bfloat16  # the dtype of the base
    assert merged.model.multi_modal_projector.norm.weight.dtype == torch.float32
