"""Arithmetic of a training step, for the model FLOPs utilisation (MFU).

MFU = model FLOPs of a step / (seconds of the step x peak FLOP/s of the device), as in PaLM (arXiv 2204.02311, App. B).
Model FLOPs are what the mathematics needs, whatever the code does: padding, recomputation and vision layers past the
one that is read don't count. With N weights in matrix products and t tokens, a linear part costs

    forward                    2 N t
    gradient of its input      2 N t    if anything before it is trained
    gradient of its weights    2 N t    if it is trained itself

so a frozen language model costs 4 N t in stage 1, not 6 N t, its LoRA adapters 6 N t, a frozen vision encoder 2 N t.
Key adapters and the losses on keys, which are small, are left out. The head sees only the supervised tokens. Attention
over a sample of L tokens costs 4 L² d a layer forward (d = heads x head size), half of that where it is causal, and
twice the forward again in the backward pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from trl.trainer.utils import get_peak_flops

from conversations.tokens import IGNORED
from diagnostics.tokens import Inputs
from modeling_normllava import NormLlavaForConditionalGeneration
from training.stages import Stage, trained_projector


def device_peak(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a device by TRL's table of data sheets; `None` if it is not there, is a part of a GPU
    (MIG), or no GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return None if "MIG" in name else get_peak_flops(name, "bfloat16")


class MfuMeter:
    """The share of the devices' peak that training reaches, measured without waiting for the device between logs.

    Args:
        model: The model, prepared for the stage and not yet sharded.
        stage: What is trained.
        peak: FLOP/s of a device.
    """

    def __init__(self, model: NormLlavaForConditionalGeneration, stage: Stage, peak: float) -> None:
        self._costs = torch.tensor(unit_flops(model, stage), dtype=torch.float64)
        self._peak, self._work, self._seconds = peak, torch.zeros_like(self._costs), 0.0

    def add(self, inputs: Inputs) -> None:
        """Count a batch in a collator's layout, on any device."""
        packed = "cu_seq_lens_q" in inputs
        lengths = inputs["cu_seq_lens_q"].diff() if packed else inputs["attention_mask"].sum(1)
        supervised = (inputs["labels"][:, 1:] != IGNORED).sum()
        pictures = torch.full_like(supervised, len(inputs["pixel_values"]))
        lengths = (lengths * (lengths > 1)).double()  # of a packed blank picture each token is a sample
        work = torch.stack([lengths.sum(), lengths.square().sum(), pictures, supervised])
        self._work = self._work.to(work.device) + work

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor], num_processes: int, seconds: float) -> float:
        """The MFU since the last call. All processes must call this.

        Args:
            reduce: Sums a tensor over processes.
            num_processes: Devices that share the work.
            seconds: How long training has taken since its start.
        """
        flops = (reduce(self._work).cpu() * self._costs).sum().item()
        passed, self._seconds = seconds - self._seconds, seconds
        self._work.zero_()
        return flops / (passed * self._peak * num_processes)


def _matrix_weights(module: nn.Module, trained_alone: bool = False) -> int:
    """Number of weights in matrix products; a 4-bit weight counts as one, though it takes half a byte."""
    return sum(
        m.in_features * m.out_features if isinstance(m, nn.Linear) else m.weight.numel()
        for m in module.modules()
        if isinstance(m, nn.Linear | nn.Conv2d) and (m.weight.requires_grad or not trained_alone)
    )


def unit_flops(model: NormLlavaForConditionalGeneration, stage: Stage) -> tuple[float, float, float, float]:
    """Model FLOPs of a token, of a sample's squared length, of a picture and of a supervised token, of a model that is
    prepared for the stage."""
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
    return 2.0 * of_token, 2.0 * of_square, 2.0 * of_picture, 2.0 * model.lm_head.weight.numel() * head_passes


def step_flops(
    model: NormLlavaForConditionalGeneration, stage: Stage, lengths: Sequence[int], pictures: int, supervised: int
) -> float:
    """Model FLOPs of a step, of the tokens of each sample and the pictures and supervised tokens of all."""
    amounts = (sum(lengths), sum(length**2 for length in lengths), pictures, supervised)
    return sum(cost * amount for cost, amount in zip(unit_flops(model, stage), amounts, strict=True))
