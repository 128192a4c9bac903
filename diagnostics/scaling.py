"""Multiplies visual tokens where they enter the decoder, with controls that tell what it is that length changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from diagnostics.hooks import InterfaceHooks


# Beside multiplying: all other tokens divided instead; what was added to the tokens taken out again after layer 1; of
# what that layer's MLP is given, the direction turned as far as multiplying turns it, but at random.
SCALED, DIVIDED, TAKEN_OUT, TURNED = CONTROLS = ("", "text divided", "taken out again", "turned at random")


@contextmanager
def scaled(model: PreTrainedModel, is_visual: torch.Tensor, scale: float, control: str = SCALED) -> Iterator[None]:
    """Multiply visual tokens by `scale` where they enter the decoder's first layer, in passes of the sample's length.

    Later passes over new tokens need nothing, as the cache holds what the scaled tokens became; those as long as the
    sample must come after the block. At a scale of 1 nothing changes, bit for bit.

    Args:
        model: The model. The hooks go when the context is left.
        is_visual: Positions of the visual tokens in the sample, `(S,)` or `(1, S)`.
        scale: The factor.
        control: What to do instead, one of `CONTROLS`.
    """
    mask = is_visual.reshape(-1, 1).to(model.device)  # [S, 1]
    entered = torch.empty(0)

    def see(place: str, states: torch.Tensor) -> torch.Tensor | None:
        nonlocal entered
        if scale == 1 or states.shape[1] != len(mask):
            return None
        if place == "decoder":
            entered = states
            is_changed, factor = (~mask, 1 / scale) if control == DIVIDED else (mask, scale)
            return None if control == TURNED else torch.where(is_changed, states * factor, states)
        if place == "before_mlp" and control == TURNED:
            scaled_states = states.float() + (scale - 1) * entered.float()
            return torch.where(mask, turn_at_random(states.float(), scaled_states).to(states), states)
        if place == "after_mlp" and control == TAKEN_OUT:
            return torch.where(mask, states - (scale - 1) * entered, states)
        return None

    with InterfaceHooks(model, see):
        yield


def turn_at_random(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """States, `(..., hidden_size)`, float32, turned by the angles between them and others, in random directions that
    are the same each time. They keep their lengths."""
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    length, along = states.norm(dim=-1, keepdim=True), normalize(states, dim=-1)
    across = normalize(drawn - (drawn * along).sum(-1, keepdim=True) * along, dim=-1)
    cosine = (along * normalize(others, dim=-1)).sum(-1, keepdim=True).clamp(-1, 1)
    return length * (cosine * along + (1 - cosine**2).sqrt() * across)


def update_norms(states: dict[str, torch.Tensor], is_visual: torch.Tensor) -> dict[str, float]:
    """Norms in layer 1, means over the visual tokens of a sample that [`InterfaceHooks`] saw.

    `length` is of what enters, `attention_update` of what attention adds, `mlp_update` of what the MLP adds. Without a
    norm before the MLP these two can't be told apart, and there is only `length`.
    """
    entered = states["decoder"][0, is_visual].float()
    stages = {"length": entered}
    if "before_mlp" in states:
        before_mlp = states["before_mlp"][0, is_visual].float()
        stages["attention_update"] = before_mlp - entered
        stages["mlp_update"] = states["after_mlp"][0, is_visual].float() - before_mlp
    return {name: stage.norm(dim=-1).mean().item() for name, stage in stages.items()}
