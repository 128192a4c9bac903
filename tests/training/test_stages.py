"""What a stage freezes, holds in which dtype, and does not run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modeling_normllava import NormLlavaForConditionalGeneration
from training.arguments import RunArguments, TrainingConfig
from training.loading import load_base, prepare_model
from training.stages import LearningRates, Stage, describe_stage, prepare_stage


def test_sharding_finds_the_modules_that_the_model_names(composed: Callable[..., Path], tmp_path: Path) -> None:
    named = {"model_name_or_path": str(composed()), "dataset_name": ""}
    run_args = RunArguments(**named, stage="align", attn_implementation="eager")
    model = load_base(run_args, TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    present = {type(module).__name__ for module in model.modules()}
    assert {"NormLlavaMultiModalProjector", "Qwen2DecoderLayer", "SiglipEncoderLayer"} <= set(model._no_split_modules)
    assert set(model._no_split_modules) <= present
    assert model.config.text_config._attn_implementation == "eager"


def test_a_padding_token_that_ends_turns_is_trained(composed: Callable[..., Path], tmp_path: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    model.config.text_config.pad_token_id = 6  # as Trainer saves it where the tokenizer pads with it
    model.save_pretrained(tmp_path)
    run_args = RunArguments(model_name_or_path=str(tmp_path), dataset_name="", stage="instruct")
    model = load_base(run_args, TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert model.get_input_embeddings().weight.grad[6].any()


def test_trained_weights_are_float32_in_bfloat16_training(composed: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    groups = prepare_stage(model, Stage.ALIGN, LearningRates(1e-3, 0.0, 1e-3), frozen_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        trained = name.startswith("model.multi_modal_projector.")
        assert parameter.requires_grad == trained, name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16), name
    listed = [name for group in groups for name in group.parameters]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    table = describe_stage(Stage.ALIGN, groups)
    assert "bfloat16                frozen" in table
    assert "0.001" in table


@pytest.mark.parametrize("stage", [Stage.ALIGN, Stage.INSTRUCT])
def test_a_frozen_encoder_is_run_once_though_layers_are_checkpointed(
    model: NormLlavaForConditionalGeneration, stage: Stage
) -> None:
    inputs = {
        "input_ids": torch.tensor([[*[model.config.image_token_id] * 4, 5, 6, 7, 8]]),
        "pixel_values": torch.rand(1, 3, 28, 28),
        "labels": torch.tensor([[-100] * 5 + [6, 7, 8]]),
    }
    prepare_stage(model, stage, LearningRates(1e-3, 2e-4, 1e-3))
    model.train()
    gradients, runs = [], 0

    def count(*args: object) -> None:
        nonlocal runs
        runs += 1

    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.model.vision_tower.encoder.layers[0].self_attn.register_forward_hook(count)
        model(**inputs).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert runs == (1 if stage is Stage.ALIGN else 2)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_rate_of_0_is_one(model: NormLlavaForConditionalGeneration, tmp_path: Path) -> None:
    zero = {"norm_learning_rate": 0.0, "projector_learning_rate": 0.0}
    run_args = RunArguments(model_name_or_path="m", dataset_name="d", stage="align", **zero)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    _, groups = prepare_model(model, run_args, args, args.frozen_dtype)
    assert {group.learning_rate for group in groups} == {None, 0.0}
