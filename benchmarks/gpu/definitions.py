"""Defines the figures of training, and computes model FLOPs.

**Tokens** are the tokens of a step's samples. Image tokens count, padding doesn't.

**Tokens per second** are the tokens of all measured steps over the time from the end of the warm-up to the end of the
last step. This includes all that a trainer does between steps.

**Model FLOPs** are the FLOPs that a step needs, not those that the device did: what gradient checkpointing computes a
second time doesn't count, and neither does padding. Model FLOPs are the sum of two kinds:
- Linear layers and convolutions. For each token, a matrix of N weights takes 6N FLOPs if the matrix is trained (2N
  forward, 2N for the gradient of the input, 2N for the gradient of the matrix), 4N if the matrix is frozen and
  gradients pass through it, and 2N if no gradients pass.
- Attention. For a sample of L tokens, a layer whose query has H numbers for each token (number of heads times head
  size) takes 2 L² H FLOPs forward in the decoder, which is causal, and 4 L² H in the encoder. Forward and backward
  together take three times as many.

A layer of the encoder counts only if the model uses its output, then for every patch and for the CLS token. The
language model's head counts for supervised tokens only.

**Shares** are model FLOPs over the FLOPs of an H100's or H200's peak in the same time, 989 TFLOP/s in bfloat16. What
a matrix product reaches of it is measured by the part "ceilings".

**The layers' time** is the time from the input of the decoder's first layer to the decoder's output, and in the
backward pass from this output to that input. It includes masks, rotary embeddings, the last norm, and what gradient
checkpointing computes again. The layers' share counts the FLOPs of the decoder's layers only.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from training.modules.stages import base_model, unread_parameters


PEAK_FLOPS = 989e12  # bfloat16, dense: an H100 SXM and an H200


@dataclass(frozen=True)
class Work:
    """How much one or more steps compute: the samples, pictures and supervised tokens of the steps' inputs."""

    lengths: list[int]
    """The number of tokens of each sample, without padding."""
    num_images: int
    num_supervised: int
    """The number of tokens that the loss counts."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of the whole model, and of the decoder's layers alone."""

    layers: int
    whole: int


def model_flops(trained_model: Any, work: Work) -> Flops:
    """The model FLOPs of training, as this file defines them.

    Args:
        trained_model: A Llava or NormLlava, or the `PeftModel` around it, prepared for its stage of training.
        work: How much the training computes.
    """
    model = base_model(trained_model)
    encoder = model.model.vision_tower
    num_positions = encoder_positions(model)
    encoder_is_trained = any(parameter.requires_grad for parameter in encoder.parameters())
    unread = unread_weights(model)

    # The FLOPs of one picture: `encoding` in the vision encoder, and `projecting` in the projector.
    encoding = weight_flops(encoder, gradients_pass=encoder_is_trained, unread=unread) * num_positions
    encoding += encoder_attention_flops(model, encoder_is_trained)
    projecting = weight_flops(model.model.multi_modal_projector, gradients_pass=True) * model.config.image_seq_length

    # The FLOPs of all samples: `decoding` in the decoder's layers, and `scoring` in the language model's head.
    layers = model.model.language_model.layers
    decoding = weight_flops(layers, gradients_pass=True) * work.num_tokens
    decoding += len(layers) * decoder_attention_flops(model, work.lengths)
    scoring = weight_flops(model.get_output_embeddings(), gradients_pass=True) * work.num_supervised

    all_pictures = (encoding + projecting) * work.num_images
    return Flops(layers=decoding, whole=all_pictures + decoding + scoring)


def weight_flops(module: nn.Module, gradients_pass: bool, unread: frozenset[int] = frozenset()) -> int:
    """The model FLOPs of a module's weights for one token.

    Args:
        module: The module.
        gradients_pass: Whether gradients pass through the module's frozen layers.
        unread: The `id` of each weight that doesn't count, because the model doesn't use its layer's output.
    """
    total = 0
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        # Where PEFT trains a module in full, it trains a copy and keeps the unused original as `original_module`.
        is_unused_original = "original_module" in name.split(".")
        if is_unused_original or id(layer.weight) in unread:
            continue

        if layer.weight.requires_grad:
            factor = 6
        elif gradients_pass:
            factor = 4
        else:
            factor = 2
        total += factor * num_weights(layer)
    return total


def num_weights(layer: nn.Linear | nn.Conv2d) -> int:
    """The number of weights in a layer's matrix."""
    if isinstance(layer, nn.Linear):
        # For 4-bit weights, `weight.numel()` is only half of this number, as an element holds two weights.
        return layer.in_features * layer.out_features
    return layer.weight.numel()


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
    # `vision_feature_layer` is an index of `hidden_states`, a list of the embeddings and each layer's output. So the
    # model reads as many layers as the index says. The remainder is for negative indices: with 27 layers, -2 gives 26.
    num_layers = model.config.vision_feature_layer % (config.num_hidden_layers + 1)
    forward_flops = 4 * encoder_positions(model) ** 2 * config.hidden_size * num_layers
    return 3 * forward_flops if gradients_pass else forward_flops


def decoder_attention_flops(model: Any, lengths: list[int]) -> int:
    """The model FLOPs of attention in one layer of the decoder, for samples of these lengths."""
    config = model.config.text_config
    # Some configs have no `head_dim`, and in some it is `None`.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_size = config.num_attention_heads * head_dim
    forward_flops = sum(2 * length**2 * query_size for length in lengths)
    return 3 * forward_flops  # gradients always pass
