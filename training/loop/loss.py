"""Helpers of the trainer's loss, which is computed only at the positions that predict a supervised token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LlavaForConditionalGeneration

from normllava.tokens import IGNORED


def supervised_tokens(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions before supervised tokens, and the supervised tokens.

    Args:
        labels: `(batch_size, sequence_length)`, with `IGNORED` for each token that isn't supervised.

    Returns:
        Positions in the flattened batch, and the token after each position. Both are `(num_supervised,)`.
    """
    # Each row moves one position to the left, and gets a last label that isn't supervised.
    next_tokens = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # [batch_size, sequence_length]
    next_tokens = next_tokens.flatten()
    positions = (next_tokens != IGNORED).nonzero()[:, 0]
    return positions, next_tokens[positions]


@contextmanager
def head_at_positions(model: LlavaForConditionalGeneration, positions: torch.Tensor) -> Iterator[None]:
    """A block in which the head gets only the hidden states at `positions` of the flattened batch.

    TRL itself leaves other positions out only if Triton is installed. Without Triton it computes logits at every
    position, those of image tokens included.
    """

    def keep_positions(module: nn.Module, args: Any, output: Any) -> Any:
        hidden_states = output.last_hidden_state.flatten(0, 1)  # [batch_size * sequence_length, hidden_size]
        output.last_hidden_state = hidden_states[positions][None]  # [1, num_supervised, hidden_size]
        return output

    with model.model.register_forward_hook(keep_positions):
        yield


def gradient_alone(loss: torch.Tensor) -> torch.Tensor:
    """Zero, with the gradient of `loss`. Added to another loss, it changes the gradient and not the value."""
    return loss - loss.detach()
