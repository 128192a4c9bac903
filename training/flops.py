"""Arithmetic of a training step: what the mathematics needs, whatever the code does.

Padding, recomputation and vision layers past the one that is read don't count, as in the model FLOPs utilisation of
PaLM (arXiv 2204.02311, App. B). With N weights in matrix products and t tokens, a linear part costs

    forward                    2 N t
    gradient of its input      2 N t    if anything before it is trained
    gradient of its weights    2 N t    if it is trained itself

so a frozen language model costs 4 N t in stage 1, not 6 N t, its LoRA adapters 6 N t, a frozen vision encoder 2 N t.
Key adapters and the losses on keys, which are small, are left out. The head sees only the supervised tokens. Attention
over a sample of L tokens costs 4 L² d a layer forward (d = heads x head size), half of that where it is causal, and
twice the forward again in the backward pass.
"""

from collections.abc import Sequence

from torch import nn

from modeling_normllava import NormLlavaForConditionalGeneration
from training.stages import Stage, trained_projector


def _matrix_weights(module: nn.Module, trained_alone: bool = False) -> int:
    """Number of weights in matrix products; a 4-bit weight counts as one, though it takes half a byte."""
    return sum(
        m.in_features * m.out_features if isinstance(m, nn.Linear) else m.weight.numel()
        for m in module.modules()
        if isinstance(m, nn.Linear | nn.Conv2d) and (m.weight.requires_grad or not trained_alone)
    )


def step_flops(
    model: NormLlavaForConditionalGeneration, stage: Stage, lengths: Sequence[int], pictures: int, supervised: int
) -> float:
    """Model FLOPs of a step, of the tokens of each sample and the pictures and supervised tokens of all, of a model
    that is prepared for the stage."""
    tune_all, text = stage is Stage.INSTRUCT, model.config.text_config
    vision_passes, head_passes = (3, 3) if tune_all else (1, 2)
    decoder = model.model.language_model
    of_token = 2 * _matrix_weights(decoder) + _matrix_weights(decoder, trained_alone=True)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    of_square = text.num_attention_heads * head_size * text.num_hidden_layers * 3

    vision, layers = model.config.vision_config, model.config.vision_feature_layer
    patches, num_layers = (vision.image_size // vision.patch_size) ** 2, vision.num_hidden_layers
    layers = layers if isinstance(layers, list) else [layers]
    depth = max(layer % (num_layers + 1) for layer in layers)  # -1 is the last layer's output
    read = _matrix_weights(model.model.vision_tower) * depth / num_layers
    seen = vision_passes * patches * (read + 2 * patches * vision.hidden_size * depth)
    projector = trained_projector(model)
    # With the encoder frozen nothing before the first of its two layers is trained.
    projected = 3 * _matrix_weights(projector) - (0 if tune_all else _matrix_weights(projector.linear_1))
    of_picture = seen + patches * projected
    of_sequence = of_token * sum(lengths) + of_square * sum(length**2 for length in lengths)
    of_head = model.lm_head.weight.numel() * head_passes * supervised
    return 2.0 * (of_sequence + of_picture * pictures + of_head)
