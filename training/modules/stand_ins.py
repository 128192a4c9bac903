"""Stand-ins for bitsandbytes' linear layer and optimizer in a plan.

They take the same memory, and run on tensors without data, for which bitsandbytes has no kernels.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from typing_extensions import override


# How many quantized numbers share a scale in bitsandbytes: 4-bit weights, their scales, and 8-bit states.
WEIGHTS_PER_SCALE = 64
SCALES_PER_SCALE = 256
STATES_PER_SCALE = 256
# bitsandbytes keeps the states of parameters with fewer weights in float32.
SMALLEST_8BIT_SIZE = 4096


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose weights are packed into bytes, with room for their scales.

    Args:
        layer: The layer to replace.
        double_quant: Whether the scales are quantized too.
    """

    def __init__(self, layer: nn.Linear, double_quant: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        num_bytes = math.ceil(layer.weight.numel() * bits_of_a_weight(double_quant) / 8)
        packed_weights = torch.empty(num_bytes, dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(packed_weights, requires_grad=False)
        self.bias = layer.bias

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the unpacked weights, which exist only during this product and in the backward pass."""
        dtype = input.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        product = FourBitProduct.apply(input.to(dtype), self.out_features)
        if self.bias is None:
            return product
        return product + self.bias.to(dtype)


class FourBitProduct(torch.autograd.Function):
    """A product with a matrix that is unpacked in each pass, and so not kept from the forward to the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, out_features: int) -> torch.Tensor:
        """The product, `(..., out_features)`."""
        ctx.in_features = input.shape[-1]
        ctx.out_features = out_features
        unpacked_weights = input.new_empty(ctx.out_features, ctx.in_features)
        return nn.functional.linear(input, unpacked_weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the input."""
        unpacked_weights = gradient.new_empty(ctx.out_features, ctx.in_features)
        return gradient @ unpacked_weights, None


def bits_of_a_weight(double_quant: bool) -> float:
    """The bits that a 4-bit weight takes with its part of the scales: 4.13, or 4.5 without double quantization."""
    bits_of_a_scale = 32.0
    if double_quant:
        bits_of_a_scale = 8 + 32 / SCALES_PER_SCALE  # an 8-bit scale shares a 32-bit scale with others
    return 4 + bits_of_a_scale / WEIGHTS_PER_SCALE


def pack_layers(layers: nn.Module, double_quant: bool) -> None:
    """Replace each linear layer in `layers` by a `FourBitLinear`."""
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, FourBitLinear(child, double_quant))


class EightBitAdam(torch.optim.Optimizer):
    """An optimizer that does nothing but allocate the states that bitsandbytes' 8-bit Adam has.

    Args:
        parameters: The parameters that are trained.
        embeddings: The weights of embeddings. Their states stay in float32, as transformers asks for.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], embeddings: Iterable[Any]) -> None:
        super().__init__(parameters, defaults={})
        self._embeddings = set(embeddings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing to compute, so nothing to return
        """Allocate two states for each parameter, in the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = self._make_states(parameter)

    def _make_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        is_small = parameter.numel() < SMALLEST_8BIT_SIZE
        if is_small or parameter in self._embeddings:
            return {
                "state1": torch.zeros_like(parameter, dtype=torch.float32),
                "state2": torch.zeros_like(parameter, dtype=torch.float32),
            }

        num_scales = math.ceil(parameter.numel() / STATES_PER_SCALE)
        return {
            "state1": torch.zeros_like(parameter, dtype=torch.uint8),
            "state2": torch.zeros_like(parameter, dtype=torch.uint8),
            "absmax1": parameter.new_zeros(num_scales, dtype=torch.float32),
            "absmax2": parameter.new_zeros(num_scales, dtype=torch.float32),
        }
