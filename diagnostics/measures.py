"""Norms on the way into the decoder, how its layers turn tokens, attention to the picture, the projector's norm.

Sources: "The Unseen Bias" (arXiv 2512.08374), Tables 1 to 3 and 5, Fig. 1b, 3 to 5, App. G. Every measure returns rows
of [`~diagnostics.table`], and is defined on the report's page.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pandas as pd
import torch
from accelerate.utils import align_module_device
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from diagnostics.norms import text_norm_target, vocabulary_norms
from diagnostics.parts import find_norm
from diagnostics.probe import TINY, Record
from diagnostics.table import make_rows, ratio_rows


# Text tokens enter the decoder scaled if their factors agree within this, and differ from 1 by more.
SCALE_TOLERANCE = 0.02


def measure_all(model: PreTrainedModel, records: Sequence[Record]) -> pd.DataFrame:
    """Rows of all measures of this module, of one record for each picture."""
    measured = [
        measure_interface(records, vocabulary_norms(model)),
        measure_layers(records),
        measure_projector_norm(model),
        measure_attention(records),
    ]
    return pd.concat([rows for rows in measured if rows is not None], ignore_index=True)


def measure_interface(records: Sequence[Record], vocabulary: torch.Tensor) -> pd.DataFrame:
    """Rows of the mean norm at each place up to the decoder, and of the ratio of image to text norms.

    Args:
        records: One for each picture.
        vocabulary: Norms of the embedding layer's output by token id, `(vocab_size,)`.
    """
    text_norms = [record.layer_norms[0, record.tokens.text] for record in records]
    image_norms = [record.layer_norms[0, record.tokens.visual] for record in records]
    embedded_norms = [vocabulary[record.input_ids[record.tokens.text]] for record in records]

    scale = input_scale(torch.cat(text_norms), torch.cat(embedded_norms))
    target = text_norm_target(scale * vocabulary)
    image = mean_of_each(image_norms)
    text = mean_of_each(text_norms)

    rows = []
    for place in ("encoder_output", "projector_input", "projector_output"):
        if place in records[0].interface:
            norms = mean_of_each([record.interface[place] for record in records])
            rows.append(make_rows(place, norms, "visual"))
    rows += [
        make_rows("at_decoder", image, "visual"),
        make_rows("at_decoder", text, "text"),
        make_rows("in_prompt", mean_of_each([scale * norms for norms in embedded_norms]), "text"),
        make_rows("vocabulary", modality="text", whole=target),
        ratio_rows("ratio", image, text),
        make_rows("ratio_to_vocabulary", image / target),
    ]
    return pd.concat(rows)


def mean_of_each(samples: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean over the tokens of each sample, `(num_samples,)`."""
    return np.array([tokens.double().mean().item() for tokens in samples])


def input_scale(entering: torch.Tensor, embedded: torch.Tensor) -> float:
    """What a decoder multiplies its input by: 1 unless it is the same for every one of several text tokens.

    Where positions are added, each token has a factor of its own.

    Args:
        entering: Norms of text tokens at the decoder's first layer, `(num_tokens,)`.
        embedded: Norms of their embeddings, `(num_tokens,)`.
    """
    factors = (entering / embedded)[embedded > 0]
    if len(factors) < 2:
        return 1.0

    scale = factors.median().item()
    agree = (factors - scale).abs().max() < SCALE_TOLERANCE * scale
    if not agree or abs(scale - 1) <= SCALE_TOLERANCE:
        return 1.0
    return scale


def measure_layers(records: Sequence[Record]) -> pd.DataFrame:
    """Rows of norms, turning and updates by layer and modality, and of their differences."""
    image_masks = [record.tokens.visual for record in records]
    text_masks = [record.tokens.text for record in records]
    layer_norms = [record.layer_norms for record in records]
    cosines = [record.cosines for record in records]
    update_ratios = [record.update_ratios for record in records]
    update_cosines = [record.update_cosines for record in records]

    num_layers = len(cosines[0])
    layers = range(num_layers)
    # The last norm is that of the last layer's output.
    norm_layers = range(num_layers + 1)

    rows = []
    for modality, masks in (("visual", image_masks), ("text", text_masks)):
        rows += [
            make_rows("norm", mean_by_layer(layer_norms, masks), modality, norm_layers),
            make_rows("turning", 1 - mean_by_layer(cosines, masks), modality, layers),
            make_rows("update_ratio", mean_by_layer(update_ratios, masks), modality, layers),
            make_rows("update_cosine", mean_by_layer(update_cosines, masks), modality, layers),
        ]

    image_norms = mean_by_layer(layer_norms, image_masks)
    text_norms = mean_by_layer(layer_norms, text_masks)
    gap = mean_by_layer(cosines, image_masks) - mean_by_layer(cosines, text_masks)
    rows.append(ratio_rows("norm_ratio", image_norms, text_norms, norm_layers))
    rows.append(make_rows("gap", gap, layers=layers))
    return pd.concat(rows)


