"""Classifies each token as an image token, as text, or as excluded for a reason.

Excluded are padding, special tokens, the newline features that a model puts among a picture's features, attention
sinks (tokens with massive norms), and the blank picture that training adds to a batch without pictures. All measures
use this classification.

To find sinks and newlines a forward pass is needed. The other types are found from a model's inputs alone.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from transformers import BaseImageProcessor, PreTrainedModel

from normllava.parts import DiagnosticsError, image_token_id


# A token is a sink if its norm is more than this many times the median norm of its modality in its sample.
SINK_FACTOR = 10.0
# An image token is a newline if its cosine with the model's newline feature is above this number. The two directions
# are then equal except for rounding.
NEWLINE_COSINE = 1 - 1e-5
# The label of a token that isn't supervised, in transformers and PyTorch.
IGNORED = -100
# A model's inputs, as a processor or a collator returns them, by the names of the arguments of `forward`.
Inputs = dict[str, Any]


@dataclass(frozen=True)
class TokenIds:
    """Token ids that are not ordinary text: the id of the image token, and the ids of special tokens."""

    image: int
    special: frozenset[int]


@dataclass(frozen=True)
class Tokens:
    """Type of each position, as masks: `(S,)` for one sample of length `S`, `(batch_size, S)` for a batch.

    Attributes:
        image: Image tokens: positions that hold a feature of a picture.
        text: Ordinary text tokens.
        excluded: Positions that are neither image tokens nor ordinary text, by the reason why they are excluded.
            `"padding"` and `"special"` (BOS, delimiters of turns and of pictures, other modalities) are always there.
            `"blank picture"`, `"newline"` and `"sink"` are missing if no such token was found or looked for.
    """

    image: torch.Tensor
    text: torch.Tensor
    excluded: dict[str, torch.Tensor]

    def exclude(self, reason: str, mask: torch.Tensor) -> "Tokens":
        """The same types, except that the positions of a mask are excluded for a reason."""
        return Tokens(
            image=self.image & ~mask,
            text=self.text & ~mask,
            excluded={**self.excluded, reason: mask},
        )


def token_ids(model: PreTrainedModel, processor: Any = None) -> TokenIds:
    """The token ids that are not ordinary text, from a model's config, and from its processor if one is given.

    Special tokens are the tokens that the config names for a role (BOS, delimiters of pictures, other media), and the
    tokens that the tokenizer marks as special: Llama 3 delimits turns with tokens that its config doesn't name.
    """
    special: set[Any] = set()  # holds `None` too if a config has no token for a role
    for config in (model.config, model.config.get_text_config()):
        for field, value in config.to_dict().items():
            if not field.endswith(("_token_id", "_token_ids", "_token_index")):
                continue
            if isinstance(value, list | tuple):
                special.update(value)
            else:
                special.add(value)

    if processor is not None:
        # `processor` may itself be a tokenizer, which has no attribute `tokenizer`.
        special |= special_token_ids(getattr(processor, "tokenizer", processor))

    image = image_token_id(model)
    return TokenIds(image, frozenset(special - {image, None}))


def special_token_ids(tokenizer: Any) -> set[int]:
    """The ids of the tokens that a tokenizer marks as special; none for an image processor."""
    if isinstance(tokenizer, BaseImageProcessor):
        return set()
    special = set(tokenizer.all_special_ids)
    with suppress(NotImplementedError):  # Mistral's own tokenizer doesn't list its added tokens
        special |= {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special


def blank_samples(image_token_id: int, num_tokens: int) -> list[dict[str, list[int]]]:
    """The samples that are the blank picture of a packed row without pictures.

    Each of its tokens is a sample of its own, so that no other token sees it. No other sample has a single token.
    """
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


def attended_tokens(inputs: Inputs) -> torch.Tensor:
    """Mask of the positions that are neither padding nor a blank picture, `(batch_size, S)`.

    Args:
        inputs: The model's inputs, as [`classify`] takes them.
    """
    attention_mask = inputs.get("attention_mask")
    # 0 at padding and at blank pictures. A mask in another form, such as 4-D, doesn't say which tokens are padding.
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return attention_mask.bool()

    position_ids = inputs.get("position_ids")
    if position_ids is not None and position_ids.ndim == 2:  # Qwen-VL's have an axis more
        return ~is_in_blank_picture(position_ids)

    return torch.ones_like(inputs["input_ids"], dtype=torch.bool)


def classify(inputs: Inputs, ids: TokenIds) -> Tokens:
    """The type of each position of a batch. Newline features and sinks are not found, because inputs don't show them.

    Args:
        inputs: The model's inputs: `input_ids`, with an `attention_mask` if samples are padded, or with `position_ids`
            that restart at each sample if samples are packed; `(batch_size, S)` each.
        ids: What [`token_ids`] returns for the model.
    """
    input_ids = inputs["input_ids"]
    attended = attended_tokens(inputs)
    special_ids = torch.tensor(sorted(ids.special), dtype=torch.long, device=input_ids.device)
    is_special = torch.isin(input_ids, special_ids)
    is_image = input_ids == ids.image

    excluded = {"padding": ~attended & ~is_image, "special": attended & is_special}
    is_blank_picture = ~attended & is_image
    if is_blank_picture.any():
        excluded["blank picture"] = is_blank_picture

    return Tokens(
        image=attended & is_image,
        text=attended & ~is_image & ~is_special,
        excluded=excluded,
    )


def classify_sample(inputs: Inputs, ids: TokenIds) -> Tokens:
    """The type of each position of one sample with a picture and a question, as masks `(S,)` on the CPU.

    Raises:
        DiagnosticsError: if there are several samples, or if the sample has no image tokens or no ordinary text.
    """
    num_samples = len(inputs["input_ids"])
    if num_samples != 1:
        raise DiagnosticsError(f"A probe watches one sample at a time, got {num_samples}.")

    batch = classify(inputs, ids)  # masks of shape (1, S)
    excluded = {reason: mask[0].cpu() for reason, mask in batch.excluded.items()}
    tokens = Tokens(batch.image[0].cpu(), batch.text[0].cpu(), excluded)
    if not tokens.image.any():
        raise DiagnosticsError(f"A sample has no image tokens: the id {ids.image} is not in it. Give it a picture.")
    if not tokens.text.any():
        raise DiagnosticsError("A sample has no ordinary text tokens to compare the picture's with: ask a question.")
    return tokens


def exclude_newlines(model: PreTrainedModel, embeddings: torch.Tensor, tokens: Tokens) -> Tokens:
    """The same types, except that newline features are excluded.

    A newline feature is a learned feature that a model such as LLaVA-NeXT puts at the end of each line of patches.

    Args:
        model: The model.
        embeddings: Input of the decoder's first layer, `(S, hidden_size)`.
        tokens: Types in which newline features still count as image tokens.
    """
    for path, parameter in model.named_parameters():
        name = path.split(".")[-1]
        if name != "image_newline":
            continue
        # HunYuan-VL's newline feature has the encoder's width, because it is inserted before the projector. After the
        # projector it can't be told from the features of a picture, so it is passed over.
        if parameter.shape[-1] != embeddings.shape[-1]:
            continue

        # The decoder's input may be a multiple of the feature (in Granite), so only directions are compared.
        newline = parameter.to(embeddings.device).float()
        cosines = cosine_similarity(embeddings.float(), newline, dim=-1)  # [S]
        is_newline = (cosines > NEWLINE_COSINE).cpu() & tokens.image
        tokens = tokens.exclude("newline", is_newline)
    return tokens


def find_sinks(layer_norms: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Mask of the sinks, `(S,)`: tokens with massive norms, which attract attention whatever their content is.

    A token is a sink if its norm after any layer is more than `SINK_FACTOR` times the median norm of its modality
    after that layer (compare the massive activations of arXiv 2402.17762). The norm before the first layer doesn't
    count, because sinks arise in the layers.

    Args:
        layer_norms: Norms of the input of each of the `L` layers, and then of the last layer's output, `(L + 1, S)`.
        tokens: Types in which sinks still count as image or text tokens.
    """
    is_sink = torch.zeros_like(tokens.image)
    for mask in (tokens.image, tokens.text):
        if not mask.any():
            continue
        norms = layer_norms[1:, mask]  # [L, num_tokens], without the input of the first layer
        medians = norms.median(dim=-1, keepdim=True).values
        is_sink[mask] = (norms > SINK_FACTOR * medians).any(dim=0)
    return is_sink
