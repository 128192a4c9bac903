"""QLoRA as people run it: what is quantized and trained, the run, the adapter, and the merged model."""

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
    quantized = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), dtype=torch.float32, quantization_config=quantization_config(torch.float32)
    )
    in_4bit = {name for name, module in quantized.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    linear = {name for name, module in quantized.named_modules() if isinstance(module, torch.nn.Linear)}
    assert in_4bit == {name for name in linear if name.startswith("model.language_model.layers.")}
    assert quantized.model.multi_modal_projector.norm.weight.dtype == torch.float32

    decoder = NormLlavaForConditionalGeneration.from_pretrained(composed()).model.language_model
    group = ModuleGroup("language_model", dict(quantized.model.language_model.named_parameters()), None)
    assert f" {decoder.num_parameters():,} " in describe_stage(Stage.ADAPT, [group])

    adapted = add_adapters(quantized, rank=4, alpha=8)
    with_adapter = {name.removesuffix(".lora_A") for name, _ in quantized.named_modules() if name.endswith(".lora_A")}
    assert with_adapter == in_4bit
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or ".multi_modal_projector.modules_to_save." in name for name in trained)
    assert len(trained) == 2 * len(in_4bit) + 6


def test_a_recipes_adapters_are_as_asked(composed: Callable[..., Path], tmp_path: Path) -> None:
    asked = {"lora_r": 3, "lora_alpha": 5, "lora_dropout": 0.2, "use_rslora": True}
    run_args = RunArguments(model_name_or_path=str(composed()), dataset_name="", stage="adapt", **asked)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    trained, _ = prepare_model(load_base(run_args, args), run_args, args, args.frozen_dtype)
    of = trained.peft_config["default"]
    assert (of.r, of.lora_alpha, of.lora_dropout, of.use_rslora) == tuple(asked.values())


def test_an_adapter_loads_on_a_whole_base_and_on_no_torn_one(composed: Callable[..., Path], tmp_path: Path) -> None:
    base = shutil.copytree(composed(), tmp_path / "base")
    add_adapters(NormLlavaForConditionalGeneration.from_pretrained(base), rank=2, alpha=4).save_pretrained(
        tmp_path / "adapter"
    )
    load, in_4bit = AutoModelForImageTextToText.from_pretrained, BitsAndBytesConfig(load_in_4bit=True)
    # What the adapter's weights lack of the state of 4-bit weights is nothing that is missing.
    for loaded in (load(tmp_path / "adapter"), load(tmp_path / "adapter", quantization_config=in_4bit)):
        assert any(".lora_" in name for name, _ in loaded.named_parameters())
        assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    weights = load_file(base / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "multi_modal_projector.linear_1" not in name}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"quantization_config": in_4bit}):
        with pytest.raises(ValueError, match="Weights missing: 2 of multi_modal_projector"):
            load(tmp_path / "adapter", **options)


def test_an_adapters_base_is_quantized_once(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is looked at a second time, to know which weights it has, without its data."""
    add_adapters(NormLlavaForConditionalGeneration.from_pretrained(composed()), rank=2, alpha=4).save_pretrained(
        tmp_path
    )
    quantize, quantized = bnb.functional.quantize_4bit, []

    def noting(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        quantized.append(weight.shape)
        return quantize(weight, *args, **options)

    monkeypatch.setattr(bnb.functional, "quantize_4bit", noting)
    in_4bit = BitsAndBytesConfig(load_in_4bit=True)
    NormLlavaForConditionalGeneration.from_pretrained(composed(), quantization_config=in_4bit)
    of_base = list(quantized)
    quantized.clear()
    AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=in_4bit)
    assert len(of_base) > 0
    assert sorted(quantized) == sorted(of_base)


def test_an_adapter_loads_on_a_base_that_was_saved_in_4_bits(composed: Callable[..., Path], tmp_path: Path) -> None:
    in_4bit = quantization_config(torch.float32)
    base = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), dtype=torch.float32, quantization_config=in_4bit
    )
    base.save_pretrained(tmp_path / "base")
    saved = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    add_adapters(saved, rank=2, alpha=4).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter")
    assert any(".lora_" in name for name, _ in loaded.named_parameters())


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_a_run_learns_saves_reloads_and_merges(
    composed: Callable[..., Path], data: Path, tmp_path: Path, bf16: bool
) -> None:
    fields = {**QLORA, "model_name_or_path": str(composed()), "dataset_name": str(data), "num_train_epochs": 6}
    fields |= {"logging_steps": 8, "gradient_checkpointing": True, "bf16": bf16}
    run(tmp_path, **fields, output_dir=str(tmp_path / "adapter"))
    lines = [line for line in read_metrics(tmp_path / "adapter") if "loss" in line]
    losses = [line["loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    # The frozen head is random and can't be sure of anything, but the right token comes first more and more often.
    assert lines[0]["mean_token_accuracy"] < 0.2
    assert lines[-1]["mean_token_accuracy"] > 0.5

    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    gain = saved["base_model.model.model.multi_modal_projector.norm.weight"]
    start = load_file(composed() / "model.safetensors")["model.multi_modal_projector.norm.weight"]
    assert (gain != start).all()  # none of it would have moved in bfloat16

    # The adapter reloads to the same logits, here on the base that it was trained on.
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
        expected = adapted(**batch).logits

    # Merged, it is an ordinary folder of the class that gives the same logits.
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
    for name in ("run.json", "trainer_state.json", "metrics.jsonl"):  # of which its model card is made
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)

    # Training on from the adapter would save no more than the adapter.
    onward = {**INSTRUCT, "model_name_or_path": str(tmp_path / "adapter"), "dataset_name": str(data)}
    with pytest.raises(ValueError, match=r"is an adapter, not a whole model. Merge it .*training/merge.py"):
        run(tmp_path, **onward, output_dir=str(tmp_path / "onward"))


def test_an_adapter_without_all_of_its_weights_is_refused(composed: Callable[..., Path], tmp_path: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no adapter: give the output folder of a run of stage 'adapt'"):
        merge(composed())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for part in ("multi_modal_projector.norm.weight", "layers.0.self_attn.q_proj.lora_A"):
        kept = {name: weight for name, weight in weights.items() if part not in name}
        assert len(kept) == len(weights) - 1
        save_file(kept, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"adapter does not fit. Weights missing: 1, first .*(norm|lora_A)"):
            AutoModelForImageTextToText.from_pretrained(tmp_path)
        with pytest.raises((KeyError, ValueError), match=part):
            merge(tmp_path)


def test_merging_loads_the_base_once_at_the_revision_that_was_trained_on(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4, revision="v1.0").save_pretrained(tmp_path / "adapter")
    load, loaded = AutoModelForImageTextToText.from_pretrained, []

    def noting(*args: Any, **options: Any) -> NormLlavaForConditionalGeneration:
        loaded.append(options["revision"])
        return load(*args, **options)

    monkeypatch.setattr("training.merge.AutoModelForImageTextToText.from_pretrained", noting)
    merged = merge(tmp_path / "adapter")
    assert merged.lm_head.weight.dtype == torch.bfloat16  # as the base
    assert merged.model.multi_modal_projector.norm.weight.dtype == torch.float32
    assert loaded == ["v1.0"]