def mean_by_layer(samples: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean over the chosen tokens of each sample, by layer: `(num_samples, num_layers)`.

    Args:
        samples: A number for each layer and token, `(num_layers, S)` each.
        masks: Which tokens to choose, `(S,)` each.
    """
    means = []
    for by_token, mask in zip(samples, masks, strict=True):
        means.append(by_token[:, mask].double().mean(dim=1).numpy())
    return np.stack(means)


def measure_attention(records: Sequence[Record]) -> pd.DataFrame | None:
    """Rows of the text's attention to the picture by layer; `None` where the model's attention was not recorded."""
    layers = sorted(set.intersection(*(set(record.attention) for record in records)))
    if not layers:
        return None

    # By measure, a row for each picture and a column for each layer.
    shares: dict[str, list[list[float]]] = {
        "attention": [], "attention_even": [], "attention_without_sinks": [], "attention_even_without_sinks": [],
    }  # fmt: skip
    for record in records:
        probabilities = [record.attention[layer] for layer in layers]
        even = [record.visible[layer][None] for layer in layers]

        image_tokens = record.with_sinks.visual
        all_keys = torch.ones_like(image_tokens)
        shares["attention"].append(attention_shares(probabilities, image_tokens, all_keys))
        shares["attention_even"].append(attention_shares(even, image_tokens, all_keys))

        image_tokens = record.tokens.visual
        ordinary = image_tokens | record.tokens.text
        shares["attention_without_sinks"].append(attention_shares(probabilities, image_tokens, ordinary))
        shares["attention_even_without_sinks"].append(attention_shares(even, image_tokens, ordinary))

    return pd.concat([make_rows(name, by_picture, layers=layers) for name, by_picture in shares.items()])


def attention_shares(
    attention: Sequence[torch.Tensor], is_image_token: torch.Tensor, counted: torch.Tensor
) -> list[float]:
    """Share of the attention on the counted keys that falls on image tokens, mean over heads and queries, by layer.

    Args:
        attention: Of each layer, of any scale, `(num_heads, num_queries, S)`.
        is_image_token: `(S,)`.
        counted: Which keys count, `(S,)`.
    """
    shares = []
    for probabilities in attention:
        weights = probabilities.double() * counted
        on_image = weights[..., is_image_token].sum(dim=-1)
        on_all = weights.sum(dim=-1).clamp(min=TINY)
        shares.append((on_image / on_all).mean().item())
    return shares


def measure_drift(record: Record, baseline: Record) -> dict[str, float]:
    """How far a picture's image tokens have turned as keys and as values from those of its `baseline` record.

    1 less the cosine, mean over heads and over all layers but the first, whose input differs only in norm. Empty where
    no keys were recorded.
    """
    is_image_token = baseline.tokens.visual[baseline.key_positions]

    turned = {}
    for space in ("keys", "values"):
        now = getattr(record, space)
        before = getattr(baseline, space)
        cosines = []
        for layer in now.keys() & before.keys():
            if layer != 0:
                by_token = cosine_similarity(now[layer], before[layer], dim=-1)  # [num_heads, num_kept]
                cosines.append(by_token[:, is_image_token].mean().item())
        if cosines:
            turned[f"{space}, turned"] = 1 - sum(cosines) / len(cosines)
    return turned


def measure_projector_norm(model: PreTrainedModel) -> pd.DataFrame | None:
    """Rows of gain and bias; `None` for a model whose projector does not end in a norm."""
    norm = find_norm(model)
    if norm is None:
        return None

    with align_module_device(norm):  # Offloaded weights are on the meta device otherwise.
        gain = norm.weight.detach().double().cpu()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double().cpu()

    target = getattr(model.config, "projector_norm_target", None)
    gain_at_start = 1.0 if target is None else target / sqrt(len(gain))
    return pd.concat([
        make_rows("gain_l2", whole=gain.norm().item()),
        make_rows("bias_l2", whole=bias.norm().item()),
        make_rows("gain_drift", whole=(gain - gain_at_start).norm().item()),
    ])  # fmt: skip
