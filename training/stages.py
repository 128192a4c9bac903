"""What each stage trains, in one place: frozen modules, learning rates, dtypes, and the row format."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from modeling_normllava import NormLlavaForConditionalGeneration


class Stage(StrEnum):
    """The two stages of LLaVA's training, as "The Unseen Bias" (arXiv 2512.08374, App. E.1) runs them."""

    ALIGN = "align"
    """Stage 1: projector and norm alone, on pictures followed by their captions ("plain" rows)."""
    INSTRUCT = "instruct"
    """Stage 2: everything, on conversations in the language model's chat format."""


@dataclass(frozen=True)
class ModuleGroup:
    """A part of the model that is trained, or not, as one."""

    name: str
    parameters: dict[str, nn.Parameter]
    learning_rate: float | None
    """`None` for a frozen part."""


def prepare_stage(
    model: NormLlavaForConditionalGeneration,
    stage: Stage,
    learning_rate: float,
    vision_learning_rate: float,
    frozen_dtype: torch.dtype = torch.float32,
) -> list[ModuleGroup]:
    """Freeze what the stage doesn't train, give what it trains float32 weights, and say which is which.

    Args:
        model: The model to prepare, in place.
        stage: The stage.
        learning_rate: For everything but the vision encoder.
        vision_learning_rate: For the vision encoder, which only `Stage.INSTRUCT` trains.
        frozen_dtype: What frozen weights are held in; trained ones are float32.

    Returns:
        The parts of the model; every parameter is in exactly one of them.
    """
    tune_all = stage is Stage.INSTRUCT
    projector = model.model.multi_modal_projector
    vision_tower = dict(model.model.vision_tower.named_parameters(prefix="model.vision_tower"))
    unused = _unused_parameters(model, vision_tower)
    used = {name: parameter for name, parameter in vision_tower.items() if name not in unused}
    not_used = {name: parameter for name, parameter in vision_tower.items() if name in unused}
    prefix = "model.multi_modal_projector"
    norm = dict(projector.norm.named_parameters(prefix=f"{prefix}.norm"))
    linear = {n: p for n, p in projector.named_parameters(prefix=prefix) if n not in norm}
    language_model = dict(model.model.language_model.named_parameters(prefix="model.language_model"))
    # A tied head is the embedding's own weight, listed there already.
    embeddings = model.get_input_embeddings().weight
    head = {n: p for n, p in model.lm_head.named_parameters(prefix="lm_head") if p is not embeddings}

    groups = [
        ModuleGroup("vision_tower", used, vision_learning_rate if tune_all else None),
        ModuleGroup("vision_tower, not read", not_used, None),
        ModuleGroup("multi_modal_projector", linear, learning_rate),
        ModuleGroup("multi_modal_projector.norm", norm, learning_rate),
        ModuleGroup("language_model", language_model, learning_rate if tune_all else None),
        ModuleGroup("lm_head", head, learning_rate if tune_all else None),
    ]
    groups = [group for group in groups if group.parameters]
    for group in groups:
        trained = group.learning_rate is not None
        for parameter in group.parameters.values():
            parameter.requires_grad_(trained)
            # A step of 1e-5 is lost in the rounding of most bfloat16 weights.
            parameter.data = parameter.data.to(torch.float32 if trained else frozen_dtype)
    return groups


def _unused_parameters(
    model: NormLlavaForConditionalGeneration, vision_parameters: dict[str, nn.Parameter]
) -> set[str]:
    """Names of the vision encoder's parameters that its features don't depend on: layers past the one that is read,
    the last norm, a pooling head. The autograd graph tells, so this holds for any encoder."""
    config = model.config.vision_config
    pixel_values = torch.zeros(1, config.num_channels, config.image_size, config.image_size, dtype=model.dtype)
    parameters = list(vision_parameters.values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        features = model.model.get_image_features(pixel_values.to(model.device)).pooler_output[0]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(vision_parameters, gradients, strict=True) if gradient is None}


def describe_stage(stage: Stage, groups: Iterable[ModuleGroup]) -> str:
    """The table that training prints: module, parameters, dtype, learning rate."""
    lines = [f"stage: {stage.value}", f"{'module':30}{'parameters':>15}  {'dtype':16}{'learning rate':>14}"]
    for group in groups:
        size = sum(parameter.numel() for parameter in group.parameters.values())
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in group.parameters.values()})
        rate = "frozen" if group.learning_rate is None else f"{group.learning_rate:g}"
        lines.append(f"{group.name:30}{size:15,}  {', '.join(dtypes):16}{rate:>14}")
    return "\n".join(lines)
