"""Defines the figures of training, and computes model FLOPs.

**Tokens** are the tokens of a step's samples, image tokens included and padding not.

**Tokens per second** are the tokens of all measured steps over the time from the end of the warm-up to the end of the
last step. This includes all that a trainer does between steps.

**Model FLOPs** are what a step needs, not what the device did: nothing is computed twice, and padding isn't computed.
- Only linear layers and convolutions count. For each token, a layer's matrix of N numbers takes 6N FLOPs if it is
  trained (2N forward, 2N for the gradient of its input, 2N for the gradient of the matrix), 4N if it is frozen and
  gradients pass through it, and 2N if no gradients pass.
- The encoder computes the layers that the model reads, for every patch and the CLS token. The head computes the
  supervised tokens.
- For a sample of L tokens and heads with H numbers in all, attention takes 2 L² H FLOPs forward in the decoder, which
  is causal, and 4 L² H in the encoder. It takes three times as many if gradients pass.

**Shares** are model FLOPs over what the device could have done in the same time. One share is of 989 TFLOP/s, the peak
of an H100 and an H200 in bfloat16, the other of the fastest matrix product measured on the same device.

**The layers' time** is the time between the decoder's entrance and its last norm, forward and backward. It includes
what checkpointing computes again, masks and rotary embeddings. Its share counts the FLOPs of the layers only.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from training.stages import base_model, unread_parameters


PEAK_FLOPS = 989e12  # bfloat16, dense: an H100 SXM and an H200


@dataclass(frozen=True)
class Work:
    """The inputs of one or more steps."""

    lengths: list[int]
    """The number of tokens of each sample, without padding."""
    num_images: int
    num_supervised: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of the whole model, and of the decoder's layers alone."""

    layers: int
    whole: int


def model_flops(trained: Any, work: Work) -> Flops:
    """The model FLOPs of training, as this file defines them.

    Args:
        trained: A Llava or NormLlava, or the `PeftModel` around it, prepared for its stage.
        work: The inputs of the training.
    """
    model = base_model(trained)
    encoder = model.model.vision_tower
    num_positions = encoder_positions(model)
    encoder_is_trained = any(parameter.requires_grad for parameter in encoder.parameters())

    # Of one picture.
    encoding = weight_flops(encoder, gradients_pass=encoder_is_trained, unread=unread_weights(model)) * num_positions
    encoding += encoder_attention_flops(model, encoder_is_trained)
    projecting = weight_flops(model.model.multi_modal_projector, gradients_pass=True) * model.config.image_seq_length

    # Of all samples.
    layers = model.model.language_model.layers
    decoding = weight_flops(layers, gradients_pass=True) * work.num_tokens
    decoding += len(layers) * decoder_attention_flops(model, work.lengths)
    scoring = weight_flops(model.get_output_embeddings(), gradients_pass=True) * work.num_supervised

    return Flops(layers=decoding, whole=(encoding + projecting) * work.num_images + decoding + scoring)


def weight_flops(module: nn.Module, gradients_pass: bool, unread: frozenset[int] = frozenset()) -> int:
    """The model FLOPs of a module's weights for one token.

    Args:
        module: The module.
        gradients_pass: Whether gradients pass through frozen layers.
        unread: The `id` of each weight that is not counted.
    """
    total = 0
    for name, part in module.named_modules():
        # Where PEFT trains a module in full, it keeps the weights from before as `original_module`.
        if ".original_module" in f".{name}" or not isinstance(part, nn.Linear | nn.Conv2d):
            continue
        if id(part.weight) in unread:
            continue
        if part.weight.requires_grad:
            factor = 6
        elif gradients_pass:
            factor = 4
        else:
            factor = 2
        total += factor * num_weights(part)
    return total


def num_weights(part: nn.Linear | nn.Conv2d) -> int:
    """How many numbers a layer's matrix has."""
    if isinstance(part, nn.Linear):
        # Not `numel()`: of 4-bit weights two share an element.
        return part.in_features * part.out_features
    return part.weight.numel()


def unread_weights(model: Any) -> frozenset[int]:
    """The `id` of each parameter of the encoder that the model's features don't depend on."""
    names = unread_parameters(model)
    return frozenset(id(parameter) for name, parameter in model.named_parameters() if name in names)


def encoder_positions(model: Any) -> int:
    """The number of a picture's tokens in the encoder: its patches, and the CLS token if there is one."""
    num_patches = model.config.image_seq_length
    has_cls_token = model.config.vision_feature_select_strategy == "default"
    return num_patches + 1 if has_cls_token else num_patches


def encoder_attention_flops(model: Any, gradients_pass: bool) -> int:
    """The model FLOPs of attention in the encoder's layers that the model reads, for one picture."""
    config = model.config.vision_config
    # `vision_feature_layer` is an index of `hidden_states`, which begins with the embeddings.
    num_layers = model.config.vision_feature_layer % (config.num_hidden_layers + 1)
    forward = 4 * encoder_positions(model) ** 2 * config.hidden_size * num_layers
    return 3 * forward if gradients_pass else forward


def decoder_attention_flops(model: Any, lengths: list[int]) -> int:
    """The model FLOPs of attention in one layer of the decoder, for samples of these lengths."""
    config = model.config.text_config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    return sum(3 * 2 * length**2 * width for length in lengths)
