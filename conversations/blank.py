"""The blank picture that training gives a packed row without pictures, and how to recognize it.

Each of its tokens is a sample of its own, so that no other token sees it. No other sample has a single token.
"""

import torch

from conversations.tokens import IGNORED


def blank_samples(image_token_id: int, num_tokens: int) -> list[dict[str, list[int]]]:
    """The samples that are the blank picture of a packed row: a sample for each of its tokens."""
    return [{"input_ids": [image_token_id], "labels": [IGNORED]}] * num_tokens


def is_in_blank_picture(position_ids: torch.Tensor) -> torch.Tensor:
    """Whether each token of packed rows belongs to a blank picture: a mask of the shape of `position_ids`.

    Args:
        position_ids: Positions that begin at 0 in each sample, `(batch_size, S)`.
    """
    starts_sample = position_ids == 0
    # `roll` gives each token the value of the next token. The last token gets the value of the row's first token,
    # which is True, as if another sample started after the row.
    next_starts_sample = starts_sample.roll(-1, dims=1)
    return starts_sample & next_starts_sample
