"""The stages of training: which modules of the model a stage trains, at which learning rates, in which dtypes."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel, LlavaForConditionalGeneration


class Stage(StrEnum):
    """LLaVA's two stages of training, as in "The Unseen Bias" (arXiv 2512.08374, App. E.1), and a third stage."""

    ALIGN = "align"
    """Stage 1: trains only the projector and its norm, on pictures followed by their captions ("plain" rows)."""
    INSTRUCT = "instruct"
    """Stage 2: trains the whole model, on conversations in the language model's chat format."""
    ADAPT = "adapt"
    """Replaces stage 2 on a small GPU: trains the projector, its norm, LoRA adapters in the language model, and key
    adapters if the model has them."""


@dataclass(frozen=True)
class LearningRates:
    """The learning rates that a stage gives to the modules that it trains."""

    common: float
    """Rate of the language model, its head and its adapters, and of the projector if `projector` is `None`."""
    vision: float
    """Rate of the vision encoder, which only `Stage.INSTRUCT` trains."""
    norm: float
    """Rate of the projector's norm. It must be low, because the norm's gains can be as small as 0.0134: an AdamW step
    at a rate of 1e-3 would change such a gain by 7%."""
    projector: float | None = None
    """Rate of the projector, by default `common`. A projector that was aligned (composing/align.py) needs far less."""


@dataclass(frozen=True)
class ModuleGroup:
    """The parameters of a module of the model, which a stage trains or freezes together."""

    name: str
    parameters: dict[str, nn.Parameter]
    """The module's parameters by their names in the model."""
    learning_rate: float | None
    """`None` for a frozen module."""


# The name of the group of the vision encoder's parameters on which the image features don't depend.
UNREAD_VISION = "vision_tower, not read"
# The name of the group of modules that PEFT has copied. PEFT trains the copies, and keeps these originals untrained.
PEFT_ORIGINALS = "originals, kept by PEFT"
# The names of the groups of adapters in the language model, by a part of each adapter parameter's name.
ADAPTERS = {".lora_": "language_model.lora", ".key_adapter.": "language_model.key_adapter"}


def prepare_stage(
    model: LlavaForConditionalGeneration,
    stage: Stage,
    rates: LearningRates,
    frozen_dtype: torch.dtype = torch.float32,
) -> list[ModuleGroup]:
    """Freeze what the stage doesn't train, give each module its dtype, and return the modules.

    Args:
        model: The model to prepare, in place. `Stage.ADAPT` needs LoRA adapters in its language model; the other
            stages allow them.
        stage: The stage to train.
        rates: The learning rates of the modules that the stage trains.
        frozen_dtype: The dtype of frozen weights, except quantized ones, which stay as they are. Trained weights are
            always float32.

    Returns:
        The modules of the model. Every parameter is in exactly one module.
    """
    groups: dict[str, ModuleGroup] = {}
    for module_name, rate in module_rates(stage, rates).items():
        groups[module_name] = ModuleGroup(module_name, {}, rate)

    unread = unread_parameters(model)
    # A head that is tied to the embedding has no parameter of its own here.
    for name, parameter in model.named_parameters():
        group = groups[module_of(name, unread)]
        group.parameters[name] = parameter
        if not parameter.is_floating_point():
            continue  # packed 4-bit weights, which are never trained

        is_trained = group.learning_rate is not None
        # Trained weights are float32, in which small steps are not lost in rounding. The unread layers of a trained
        # encoder are float32 too, because the trained layers before them give float32.
        follows_trained = stage is Stage.INSTRUCT and group.name == UNREAD_VISION
        dtype = frozen_dtype
        if is_trained or follows_trained:
            dtype = torch.float32
        parameter.requires_grad_(is_trained)
        parameter.data = parameter.data.to(dtype)

    if stage is not Stage.INSTRUCT:
        # The frozen encoder runs without gradients. transformers' gradient checkpointing makes the patch embeddings
        # require gradients, so a backward pass through the encoder would otherwise be computed for nothing.
        model.model.vision_tower.forward = torch.no_grad()(model.model.vision_tower.forward)
    return [group for group in groups.values() if group.parameters]


