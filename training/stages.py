"""What each stage trains, in one place: frozen modules, learning rates, dtypes, and the row format."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
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
    """A part of the model that is trained or frozen as a whole."""

    name: str
    parameters: dict[str, nn.Parameter]
    learning_rate: float | None
    """`None` for a frozen part."""


# Vision layers past the one that is read, and what PEFT keeps beside its trained copies.
UNREAD, KEPT = "vision_tower, not read", "originals, kept by PEFT"


def base_model(trained: Any) -> Any:
    """The model inside a `PeftModel`; another model itself."""
    # PEFT is an extra, so its class can't be asked for.
    return trained.get_base_model() if hasattr(trained, "get_base_model") else trained


def prepare_stage(
    model: NormLlavaForConditionalGeneration,
    stage: Stage,
    rates: LearningRates,
    frozen_dtype: torch.dtype = torch.float32,
) -> list[ModuleGroup]:
    """Freeze what the stage doesn't train, give each part its dtype, and return the parts.

    Args:
        model: The model to prepare, in place. Its language model may hold LoRA adapters; for `Stage.ADAPT` it must.
        frozen_dtype: What frozen weights are held in. Quantized weights stay quantized; trained ones are float32.

    Returns:
        The parts of the model; every parameter is in exactly one of them.
    """
    tune_all = stage is Stage.INSTRUCT
    learning_rates = {
        "vision_tower": rates.vision if tune_all else None,
        UNREAD: None,
        "multi_modal_projector": rates.common if rates.projector is None else rates.projector,
        "multi_modal_projector.norm": rates.norm,
        "language_model": rates.common if tune_all else None,
        "language_model.lora": rates.common,
        "language_model.key_adapter": None if stage is Stage.ALIGN else rates.common,
        KEPT: None,
        "lm_head": rates.common if tune_all else None,
    }
    groups = {name: ModuleGroup(name, {}, rate) for name, rate in learning_rates.items()}
    unread = unread_parameters(model)
    for name, parameter in model.named_parameters():  # a tied head appears only as the embedding
        part = name.removeprefix("model.").split(".")[0]
        if name in unread:
            part = UNREAD
        elif ".original_module." in name:
            part = KEPT
        elif part == "multi_modal_projector" and ".norm." in name:
            part += ".norm"
        elif ".lora_" in name:
            part = "language_model.lora"
        elif ".key_adapter." in name:
            part = "language_model.key_adapter"
        groups[part].parameters[name] = parameter
        if parameter.is_floating_point():  # 4-bit weights are packed into bytes
            is_trained = learning_rates[part] is not None
            parameter.requires_grad_(is_trained)
            # In float32 a step of 1e-5 is not lost in rounding. Unread layers get the output of a trained encoder.
            whole = is_trained or (tune_all and part == UNREAD)
            parameter.data = parameter.data.to(torch.float32 if whole else frozen_dtype)
    if not tune_all:
        # With checkpointing, transformers makes the patches require gradients, and a frozen encoder would be
        # recomputed and run backward for nothing.
        model.model.vision_tower.forward = torch.no_grad()(model.model.vision_tower.forward)
    return [group for group in groups.values() if group.parameters]


def unread_parameters(model: NormLlavaForConditionalGeneration) -> set[str]:
    """Names of the vision encoder's parameters that the model's features don't depend on: layers past the one that is
    read, the last norm, a pooling head.

    DDP fails on a trained parameter without a gradient, and encoders name and order these parts differently: so they
    are found from the autograd graph of an encoder without data.
    """
    vision = model.config.vision_config
    with torch.device("meta"):
        tower = AutoModel.from_config(vision, dtype=torch.float32)
        pixel_values = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)
    layers = model.config.vision_feature_layer
    states = tower(pixel_values, output_hidden_states=True).hidden_states
    read = torch.stack([states[layer] for layer in ([layers] if isinstance(layers, int) else layers)])
    parameters = dict(tower.named_parameters(prefix="model.vision_tower"))
    gradients = torch.autograd.grad(read.sum(), list(parameters.values()), allow_unused=True)
    return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None}


def describe_stage(stage: Stage, groups: Iterable[ModuleGroup]) -> str:
    """The table that training prints: module, parameters (of 4-bit weights two a byte), dtype, learning rate."""
    lines = [f"stage: {stage.value}", f"{'module':30}{'parameters':>15}  {'dtype':16}{'learning rate':>14}"]
    for group in groups:
        size = sum(of.numel() * (1 if of.is_floating_point() else 2) for of in group.parameters.values())
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in group.parameters.values()})
        rate = "frozen" if group.learning_rate is None else f"{group.learning_rate:g}"
        lines.append(f"{group.name:30}{size:15,}  {', '.join(dtypes):16}{rate:>14}")
    return "\n".join(lines)
