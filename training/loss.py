"""Parts of the trainer's loss: it is computed only at the positions that predict a supervised token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaForConditionalGeneration


def supervised_tokens(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions whose next token is supervised, and these next tokens.

    Args:
        labels: `(batch_size, sequence_length)`, with `IGNORED` for each token that isn't supervised.

    Returns:
        Positions in the flattened `(batch_size, sequence_length)`, and the token after each of them. Both are
        `(num_supervised,)`.
    """
    next_tokens = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    positions = (next_tokens != IGNORED).nonzero()[:, 0]
    return positions, next_tokens[positions]


@contextmanager
def head_at_positions(model: NormLlavaForConditionalGeneration, positions: torch.Tensor) -> Iterator[None]:
    """A block in which the head gets only the hidden states at `positions` of the flattened batch.

    If Triton is installed, TRL itself leaves out the positions that predict no supervised token. Without Triton it
    computes logits at every position, those of image tokens included.
    """

    def keep_positions(module: nn.Module, args: Any, output: Any) -> Any:
        hidden_states = output.last_hidden_state.flatten(0, 1)  # [batch_size * sequence_length, hidden_size]
        output.last_hidden_state = hidden_states[positions][None]  # [1, num_supervised, hidden_size]
        return output

    with model.model.register_forward_hook(keep_positions):
        yield


def gradient_alone(loss: torch.Tensor) -> torch.Tensor:
    """A loss of value zero that has the gradient of `loss`: added to another loss, it leaves the value as it is."""
    return loss - loss.detach()
