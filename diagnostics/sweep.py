"""Multiplies visual tokens where they enter the decoder, nothing else changed, and measures what that does."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from diagnostics.hooks import InterfaceHooks


@contextmanager
def scaled(model: PreTrainedModel, is_visual: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply visual tokens by `scale` where they enter the decoder's first layer, in every pass over the sample.

    Passes of another length, such as those over new tokens with a cache, are left alone: the cache holds what the
    scaled tokens became. At a scale of 1 nothing changes, bit for bit.

    Args:
        model: The model. The hook goes when the context is left.
        is_visual: Positions of the visual tokens in the sample, `(S,)` or `(1, S)`.
        scale: The factor.
    """
    factors = torch.where(is_visual, scale, 1.0)[..., None]  # [(1,) S, 1]

    def see(place: str, features: torch.Tensor) -> torch.Tensor | None:
        if place != "decoder" or features.shape[1] != is_visual.shape[-1]:
            return None
        return (features * factors.to(features.device)).to(features.dtype)

    with InterfaceHooks(model, see):
        yield