def module_rates(stage: Stage, rates: LearningRates) -> dict[str, float | None]:
    """The learning rate of each module in a stage, by the module's name; `None` if the stage freezes the module."""
    module_names = (
        "vision_tower",
        UNREAD_VISION,
        "multi_modal_projector",
        "multi_modal_projector.norm",
        "language_model",
        *ADAPTERS.values(),
        PEFT_ORIGINALS,
        "lm_head",
    )
    learning_rates: dict[str, float | None] = dict.fromkeys(module_names)  # at first `None` for each: all are frozen

    learning_rates["multi_modal_projector"] = rates.common if rates.projector is None else rates.projector
    learning_rates["multi_modal_projector.norm"] = rates.norm
    if stage is not Stage.ALIGN:
        for adapter in ADAPTERS.values():
            learning_rates[adapter] = rates.common
    if stage is Stage.INSTRUCT:
        learning_rates["vision_tower"] = rates.vision
        learning_rates["language_model"] = rates.common
        learning_rates["lm_head"] = rates.common
    return learning_rates


def module_of(parameter_name: str, unread: set[str]) -> str:
    """The name of the module that a parameter belongs to.

    Args:
        parameter_name: The parameter's name, such as "model.multi_modal_projector.linear_1.weight".
        unread: The names of the vision encoder's [`unread_parameters`].
    """
    if parameter_name in unread:
        return UNREAD_VISION
    if ".original_module." in parameter_name:
        return PEFT_ORIGINALS
    for name_part, adapter in ADAPTERS.items():
        if name_part in parameter_name:
            return adapter

    module = parameter_name.removeprefix("model.").split(".")[0]
    if module == "multi_modal_projector" and ".norm." in parameter_name:
        return "multi_modal_projector.norm"
    return module


def unread_parameters(model: LlavaForConditionalGeneration) -> set[str]:
    """Names of the vision encoder's parameters that the image features don't depend on.

    They belong to the layers after the layer that is read, to the last norm, and to a pooling head. They must not be
    trained, since DDP fails on a trained parameter without a gradient.

    Encoders name and order their layers differently. Therefore a copy of the encoder on the meta device, without data,
    computes features and their gradients. The unread parameters get no gradient.
    """
    config = model.config.vision_config
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, dtype=torch.float32)
        pixel_values = torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    hidden_states = encoder(pixel_values, output_hidden_states=True).hidden_states

    read_layers = model.config.vision_feature_layer
    if isinstance(read_layers, int):
        read_layers = [read_layers]
    features = torch.stack([hidden_states[layer] for layer in read_layers])

    # With `allow_unused`, the gradient of a parameter on which the features don't depend is `None`.
    parameters = dict(encoder.named_parameters(prefix="model.vision_tower"))
    gradients = torch.autograd.grad(features.sum(), list(parameters.values()), allow_unused=True)
    gradient_by_name = dict(zip(parameters, gradients, strict=True))
    return {name for name, gradient in gradient_by_name.items() if gradient is None}


def describe_stage(stage: Stage, groups: Iterable[ModuleGroup]) -> str:
    """The table that training prints, with a line for each module."""
    header = f"{'module':30}{'parameters':>15}  {'dtype':16}{'learning rate':>14}"
    lines = [f"stage: {stage.value}", header]
    for group in groups:
        size = sum(num_weights(parameter) for parameter in group.parameters.values())
        dtype_names = {str(parameter.dtype).removeprefix("torch.") for parameter in group.parameters.values()}
        dtypes = ", ".join(sorted(dtype_names))
        rate = "frozen" if group.learning_rate is None else f"{group.learning_rate:g}"
        lines.append(f"{group.name:30}{size:15,}  {dtypes:16}{rate:>14}")
    return "\n".join(lines)


def num_weights(parameter: nn.Parameter) -> int:
    """The number of weights in a parameter."""
    if parameter.is_floating_point():
        return parameter.numel()
    return 2 * parameter.numel()  # each element is a byte that holds two 4-bit weights


def base_model(trained_model: Any) -> Any:
    """The model inside a `PeftModel`. Any other model is returned as it is."""
    if isinstance(trained_model, PeftModel):
        return trained_model.get_base_model()
    return trained_model
