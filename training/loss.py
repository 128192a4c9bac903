"""What the trainer's loss is made of: where tokens are supervised, and the head at these places alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaForConditionalGeneration


def supervised(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the next token is supervised, and which token it is.

    Args:
        labels: `(batch_size, sequence_length)`, with `IGNORED` where nothing is supervised.

    Returns:
        Places in the flattened `(batch_size, sequence_length)`, and the tokens that come after them, both
        `(num_supervised,)`.
    """
    next_tokens = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    places = (next_tokens != IGNORED).nonzero()[:, 0]
    return places, next_tokens[places]


@contextmanager
def head_on_supervised(model: NormLlavaForConditionalGeneration, places: torch.Tensor) -> Iterator[None]:
    """For the time of the block the head sees only the hidden states at `places`, which predict a supervised token.

    TRL does this itself where it has Triton. Elsewhere it scores every position, image tokens included.
    """

    def keep_places(module: nn.Module, args: Any, output: Any) -> Any:
        hidden_states = output.last_hidden_state.flatten(0, 1)  # [batch_size * sequence_length, hidden_size]
        output.last_hidden_state = hidden_states[places][None]  # [1, num_supervised, hidden_size]
        return output

    with model.model.register_forward_hook(keep_places):
        yield


def gradient_alone(loss: torch.Tensor) -> torch.Tensor:
    """Zero, with the gradient of `loss`: added to another loss, it trains what `loss` does and changes no figure."""
    return loss - loss.detach()
