"""What each stage trains, in one place: frozen modules, learning rates, dtypes, and the row format."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from modeling_normllava import NormLlavaForConditionalGeneration


class Stage(StrEnum):
    """The two stages of LLaVA's training, as "The Unseen Bias" (arXiv 2512.08374, App. E.1) runs them, and a third."""

    ALIGN = "align"
    """Stage 1: projector and norm alone, on pictures followed by their captions ("plain" rows)."""
    INSTRUCT = "instruct"
    """Stage 2: everything, on conversations in the language model's chat format."""
    ADAPT = "adapt"
    """Stage 2 on a small GPU: projector and norm, and LoRA adapters in the language model, on conversations."""


@dataclass(frozen=True)
class LearningRates:
    """Learning rate by module; what a stage freezes has none."""

    common: float
    """Of the projector, the language model and its head."""
    vision: float
    """Of the vision encoder, which only `Stage.INSTRUCT` trains."""
    norm: float
    """Of the projector's norm. An AdamW step of 1e-3 is 5 to 7% of a gain of 0.0134 to 0.02."""


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
    rates: LearningRates,
    frozen_dtype: torch.dtype = torch.float32,
    trained_dtype: torch.dtype = torch.float32,
) -> list[ModuleGroup]:
    """Freeze what the stage doesn't train, give what it trains its dtype, and say which is which.

    Layers of the vision encoder past the one that is read are not run any more; their weights stay as they are.

    Args:
        model: The model to prepare, in place. Its language model may hold LoRA adapters; for `Stage.ADAPT` it must.
        stage: The stage.
        rates: Learning rate by module.
        frozen_dtype: What frozen weights are held in. Quantized weights stay quantized.
        trained_dtype: What trained weights, and so the optimizer's state, are held in.

    Returns:
        The parts of the model; every parameter is in exactly one of them.
    """
    tune_all = stage is Stage.INSTRUCT
    projector = trained_projector(model)
    vision_tower = dict(model.model.vision_tower.named_parameters(prefix="model.vision_tower"))
    unused = _unused_parameters(model, vision_tower)
    used = {name: parameter for name, parameter in vision_tower.items() if name not in unused}
    not_used = {name: parameter for name, parameter in vision_tower.items() if name in unused}
    _skip_unread_layers(model.model.vision_tower, {id(parameter) for parameter in not_used.values()})
    prefix = next(name for name, module in model.named_modules() if module is projector)
    norm = dict(projector.norm.named_parameters(prefix=f"{prefix}.norm"))
    linear = {n: p for n, p in projector.named_parameters(prefix=prefix) if n not in norm}
    # PEFT trains a copy and keeps the first state beside it.
    kept = dict(model.model.multi_modal_projector.named_parameters(prefix="model.multi_modal_projector"))
    kept = {name: parameter for name, parameter in kept.items() if name not in linear | norm}
    language_model = dict(model.model.language_model.named_parameters(prefix="model.language_model"))
    adapters = {name: parameter for name, parameter in language_model.items() if ".lora_" in name}
    language_model = {name: parameter for name, parameter in language_model.items() if name not in adapters}
    # A tied head is the embedding's own weight, listed there already.
    embeddings = model.get_input_embeddings().weight
    head = {n: p for n, p in model.lm_head.named_parameters(prefix="lm_head") if p is not embeddings}

    groups = [
        ModuleGroup("vision_tower", used, rates.vision if tune_all else None),
        ModuleGroup("vision_tower, not read", not_used, None),
        ModuleGroup("multi_modal_projector", linear, rates.common),
        ModuleGroup("multi_modal_projector.norm", norm, rates.norm),
        ModuleGroup("multi_modal_projector, before", kept, None),
        ModuleGroup("language_model", language_model, rates.common if tune_all else None),
        ModuleGroup("language_model.lora", adapters, rates.common),
        ModuleGroup("lm_head", head, rates.common if tune_all else None),
    ]
    groups = [group for group in groups if group.parameters]
    for group in groups:
        trained = group.learning_rate is not None
        for parameter in group.parameters.values():
            if not parameter.is_floating_point():  # 4-bit weights, packed into bytes
                continue
            parameter.requires_grad_(trained)
            # A step of 1e-5 is lost in the rounding of most bfloat16 weights. What is not read runs on what is.
            whole = trained or (tune_all and group.name.startswith("vision_tower"))
            parameter.data = parameter.data.to(trained_dtype if whole else frozen_dtype)
    return groups


def trained_projector(model: NormLlavaForConditionalGeneration) -> Any:
    """The projector that is trained: the model's own, or the copy of it in an adapter."""
    projector = model.model.multi_modal_projector
    return projector.modules_to_save["default"] if hasattr(projector, "modules_to_save") else projector


def _unused_parameters(
    model: NormLlavaForConditionalGeneration, vision_parameters: dict[str, nn.Parameter]
) -> set[str]:
    """Names of the vision encoder's parameters that its features don't depend on: layers past the one that is read,
    the last norm, a pooling head. The autograd graph tells, so this holds for any encoder."""
    config = model.config.vision_config
    tower = model.model.vision_tower
    pixel_values = torch.zeros(
        1, config.num_channels, config.image_size, config.image_size, dtype=tower.dtype, device=tower.device
    )
    parameters = list(vision_parameters.values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        features = model.model.get_image_features(pixel_values).pooler_output[0]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(vision_parameters, gradients, strict=True) if gradient is None}


def _skip_unread_layers(vision_tower: nn.Module, unused: set[int]) -> None:
    """Let layers that are not read hand their input on: transformers runs all layers and then picks one."""
    for layers in [module for module in vision_tower.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            parameters = list(layer.parameters())
            if parameters and all(id(parameter) in unused for parameter in parameters):
                layer.forward = _hand_on


def _hand_on(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return hidden_states


def describe_stage(stage: Stage, groups: Iterable[ModuleGroup]) -> str:
    """The table that training prints: module, parameters, dtype, learning rate."""
    lines = [f"stage: {stage.value}", f"{'module':30}{'parameters':>15}  {'dtype':16}{'learning rate':>14}"]
    for group in groups:
        size = sum(parameter.numel() for parameter in group.parameters.values())
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in group.parameters.values()})
        rate = "frozen" if group.learning_rate is None else f"{group.learning_rate:g}"
        lines.append(f"{group.name:30}{size:15,}  {', '.join(dtypes):16}{rate:>14}")
    return "\n".join(lines)
