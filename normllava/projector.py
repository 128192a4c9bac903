"""Scales a model's projector once, so that image embeddings enter the decoder with the norm of text embeddings.

This is the arm "scaled once" of the studies in docs/. "The Unseen Bias" (arXiv 2512.08374) puts a LayerNorm after the
projector instead, see [`~normllava.llava.add_norm`].
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from normllava.errors import UserError
from normllava.inputs import eval_mode, load_processor, noise_pictures, prepare_picture
from normllava.norms import input_scale, text_norm_target, token_norms, vocabulary_norms
from normllava.parts import find_decoder, layer_input
from normllava.tokens import Inputs, Tokens, classify_sample, exclude_newlines, token_ids


# How far image embeddings may be from the scaled ones, relative to their norm. The weights' rounding comes on top.
TOLERANCE = 1e-3
# The number of pictures on which the scaled embeddings are compared, token by token.
NUM_COMPARED = 8
# The number of modules that are tried, from the last one before the decoder.
NUM_TRIED = 2
# The way out where a trainer or a launcher has changed the model.
SCALE_BEFORE = "scale it in a process of its own, save it, and train from that folder"
# A part of the names of parameters of which PEFT keeps an original and copies.
PEFT_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)\.")


@dataclass(frozen=True)
class ScaledProjector:
    """What [`scale_projector`] did. A ratio is the mean norm of image embeddings over that of the whole vocabulary.

    Attributes:
        parameters: The names of the parameters that were multiplied.
        factor: The number that they were multiplied by.
        ratio_before: The ratio before, on the pictures that were measured.
        ratio_after: The ratio after, on the same pictures.
        num_pictures: The number of pictures that were given; 0 if noise was measured.
        ratio_on_noise: The ratio before, on pictures of noise.
        has_deep_features: Whether features of pictures also enter later layers, which stay as they were.
    """

    parameters: list[str]
    factor: float
    ratio_before: float
    ratio_after: float
    num_pictures: int
    ratio_on_noise: float
    has_deep_features: bool

    def __str__(self) -> str:
        measured = "pictures of noise"
        if self.num_pictures:
            measured = f"your {self.num_pictures} pictures ({self.ratio_on_noise:.3g} on noise)"
        lines = [
            f"Image embeddings had {self.ratio_before:.3g} times the norm of text on {measured}, and have "
            f"{self.ratio_after:.3g} times now.",
            f"Multiplied by {self.factor:.4g}: {', '.join(self.parameters)}",
        ]
        if self.has_deep_features:
            lines.append("The features of pictures that enter later layers (deepstack) are as they were.")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Embeddings:
    """What enters the decoder's first layer for one picture: the sequence, and which positions are what."""

    states: torch.Tensor  # [sequence_length, hidden_size]
    tokens: Tokens
    input_ids: torch.Tensor  # [sequence_length]


class _FirstLayerReached(Exception):
    """Ends a forward pass where the decoder begins, since nothing after it is measured."""


@torch.no_grad()
def scale_projector(
    model: PreTrainedModel,
    processor: Any = None,
    pictures: Iterable[Image.Image] | None = None,
    target_ratio: float = 1.0,
) -> ScaledProjector:
    """Multiply a projector's last weights, in place, so that image embeddings have the norm of text embeddings.

    The projector is found by running the model: of all modules with parameters outside the decoder, the one that
    computes last before the decoder's first layer is scaled. Then the embeddings are measured again, and each must be
    multiplied by the factor. The saved model is loaded by its own class, without this package.

    Save the scaled model, and train from its folder: a LoRA adapter names the folder of its model, and TRL's DPO loads
    its reference model from there.

    Args:
        model: A vision-language model, or the `PeftModel` around it.
        processor: The model's processor, or its image processor; by default the one that the model was published with.
        pictures: Pictures to measure on, such as some of your training data; by default eight of noise.
        target_ratio: The mean norm that image embeddings get, as a multiple of the vocabulary's mean norm.

    Raises:
        UserError: if the projector can't be scaled: its weights are quantized, sharded or without data, a norm without
            a gain follows it, or the embeddings aren't multiplied by the factor. The weights are then as they were.
    """
    if not (math.isfinite(target_ratio) and target_ratio > 0):
        raise UserError(f"target_ratio {target_ratio}: it is a number above 0.")
    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    require_whole_weights(model)
    if processor is None:
        processor = load_processor(model)
    noise = noise_pictures(model)
    given = None if pictures is None else list(pictures)
    if given == []:
        raise UserError("pictures is empty: give some pictures, or leave it out to measure noise.")
    measured = noise if given is None else given

    with eval_mode(model):
        vocabulary = vocabulary_norms(model)
        ratio_before = measure_ratio(model, processor, measured, vocabulary)
        ratio_on_noise = ratio_before if given is None else measure_ratio(model, processor, noise, vocabulary)
        factor = target_ratio / ratio_before
        samples = [prepare_picture(model, processor, picture) for picture in measured[:NUM_COMPARED]]
        parameters = multiply_projector(model, samples, factor, ratio_before)
        ratio_after = measure_ratio(model, processor, measured, vocabulary)

    return ScaledProjector(
        parameters=parameters,
        factor=factor,
        ratio_before=ratio_before,
        ratio_after=ratio_after,
        num_pictures=0 if given is None else len(given),
        ratio_on_noise=ratio_on_noise,
        has_deep_features="deepstack" in str(model.config.to_dict()),
    )


