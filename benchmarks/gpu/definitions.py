"""What the figures of training mean, once for all of them.

**Tokens** are those that a step is given, without padding, image tokens included.

**Tokens per second** are the tokens of all timed steps over the time from the end of the warm-up to the end of the
last step, with all that a trainer does in between.

**Model FLOPs** are what the step needs, not what the device did: nothing is computed twice, padding is not computed.
- A weight of N numbers takes 6N a token if it is trained (2N forward, 2N for its input's gradient, 2N for its own), 4N
  if it is frozen and gradients pass through it, and 2N where none do. Only linear layers and convolutions count.
- The encoder computes the layers that are read, for every patch and a CLS token. The head computes the tokens that
  are supervised.
- Attention takes 2 L² H forward in the decoder, which is causal, and 4 L² H in the encoder, for a sample of L tokens
  and heads of together H numbers; three times that where gradients pass.

**Shares** are model FLOPs over what the device could have done in that time: at 989 TFLOP/s, an H100's and an H200's
peak in bfloat16, and at the best matrix product that this very device reached.

**The layers' time** is that between the decoder's entrance and its last norm, forward and backward: its layers, with
what checkpointing computes again, masks and rotary embeddings. Its share is of the layers' own FLOPs.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from training.stages import base_model, unread_parameters


PEAK_FLOPS = 989e12  # bfloat16, dense: an H100 SXM and an H200


@dataclass(frozen=True)
class Work:
    """What a step, or several, is given."""

    lengths: list[int]
    """Tokens of each sample, without padding."""
    num_images: int
    num_supervised: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Flops:
    """Model FLOPs."""

    layers: int
    """Those of the decoder's layers."""
    whole: int
    """Those of the whole step."""


def model_flops(trained: Any, work: Work) -> Flops:
    """Model FLOPs of training on some `work`, by the definitions of this file.

    Args:
        trained: A Llava or NormLlava, or the `PeftModel` around it, prepared for its stage.
        work: What it is given.
    """
    model = base_model(trained)
    encoder = model.model.vision_tower
    num_positions = encoder_positions(model)
    encoder_is_trained = any(parameter.requires_grad for parameter in encoder.parameters())

    # For a picture.
    encoding = weight_flops(encoder, gradients_pass=encoder_is_trained, unread=unread_weights(model)) * num_positions
    encoding += encoder_attention_flops(model, encoder_is_trained)
    projecting = weight_flops(model.model.multi_modal_projector, gradients_pass=True) * model.config.image_seq_length

    # For all samples.
    layers = model.model.language_model.layers
    decoding = weight_flops(layers, gradients_pass=True) * work.num_tokens
    decoding += len(layers) * decoder_attention_flops(model, work.lengths)
    scoring = weight_flops(model.get_output_embeddings(), gradients_pass=True) * work.num_supervised

    return Flops(layers=decoding, whole=(encoding + projecting) * work.num_images + decoding + scoring)


def weight_flops(module: nn.Module, gradients_pass: bool, unread: frozenset[int] = frozenset()) -> int:
    """Model FLOPs a token of a module's weights, without those whose `id` is in `unread`."""
    total = 0
    for name, part in module.named_modules():
        # PEFT keeps the weights from before beside those that it trains in full.
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
    """Numbers of a layer's matrix. A linear layer's are counted by its shape: of 4-bit weights two share a byte."""
    if isinstance(part, nn.Linear):
        return part.in_features * part.out_features
    return part.weight.numel()


def unread_weights(model: Any) -> frozenset[int]:
    """The `id`s of the encoder's parameters that the model's features don't depend on."""
    names = unread_parameters(model)
    return frozenset(id(parameter) for name, parameter in model.named_parameters() if name in names)


def encoder_positions(model: Any) -> int:
    """Tokens of a picture in the encoder: its patches, and the CLS token, which the model leaves out afterwards."""
    num_patches = model.config.image_seq_length
    has_cls_token = model.config.vision_feature_select_strategy == "default"
    return num_patches + 1 if has_cls_token else num_patches


def encoder_attention_flops(model: Any, gradients_pass: bool) -> int:
    """Model FLOPs of attention in the encoder's layers that are read, for a picture."""
    config = model.config.vision_config
    # `hidden_states` holds the embeddings too, at 0.
    num_layers = model.config.vision_feature_layer % (config.num_hidden_layers + 1)
    forward = 4 * encoder_positions(model) ** 2 * config.hidden_size * num_layers
    return 3 * forward if gradients_pass else forward


def decoder_attention_flops(model: Any, lengths: list[int]) -> int:
    """Model FLOPs of attention in one layer of the decoder, for samples of these lengths."""
    config = model.config.text_config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    return sum(3 * 2 * length**2 * width for length in lengths)
