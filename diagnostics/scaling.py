"""Multiplies image tokens where they enter the decoder."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from diagnostics.hooks import InterfaceHooks


# Factors of the image tokens that a sweep tries, after the model as it is.
AS_IT_IS = 1.0
DOSES = (AS_IT_IS, 0.03, 0.1, 0.3, 3.0, 10.0, 30.0)
# The picture that is asked about, in a sweep's column `control`: the question's own, a white one, another question's.
OWN, BLANK, ANOTHERS = "", "blank", "another's"


@contextmanager
def scaled(model: PreTrainedModel, is_image_token: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply image tokens by `scale` where they enter the decoder's first layer, in passes of the sample's length.

    Later passes over new tokens need nothing, as the cache holds what the scaled tokens became; those as long as the
    sample must come after the block. At a scale of 1 nothing changes, bit for bit.

    Args:
        model: The model. The hooks go when the context is left.
        is_image_token: Positions of the image tokens in the sample, `(S,)` or `(1, S)`.
        scale: The factor.
    """
    mask = is_image_token.reshape(-1, 1)  # [S, 1]

    def multiply(place: str, states: torch.Tensor) -> torch.Tensor | None:
        if place != "decoder" or scale == 1 or states.shape[1] != len(mask):
            return None
        return torch.where(mask.to(states.device), states * scale, states)

    with InterfaceHooks(model, multiply):
        yield