def measure_embeddings(model: PreTrainedModel, inputs: Inputs) -> _Embeddings:
    """What enters the decoder's first layer for a sample."""
    states: list[torch.Tensor] = []

    def keep_input(module: nn.Module, args: Any, kwargs: Inputs) -> None:
        states.append(layer_input(args, kwargs))
        raise _FirstLayerReached

    with find_decoder(model).layers[0].register_forward_pre_hook(keep_input, with_kwargs=True):
        run_to_first_layer(model, inputs)
    tokens = classify_sample(inputs, token_ids(model))
    return _Embeddings(states[0][0].cpu(), tokens, inputs["input_ids"][0].cpu())


def run_to_first_layer(model: PreTrainedModel, inputs: Inputs) -> None:
    """Run a forward pass that a hook may end at the decoder's first layer."""
    with suppress(_FirstLayerReached):
        model(**inputs)


def measure_ratio(
    model: PreTrainedModel, processor: Any, pictures: Sequence[Image.Image], vocabulary: torch.Tensor
) -> float:
    """The mean norm of image embeddings over the mean norm of the vocabulary's embeddings, at the decoder's input.

    Newline features, which some models put among a picture's features, are left out.

    Args:
        model: The model.
        processor: Its processor or image processor.
        pictures: The pictures to measure on.
        vocabulary: Norms of all text embeddings, `(num_embeddings,)`.

    Raises:
        UserError: if the embeddings are all zero, or not finite.
    """
    image_norms = []
    text_norms = []
    embedded_norms = []
    for picture in pictures:
        embeddings = measure_embeddings(model, prepare_picture(model, processor, picture))
        tokens = embeddings.tokens
        norms = token_norms(embeddings.states)  # [sequence_length]
        image_norms.append(norms[exclude_newlines(model, embeddings.states.float(), tokens).image])
        text_norms.append(norms[tokens.text])
        embedded_norms.append(vocabulary[embeddings.input_ids[tokens.text]])

    # Some decoders multiply their whole input, so text embeddings are measured with the same factor.
    scale = input_scale(torch.cat(text_norms), torch.cat(embedded_norms))
    ratio = torch.cat(image_norms).double().mean().item() / text_norm_target(scale * vocabulary)
    if not (math.isfinite(ratio) and ratio > 0):
        raise UserError(
            f"Image embeddings have {ratio} times the norm of text: the projector or the encoder has no trained "
            "weights, or overflows in this dtype."
        )
    return ratio


def multiply_projector(model: PreTrainedModel, samples: Sequence[Inputs], factor: float, ratio: float) -> list[str]:
    """Multiply the last weights before the decoder that all image embeddings follow.

    These are the parameters of one of the modules that finish last before the decoder. Where other features are put
    among its output, such as the newline features of LLaVA-NeXT, they are bare parameters of a module around the
    decoder, which are multiplied too if the module's alone don't do.

    Args:
        model: The model.
        samples: The model's inputs for some pictures.
        factor: The number to multiply by.
        ratio: The ratio of norms before, for an error.

    Returns:
        The names of the parameters that were multiplied.

    Raises:
        UserError: if the parameters can't be multiplied, or the embeddings don't follow. The parameters are then as
            they were, to the bit.
    """
    parameters = dict(model.named_parameters())
    around = names_around_decoder(model)
    before = [measure_embeddings(model, inputs) for inputs in samples]
    tried: list[list[str]] = []
    has_no_effect: list[bool] = []
    for names in names_in_last_modules(model, samples[0]):
        for without_copies in (names, names + around) if around else (names,):
            chosen = without_copies + names_of_copies(parameters, without_copies)
            require_plain_weights({name: parameters[name] for name in chosen})
            saved = {name: parameters[name].clone() for name in chosen}
            follows = False
            try:
                for name in chosen:
                    parameters[name].mul_(factor)
                after = [measure_embeddings(model, inputs) for inputs in samples]
                follows = are_multiplied(before, after, factor)
            finally:
                if not follows:
                    for name in chosen:
                        parameters[name].copy_(saved[name])
            if follows:
                return chosen
            tried.append(chosen)
            is_all_zero = not any(bool(weights.any()) for weights in saved.values())
            has_no_effect.append(not is_all_zero and are_multiplied(before, after, 1.0))

    if any(".lora_" in name for name in tried[0]):
        raise UserError("The projector has LoRA adapters: scale the model before adapters are added, or merge them.")
    if has_no_effect[0]:
        raise UserError(
            f"{', '.join(tried[0])}: a norm without a gain follows. So image embeddings have {ratio:.3g} times the "
            "norm of text by construction, and no weight before that norm changes it."
        )
    texts = [", ".join(names) for names in tried]
    raise UserError(
        f"Image embeddings didn't follow a multiplication by {factor:.4g} of {'; nor of '.join(texts)}. The weights "
        "are as they were: scale the embeddings by hand, in the model's own code."
    )


