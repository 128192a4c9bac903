"""Stages: which modules they train, the dtypes and learning rates of modules, and how a run loads its model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_normllava import NormLlavaForConditionalGeneration
from training.folders.loading import load_base, prepare_model
from training.modules.stages import LearningRates, Stage, describe_stage, prepare_stage
from training.options.arguments import RunArguments, TrainingConfig


def load_for_run(folder: Path, output_dir: Path, **fields: Any) -> NormLlavaForConditionalGeneration:
    """The model in `folder`, as a run with these recipe fields loads it."""
    run_args = RunArguments(model_name_or_path=str(folder), dataset_name="unused", **fields)
    args = TrainingConfig(output_dir=str(output_dir), use_cpu=True, bf16=False)
    return load_base(run_args, args)


def test_the_modules_to_shard_are_in_the_model(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """FSDP2 shards the modules whose classes `_no_split_modules` names."""
    model = load_for_run(make_model_folder(), tmp_path, stage="align")
    to_shard = set(model._no_split_modules)
    assert {"NormLlavaMultiModalProjector", "Qwen2DecoderLayer", "SiglipEncoderLayer"} <= to_shard
    assert to_shard <= {type(module).__name__ for module in model.modules()}


def test_the_language_model_gets_the_attention_of_the_recipe(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_for_run(make_model_folder(), tmp_path, stage="align", attn_implementation="eager")
    assert model.config.text_config._attn_implementation == "eager"


def test_a_padding_token_that_ends_turns_is_trained(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Some language models end turns with their padding token, which Trainer saves in the config.

    transformers would give the embedding of the config's padding token no gradient.
    """
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    pad_token_id = 6  # any token will do
    model.config.text_config.pad_token_id = pad_token_id
    model.save_pretrained(tmp_path)
    model = load_for_run(tmp_path, tmp_path, stage="instruct")
    input_ids = torch.tensor([[5, pad_token_id, 7]])
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[pad_token_id].any()


def test_trained_weights_are_float32_in_bfloat16_training(make_model_folder: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.bfloat16)
    rates = LearningRates(common=1e-3, vision=0.0, norm=1e-3)
    groups = prepare_stage(model, Stage.ALIGN, rates, frozen_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_projector = name.startswith("model.multi_modal_projector.")
        expected_dtype = torch.float32 if is_projector else torch.bfloat16
        assert parameter.requires_grad == is_projector, name
        assert parameter.dtype == expected_dtype, name

    table = describe_stage(Stage.ALIGN, groups)
    assert re.search(r"bfloat16 +frozen", table)
    assert "0.001" in table  # the learning rate

    # Every parameter is in exactly one group.
    names_in_groups = [name for group in groups for name in group.parameters]
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names_in_groups) == sorted(names)


@pytest.mark.parametrize("stage", [Stage.ALIGN, Stage.INSTRUCT])
def test_checkpointing_does_not_recompute_a_frozen_encoder(
    model: NormLlavaForConditionalGeneration, stage: Stage
) -> None:
    image_tokens = [model.config.image_token_id] * 4
    inputs = {
        "input_ids": torch.tensor([[*image_tokens, 5, 6, 7, 8]]),
        "pixel_values": torch.rand(1, 3, 28, 28),
        "labels": torch.tensor([[-100] * 5 + [6, 7, 8]]),
    }
    prepare_stage(model, stage, LearningRates(common=1e-3, vision=2e-4, norm=1e-3))
    model.train()

    def compute_gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    expected_gradients = compute_gradients()

    encoder_calls = []
    first_layer = model.model.vision_tower.encoder.layers[0]
    first_layer.self_attn.register_forward_hook(lambda *args: encoder_calls.append("forward"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(compute_gradients(), expected_gradients)
    if stage is Stage.ALIGN:  # the encoder is frozen
        assert len(encoder_calls) == 1
    else:  # the encoder is trained, and runs again in the backward pass
        assert len(encoder_calls) == 2


def test_a_learning_rate_of_0_does_not_fall_back_to_the_common_rate(
    model: NormLlavaForConditionalGeneration, tmp_path: Path
) -> None:
    fields = {"norm_learning_rate": 0.0, "projector_learning_rate": 0.0}
    run_args = RunArguments(model_name_or_path="unused", dataset_name="unused", stage="align", **fields)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    _, groups = prepare_model(model, run_args, args, args.frozen_dtype)
    # Frozen modules have no rate. The projector and its norm have the rate 0, not the recipe's `learning_rate`.
    assert {group.learning_rate for group in groups} == {None, 0.0}
