"""Multiplies image tokens where they enter the decoder."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from normllava.hooks import InterfaceHooks


# A sweep measures a model with its image tokens multiplied by several factors, which are called doses. The first dose
# leaves the model as it is.
UNCHANGED_DOSE = 1.0
DOSES = (UNCHANGED_DOSE, 0.03, 0.1, 0.3, 3.0, 10.0, 30.0)


@contextmanager
def scaled(model: PreTrainedModel, is_image_token: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply a sample's image tokens by `scale` where they enter the decoder's first layer.

    A forward pass is scaled if its length is that of the mask, so no other sample of this length may be run inside the
    context. Later passes, over tokens that the model generates, are left as they are: they see the scaled tokens
    through the cache. At a scale of 1 nothing changes, bit for bit.

    Args:
        model: The model. Its hooks are removed when the context is left.
        is_image_token: Mask of the image tokens in the sample, `(S,)` or `(1, S)`.
        scale: The factor.
    """
    mask = is_image_token.reshape(-1, 1)  # [S, 1]

    def multiply(place: str, states: torch.Tensor) -> torch.Tensor | None:
        """The decoder's input with scaled image tokens; `None` to leave the tensor at this place as it is."""
        if place != "decoder" or scale == 1:
            return None
        num_tokens = states.shape[1]
        if num_tokens != len(mask):  # not a pass over this sample
            return None
        return torch.where(mask.to(states.device), states * scale, states)

    with InterfaceHooks(model, multiply):
        yield