def names_in_last_modules(model: PreTrainedModel, inputs: Inputs) -> list[list[str]]:
    """The names of the parameters of each of the modules that finish last before the decoder, the very last first.

    Modules inside the decoder don't count, nor do the text embeddings. A module's own parameters count, and not those
    of the modules inside of it. The last to finish need not be the last to compute: a module that holds others
    finishes after them.
    """
    inside = set(find_decoder(model).modules()) | {model.get_input_embeddings()}
    finished: list[str] = []  # names of modules

    def stop(module: nn.Module, args: Any, kwargs: Inputs) -> None:
        raise _FirstLayerReached

    with ExitStack() as hooks:
        hooks.enter_context(find_decoder(model).layers[0].register_forward_pre_hook(stop, with_kwargs=True))
        for name, module in model.named_modules():
            has_own_parameters = any(True for _ in module.parameters(recurse=False))
            if has_own_parameters and module not in inside:
                note = partial(_note_finished, finished, name)
                hooks.enter_context(module.register_forward_hook(note))
        run_to_first_layer(model, inputs)

    if not finished:
        raise UserError("No module with weights runs before the decoder, so there is nothing to scale.")
    names = []
    for module_name in finished[: -NUM_TRIED - 1 : -1]:
        own_parameters = model.get_submodule(module_name).named_parameters(prefix=module_name, recurse=False)
        names.append([name for name, _ in own_parameters])
    return names


def _note_finished(finished: list[str], name: str, module: nn.Module, args: Any, output: Any) -> None:
    finished.append(name)


def names_around_decoder(model: PreTrainedModel) -> list[str]:
    """The names of the bare parameters of modules around the decoder, if they have its width."""
    decoder = find_decoder(model)
    width = model.get_input_embeddings().weight.shape[-1]
    names = []
    for module_name, module in model.named_modules():
        is_around = module is not decoder and decoder in set(module.modules())
        if is_around:
            own_parameters = module.named_parameters(prefix=module_name, recurse=False)
            names += [name for name, parameter in own_parameters if parameter.shape[-1:] == (width,)]
    return names


def require_whole_weights(model: PreTrainedModel) -> None:
    """Refuse a model that can't be run here, since a trainer has sharded it, or it has no data at all.

    Raises:
        UserError: if it is. The message says what to do.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) or parameter.numel() == 0:  # of FSDP2, or of DeepSpeed's ZeRO-3
            raise UserError(f"{name} is sharded: {SCALE_BEFORE}.")
    if all(parameter.is_meta for parameter in parameters.values()):
        raise UserError(f"The model has no data in this process: {SCALE_BEFORE}.")


def require_plain_weights(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that can't be multiplied here.

    Raises:
        UserError: if a parameter is quantized or without data. The message says what to do.
    """
    for name, parameter in parameters.items():
        # bitsandbytes can store 4-bit weights as floats, too.
        if not parameter.is_floating_point() or hasattr(parameter, "quant_state"):
            raise UserError(
                f"{name} is quantized: load the model without quantization, scale it, save it, and load that folder "
                "quantized."
            )
        if parameter.is_meta:
            raise UserError(f"{name} has no data here: load the model without device_map or offloading, and scale it.")


def are_multiplied(before: Sequence[_Embeddings], after: Sequence[_Embeddings], factor: float) -> bool:
    """Whether each image embedding is `factor` times what it was, and text as it was, except for rounding."""
    for old, new in zip(before, after, strict=True):
        factors = torch.where(old.tokens.image, factor, 1.0)  # [sequence_length]
        expected = factors[:, None] * old.states.float()
        errors = (new.states.float() - expected).norm(dim=-1)
        # Weights and embeddings are rounded to the embeddings' dtype.
        tolerance = max(TOLERANCE, 4 * torch.finfo(old.states.dtype).eps)
        if not (errors <= tolerance * expected.norm(dim=-1)).all():  # false for NaN
            return False
    return True


def names_of_copies(parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> list[str]:
    """The names of the other copies that PEFT keeps of parameters: the base's, and those of other adapters."""
    originals = {PEFT_COPY.sub(".", name) for name in names if PEFT_COPY.search(name)}
    return [name for name in parameters if PEFT_COPY.sub(".", name) in originals and name not in names]
