"""Which modules a stage freezes, their dtypes and learning rates, and that a frozen encoder isn't recomputed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_normllava import NormLlavaForConditionalGeneration
from training.arguments import RunArguments, TrainingConfig
from training.loading import load_base, prepare_model
from training.stages import LearningRates, Stage, describe_stage, prepare_stage


def load(folder: Path, output_dir: Path, **fields: Any) -> NormLlavaForConditionalGeneration:
    """The model of a run with these recipe fields."""
    run_args = RunArguments(model_name_or_path=str(folder), dataset_name="", **fields)
    return load_base(run_args, TrainingConfig(output_dir=str(output_dir), use_cpu=True, bf16=False))


def test_the_modules_to_shard_are_in_the_model(composed: Callable[..., Path], tmp_path: Path) -> None:
    """FSDP2 shards modules of the classes that `_no_split_modules` names."""
    model = load(composed(), tmp_path, stage="align")
    to_shard = set(model._no_split_modules)
    assert {"NormLlavaMultiModalProjector", "Qwen2DecoderLayer", "SiglipEncoderLayer"} <= to_shard
    assert to_shard <= {type(module).__name__ for module in model.modules()}


def test_a_recipe_names_the_attention_of_the_language_model(composed: Callable[..., Path], tmp_path: Path) -> None:
    model = load(composed(), tmp_path, stage="align", attn_implementation="eager")
    assert model.config.text_config._attn_implementation == "eager"


def test_a_padding_token_that_ends_turns_is_trained(composed: Callable[..., Path], tmp_path: Path) -> None:
    """Trainer saves the tokenizer's padding token in the config, and torch gives its embedding no gradient."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    model.config.text_config.pad_token_id = 6
    model.save_pretrained(tmp_path)
    model = load(tmp_path, tmp_path, stage="instruct")
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert model.get_input_embeddings().weight.grad[6].any()


def test_trained_weights_are_float32_in_bfloat16_training(composed: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    rates = LearningRates(common=1e-3, vision=0.0, norm=1e-3)
    groups = prepare_stage(model, Stage.ALIGN, rates, frozen_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_trained = name.startswith("model.multi_modal_projector.")
        assert parameter.requires_grad == is_trained, name
        assert parameter.dtype == (torch.float32 if is_trained else torch.bfloat16), name

    # Every parameter is in exactly one group.
    names_in_groups = [name for group in groups for name in group.parameters]
    assert sorted(names_in_groups) == sorted(name for name, _ in model.named_parameters())

    table = describe_stage(Stage.ALIGN, groups)
    assert "bfloat16                frozen" in table
    assert "0.001" in table


@pytest.mark.parametrize("stage", [Stage.ALIGN, Stage.INSTRUCT])
def test_checkpointing_does_not_recompute_a_frozen_encoder(
    model: NormLlavaForConditionalGeneration, stage: Stage
) -> None:
    inputs = {
        "input_ids": torch.tensor([[*[model.config.image_token_id] * 4, 5, 6, 7, 8]]),
        "pixel_values": torch.rand(1, 3, 28, 28),
        "labels": torch.tensor([[-100] * 5 + [6, 7, 8]]),
    }
    prepare_stage(model, stage, LearningRates(common=1e-3, vision=2e-4, norm=1e-3))
    model.train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    expected_gradients = gradients()

    num_calls = 0

    def count_call(*args: object) -> None:
        nonlocal num_calls
        num_calls += 1

    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.vision_tower.encoder.layers[0].self_attn.register_forward_hook(count_call)
    torch.testing.assert_close(gradients(), expected_gradients)
    assert num_calls == (1 if stage is Stage.ALIGN else 2)  # a trained encoder runs again in the backward pass


def test_a_learning_rate_of_0_is_not_taken_for_a_missing_one(
    model: NormLlavaForConditionalGeneration, tmp_path: Path
) -> None:
    fields = {"norm_learning_rate": 0.0, "projector_learning_rate": 0.0}
    run_args = RunArguments(model_name_or_path="m", dataset_name="d", stage="align", **fields)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    _, groups = prepare_model(model, run_args, args, args.frozen_dtype)
    # Frozen modules have no rate. The projector and its norm have the rate 0, and not the recipe's common one.
    assert {group.learning_rate for group in groups} == {None, 0.0}
