"""What each stage trains, in one place: frozen modules, learning rates and dtypes."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel

from modeling_normllava import NormLlavaForConditionalGeneration


class Stage(StrEnum):
    """The two stages of LLaVA's training, as "The Unseen Bias" (arXiv 2512.08374, App. E.1) runs them, and a third."""

    ALIGN = "align"
    """Stage 1: only projector and norm, on pictures followed by their captions ("plain" rows)."""
    INSTRUCT = "instruct"
    """Stage 2: everything, on conversations in the language model's chat format."""
    ADAPT = "adapt"
    """Stage 2 on a small GPU: projector and norm, and LoRA adapters in the language model, on conversations. Key
    adapters too, where the model has them; "instruct" trains these with everything else."""


@dataclass(frozen=True)
class LearningRates:
    """Learning rate by module; what a stage freezes has none."""

    common: float
    """Rate of the language model and its head, its adapters, and the projector unless it has its own."""
    vision: float
    """Rate of the vision encoder, which only `Stage.INSTRUCT` trains."""
    norm: float
    """Rate of the projector's norm. An AdamW step of 1e-3 is 5 to 7% of a gain of 0.0134 to 0.02."""
    projector: float | None = None
    """Rate of the projector, the common one by default. One that points at the embeddings already needs far less."""


@dataclass(frozen=True)
class ModuleGroup:
    """A module of the model that is trained or frozen as a whole."""

    name: str
    parameters: dict[str, nn.Parameter]
    learning_rate: float | None
    """`None` for a frozen module."""


# Vision layers past the one that is read, and what PEFT keeps beside its trained copies.
UNREAD = "vision_tower, not read"
KEPT = "originals, kept by PEFT"
# What was added to the language model, by a part of its parameters' names. "align" trains none of it.
ADDED = {".lora_": "language_model.lora", ".key_adapter.": "language_model.key_adapter"}


def prepare_stage(
    model: NormLlavaForConditionalGeneration,
    stage: Stage,
    rates: LearningRates,
    frozen_dtype: torch.dtype = torch.float32,
) -> list[ModuleGroup]:
    """Freeze what the stage doesn't train, give each module its dtype, and return the modules.

    Args:
        model: The model to prepare, in place. Its language model may hold LoRA adapters; for `Stage.ADAPT` it must.
        stage: What to train.
        rates: The learning rates of what is trained.
        frozen_dtype: What frozen weights are held in. Quantized weights stay quantized; trained ones are float32.

    Returns:
        The modules of the model; every parameter is in exactly one of them.
    """
    groups = {name: ModuleGroup(name, {}, rate) for name, rate in module_rates(stage, rates).items()}
    unread = unread_parameters(model)
    for name, parameter in model.named_parameters():  # a tied head appears only as the embedding
        group = groups[module_of(name, unread)]
        group.parameters[name] = parameter
        if not parameter.is_floating_point():
            continue  # 4-bit weights are packed into bytes

        is_trained = group.learning_rate is not None
        # In float32 a step of 1e-5 is not lost in rounding. Unread layers get the output of a trained encoder.
        follows_trained = stage is Stage.INSTRUCT and group.name == UNREAD
        dtype = torch.float32 if is_trained or follows_trained else frozen_dtype
        parameter.requires_grad_(is_trained)
        parameter.data = parameter.data.to(dtype)

    if stage is not Stage.INSTRUCT:
        # With checkpointing, transformers makes the patches require gradients, and a frozen encoder would be
        # recomputed and run backward for nothing.
        model.model.vision_tower.forward = torch.no_grad()(model.model.vision_tower.forward)
    return [group for group in groups.values() if group.parameters]


def module_rates(stage: Stage, rates: LearningRates) -> dict[str, float | None]:
    """Learning rate of each module in a stage, `None` where it is frozen."""
    module_names = (
        "vision_tower",
        UNREAD,
        "multi_modal_projector",
        "multi_modal_projector.norm",
        "language_model",
        *ADDED.values(),
        KEPT,
        "lm_head",
    )
    learning_rates: dict[str, float | None] = dict.fromkeys(module_names)

    learning_rates["multi_modal_projector"] = rates.common if rates.projector is None else rates.projector
    learning_rates["multi_modal_projector.norm"] = rates.norm
    if stage is not Stage.ALIGN:
        learning_rates |= dict.fromkeys(ADDED.values(), rates.common)
    if stage is Stage.INSTRUCT:
        learning_rates["vision_tower"] = rates.vision
        learning_rates["language_model"] = rates.common
        learning_rates["lm_head"] = rates.common
    return learning_rates


def module_of(parameter: str, unread: set[str]) -> str:
    """The module that a parameter belongs to, by its name. `unread` are the names of [`unread_parameters`]."""
    if parameter in unread:
        return UNREAD
    if ".original_module." in parameter:
        return KEPT
    for part, added in ADDED.items():
        if part in parameter:
            return added

    module = parameter.removeprefix("model.").split(".")[0]
    if module == "multi_modal_projector" and ".norm." in parameter:
        return "multi_modal_projector.norm"
    return module


def unread_parameters(model: NormLlavaForConditionalGeneration) -> set[str]:
    """Names of the vision encoder's parameters that the model's features don't depend on.

    They are layers past the one that is read, the last norm, a pooling head. DDP fails on a trained parameter without
    a gradient, and encoders name and order these parts differently: so they are found from the autograd graph of an
    encoder without data.
    """
    config = model.config.vision_config
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, dtype=torch.float32)
        pixel_values = torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    hidden_states = encoder(pixel_values, output_hidden_states=True).hidden_states

    layers = model.config.vision_feature_layer
    if isinstance(layers, int):
        layers = [layers]
    features = torch.stack([hidden_states[layer] for layer in layers])

    parameters = dict(encoder.named_parameters(prefix="model.vision_tower"))
    gradients = torch.autograd.grad(features.sum(), list(parameters.values()), allow_unused=True)
    return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None}


def describe_stage(stage: Stage, groups: Iterable[ModuleGroup]) -> str:
    """The table that training prints: module, number of parameters, dtype, learning rate."""
    lines = [f"stage: {stage.value}", f"{'module':30}{'parameters':>15}  {'dtype':16}{'learning rate':>14}"]
    for group in groups:
        size = sum(num_weights(parameter) for parameter in group.parameters.values())
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in group.parameters.values()}
        rate = "frozen" if group.learning_rate is None else f"{group.learning_rate:g}"
        lines.append(f"{group.name:30}{size:15,}  {', '.join(sorted(dtypes)):16}{rate:>14}")
    return "\n".join(lines)


def num_weights(parameter: nn.Parameter) -> int:
    """Number of a parameter's weights; two 4-bit weights share a byte."""
    if parameter.is_floating_point():
        return parameter.numel()
    return 2 * parameter.numel()


def base_model(trained: Any) -> Any:
    """The model inside a `PeftModel`; another model itself."""
    if isinstance(trained, PeftModel):
        return trained.get_base_model()
    return trained
