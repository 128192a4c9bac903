"""How a layer of the decoder turns tokens, by its residual update."""

from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """What a layer does to each token; every tensor is `(..., S)`, float32.

    Attributes:
        norms, norms_after: L2 norm of the layer's input and of its output.
        cosines: Between input and output.
        update_ratios: Norm of the layer's residual update over that of its input.
        update_cosines: Between input and update.
    """

    norms: torch.Tensor
    norms_after: torch.Tensor
    cosines: torch.Tensor
    update_ratios: torch.Tensor
    update_cosines: torch.Tensor


def turn(before: torch.Tensor, after: torch.Tensor) -> Turn:
    """What a layer does to each token, from the hidden states around it, `(S, hidden_size)` each, float32."""
    update = after - before
    norms, update_norms, norms_after = (torch.linalg.vector_norm(x, dim=-1) for x in (before, update, after))
    ratios = update_norms / norms.clamp(min=1e-30)
    update_cosines = (before * update).sum(-1) / (norms * update_norms).clamp(min=1e-30)
    return Turn(
        norms,
        norms_after,
        cosines=(before * after).sum(-1) / (norms * norms_after).clamp(min=1e-30),
        update_ratios=ratios,
        update_cosines=update_cosines,
    )
