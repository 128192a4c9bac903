"""Trains at positions that are found before a batch is copied to the device.

A GPU works behind Python. Where the size of a result depends on values, as with a boolean index, Python waits until
the GPU has come that far. On the host the same positions are found without waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils
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


def image_positions(input_ids: torch.Tensor, image_token_id: int) -> tuple[torch.Tensor, ...]:
    """The row and the column of each image token, each `(num_image_tokens,)`."""
    return (input_ids == image_token_id).nonzero(as_tuple=True)


@contextmanager
def images_at_positions(
    model: LlavaForConditionalGeneration, positions: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None
) -> Iterator[None]:
    """A block in which image features are put in `positions` of the batch.

    Llava itself would look for the image tokens on the device, and once more in the backward pass. This is done in a
    hook, inside of the wrapped model's forward pass, and after the hooks that read the token ids.

    Args:
        model: The model, without wrappers.
        positions: What [`image_positions`] returns for the batch.
        mask: An attention mask for the decoder, in place of that of the batch.

    Raises:
        ValueError: in the forward pass, if there are not as many image features as positions.
    """

    def embed(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # [batch_size, sequence_length, hidden_size]
        embeddings = module.get_input_embeddings()(kwargs.pop("input_ids"))
        outputs = module.get_image_features(kwargs.pop("pixel_values"), return_dict=True)
        features = torch.cat(tuple(outputs.pooler_output)).to(embeddings)  # [num_image_tokens, hidden_size]
        if len(features) != len(positions[0]):
            raise ValueError(f"The batch has {len(positions[0])} image tokens and {len(features)} image features.")
        kwargs["inputs_embeds"] = embeddings.index_put(positions, features)
        if mask is not None:
            kwargs["attention_mask"] = mask
        return args, kwargs

    with model.model.register_forward_pre_hook(embed, with_kwargs=True):
        yield


@contextmanager
def head_at_positions(model: LlavaForConditionalGeneration, positions: torch.Tensor) -> Iterator[None]:
    """A block in which the head gets only the hidden states at `positions` of the flattened batch.

    TRL itself leaves other positions out only if Triton is installed, and looks for them on the device. Without Triton
    it computes logits at every position, those of image tokens included.
    """

    def keep_positions(module: nn.Module, args: Any, output: Any) -> Any:
        hidden_states = output.last_hidden_state.flatten(0, 1)  # [batch_size * sequence_length, hidden_size]
        output.last_hidden_state = hidden_states[positions][None]  # [1, num_supervised, hidden_size]
        return output

    search = trl.trainer.utils._use_triton
    trl.trainer.utils._use_triton = lambda device: False  # Its search would find all positions that are left.
    try:
        with model.model.register_forward_hook(keep_positions):
            yield
    finally:
        trl.trainer.utils._use_triton = search
