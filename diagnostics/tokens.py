"""Classifies tokens as image tokens, text, or excluded with a reason.

Excluded are padding, special tokens, the newline features that a model puts among a picture's features, attention
sinks, and the blank picture that training adds to a batch without pictures. This is the only place that decides.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from diagnostics.parts import DiagnosticsError, image_token_id


# A sink's norm is over this many times the median of its modality in its sample.
SINK_FACTOR = 10.0
# A token whose cosine to the newline feature is above this is that feature.
NEWLINE_COSINE = 1 - 1e-5
# What a processor or a collator returns, by name of the model's argument.
Inputs = dict[str, Any]


@dataclass(frozen=True)
class TokenIds:
    """Ids that are not ordinary text: that of the image token, and those of special tokens."""

    image: int
    special: frozenset[int]


@dataclass(frozen=True)
class Tokens:
    """Type of each position of one sample; every mask is `(sequence_length,)`, of a batch `(batch_size, ...)`.

    Attributes:
        visual: Image tokens: positions that hold a feature of a picture.
        text: Ordinary text tokens.
        excluded: The positions that are neither, by reason: `"padding"`, `"special"` (BOS, delimiters of chat and of
            pictures, other modalities), and if there are any, `"blank picture"` (of a batch without pictures),
            `"newline"` (row ends that a model puts among a picture's features), `"sink"`.
    """

    visual: torch.Tensor
    text: torch.Tensor
    excluded: dict[str, torch.Tensor]

    def without(self, reason: str, positions: torch.Tensor) -> "Tokens":
        """The same with more positions excluded."""
        return Tokens(
            visual=self.visual & ~positions,
            text=self.text & ~positions,
            excluded={**self.excluded, reason: positions},
        )


def token_ids(model: PreTrainedModel, processor: Any = None) -> TokenIds:
    """The ids that are not ordinary text by a model's config, and by its processor if there is one.

    Special are those with a role in the config (BOS, delimiters of pictures, other media), and those that the
    tokenizer marks as special, even without a role: Llama 3 delimits turns with such tokens.
    """
    special: set[Any] = set()  # of ids, and `None` where a config leaves one out
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                special |= set(value if isinstance(value, list | tuple) else [value])

    if processor is not None:
        tokenizer = getattr(processor, "tokenizer", processor)  # It may be one itself.
        special |= {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)

    image = image_token_id(model)
    return TokenIds(image, frozenset(special - {image, None}))


def attended_tokens(inputs: Inputs) -> torch.Tensor:
    """Which positions are neither padding nor a blank picture, of inputs as for [`classify`]; the shape of the ids."""
    attention_mask = inputs.get("attention_mask")
    if attention_mask is not None:
        return attention_mask.bool()

    position_ids = inputs.get("position_ids")
    if position_ids is not None:
        # In a packed row only the tokens of a blank picture are samples of one token.
        starts_sample = position_ids == 0
        ends_sample = position_ids.roll(-1, dims=1) == 0
        return ~(starts_sample & ends_sample)

    return torch.ones_like(inputs["input_ids"], dtype=torch.bool)


def classify(inputs: Inputs, ids: TokenIds) -> Tokens:
    """Classify the positions of a batch; newline features and sinks are found only when the model runs.

    Args:
        inputs: What the model is given: `input_ids` of shape `(batch_size, S)`, padded with an `attention_mask` or
            packed with `position_ids` that restart at each sample, both of the same shape.
        ids: Of the model, as [`token_ids`] returns them.
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

    return Tokens(visual=attended & is_image, text=attended & ~is_image & ~is_special, excluded=excluded)


def classify_sample(inputs: Inputs, ids: TokenIds) -> Tokens:
    """What [`classify`] does, of one sample with a picture and a question: masks `(S,)`, on the CPU.

    Raises:
        DiagnosticsError: if there are several samples, or the one has no image tokens or no ordinary text.
    """
    num_samples = len(inputs["input_ids"])
    if num_samples != 1:
        raise DiagnosticsError(f"A probe watches one sample at a time, got {num_samples}.")

    batch = classify(inputs, ids)
    excluded = {reason: mask[0].cpu() for reason, mask in batch.excluded.items()}
    tokens = Tokens(batch.visual[0].cpu(), batch.text[0].cpu(), excluded)
    if not tokens.visual.any():
        raise DiagnosticsError(f"A sample has no image tokens: the id {ids.image} is not in it. Give it a picture.")
    if not tokens.text.any():
        raise DiagnosticsError("A sample has no ordinary text tokens to compare the picture's with: ask a question.")
    return tokens


def find_newlines(model: PreTrainedModel, embeddings: torch.Tensor, tokens: Tokens) -> Tokens:
    """The tokens without the learned newline features with which LLaVA-NeXT ends each row of a picture, among the
    `embeddings` that enter the decoder, `(S, hidden_size)`."""
    for name, parameter in model.named_parameters():
        # HunYuan-VL's comes before the projector, and can't be told from a feature after it.
        if name.split(".")[-1] != "image_newline" or parameter.shape[-1] != embeddings.shape[-1]:
            continue

        # By direction, since decoders such as Granite's multiply what enters them.
        newline = parameter.to(embeddings.device).float()
        cosines = cosine_similarity(embeddings.float(), newline, dim=-1)  # [S]
        is_newline = (cosines > NEWLINE_COSINE).cpu() & tokens.visual
        tokens = tokens.without("newline", is_newline)
    return tokens


def find_sinks(layer_norms: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Tokens with massive norms after the first layer, which attract attention whatever their content, `(S,)`.

    A token is one if its norm at some layer is over `SINK_FACTOR` times the median of its modality (compare the
    massive activations of arXiv 2402.17762). The input of the first layer doesn't count; norms are `(L + 1, S)`.
    """
    is_sink = torch.zeros_like(tokens.visual)
    for mask in (tokens.visual, tokens.text):
        if not mask.any():
            continue
        norms = layer_norms[1:, mask]  # [L, num_tokens]
        medians = norms.median(dim=-1, keepdim=True).values
        is_sink[mask] = (norms > SINK_FACTOR * medians).any(dim=0)
    return is_sink
