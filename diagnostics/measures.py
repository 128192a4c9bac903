"""Norms on the way into the decoder, how its layers turn tokens, attention to the picture, the projector's norm.

Sources: "The Unseen Bias" (arXiv 2512.08374), Tables 1 to 3 and 5, Fig. 1b, 3 to 5, App. G. Every measure returns rows
of [`~diagnostics.table`], and is defined on the report's page.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

import numpy as np
import pandas as pd
import torch
from accelerate.utils import align_module_device
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from diagnostics.norms import text_norm_target, vocabulary_norms
from diagnostics.parts import find_norm
from diagnostics.probe import Record
from diagnostics.table import make_rows, ratio_rows


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
    """Rows of the mean norm at each place up to the decoder, and of the ratio of visual to text norms; `vocabulary` is
    norms of the embedding layer's output by token id, `(vocab_size,)`."""

    def means(samples: Sequence[torch.Tensor]) -> np.ndarray:
        return np.array([norms.double().mean().item() for norms in samples])  # [num_pictures]

    entering = [record.layer_norms[0, record.tokens.text] for record in records]
    in_prompt = [vocabulary[record.input_ids[record.tokens.text]] for record in records]
    scale = input_scale(torch.cat(entering), torch.cat(in_prompt))
    visual = means([record.layer_norms[0, record.tokens.visual] for record in records])
    text, target = means(entering), text_norm_target(scale * vocabulary)
    places = [
        make_rows(place, means([record.interface[place] for record in records]), "visual")
        for place in ("encoder_output", "projector_input", "projector_output")
        if place in records[0].interface
    ]
    return pd.concat(
        [
            *places,
            make_rows("at_decoder", visual, "visual"),
            make_rows("at_decoder", text, "text"),
            make_rows("in_prompt", means([scale * norms for norms in in_prompt]), "text"),
            make_rows("vocabulary", modality="text", whole=target),
            ratio_rows("ratio", visual, text),
            make_rows("ratio_to_vocabulary", visual / target),
        ]
    )


def input_scale(entering: torch.Tensor, embedded: torch.Tensor) -> float:
    """What a decoder multiplies its input by: 1 unless it is the same for every one of several text tokens. Positions
    that are added give them factors of their own. Norms at the first layer and of the embeddings are `(num_tokens,)`.
    """
    factors = (entering / embedded)[embedded > 0]
    if len(factors) < 2:
        return 1.0
    scale = factors.median()
    is_one_factor = (factors - scale).abs().max() < 0.02 * scale
    return scale.item() if is_one_factor and (scale - 1).abs() > 0.02 else 1.0


def measure_layers(records: Sequence[Record]) -> pd.DataFrame:
    """Rows of norms, turning and updates by layer and modality, and of their differences."""
    norms, turning, rows = {}, {}, []
    for modality in ("visual", "text"):

        def means(values: Sequence[torch.Tensor], modality: str = modality) -> np.ndarray:
            masks = [getattr(record.tokens, modality) for record in records]
            within = [of[:, mask].double().mean(1).numpy() for of, mask in zip(values, masks, strict=True)]
            return np.stack(within)  # [num_pictures, num_layers]

        norms[modality] = means([record.layer_norms for record in records])
        turning[modality] = 1 - means([record.cosines for record in records])
        layers = range(turning[modality].shape[1])
        rows += [
            make_rows("norm", norms[modality], modality, range(len(layers) + 1)),
            make_rows("turning", turning[modality], modality, layers),
            make_rows("update_ratio", means([record.update_ratios for record in records]), modality, layers),
            make_rows("update_cosine", means([record.update_cosines for record in records]), modality, layers),
        ]
    ratio = ratio_rows("norm_ratio", norms["visual"], norms["text"], range(len(layers) + 1))
    return pd.concat([*rows, ratio, make_rows("gap", turning["text"] - turning["visual"], "", layers)])


def measure_attention(records: Sequence[Record]) -> pd.DataFrame | None:
    """Rows of the text's attention to the picture by layer; `None` where the model's attention was not recorded."""
    layers = sorted(set.intersection(*(set(record.attention) for record in records)))
    if not layers:
        return None
    found: dict[str, list[list[float]]] = {}
    for record in records:
        ordinary, everything = record.tokens.visual | record.tokens.text, torch.ones_like(record.tokens.visual)
        kinds = {"": (record.with_sinks.visual, everything), "_without_sinks": (record.tokens.visual, ordinary)}
        for kind, (visual, counted) in kinds.items():
            measured = [attention_share(record.attention[layer], visual, counted) for layer in layers]
            even = [attention_share(record.visible[layer][None], visual, counted) for layer in layers]
            found.setdefault(f"attention{kind}", []).append(measured)
            found.setdefault(f"attention_even{kind}", []).append(even)
    return pd.concat([make_rows(name, shares, "", layers) for name, shares in found.items()])


def attention_share(attention: torch.Tensor, visual: torch.Tensor, counted: torch.Tensor) -> float:
    """Share of the attention on the counted keys that falls on visual ones, mean over heads and queries; attention is
    `(num_heads, num_queries, S)`, of any scale, and the masks are `(S,)`."""
    weights = attention.double() * counted
    return (weights[..., visual].sum(-1) / weights.sum(-1).clamp(min=1e-30)).mean().item()


def measure_drift(record: Record, plain: Record) -> dict[str, float]:
    """How far a picture's visual keys and values have turned from those of its `plain` record: 1 less the cosine, mean
    over heads and layers, but for the first, which is given the same but for a length. Empty without keys."""
    kept, found = plain.tokens.visual[plain.key_positions], {}
    for space in ("keys", "values"):
        now, before = getattr(record, space), getattr(plain, space)
        layers = [layer for layer in now.keys() & before.keys() if layer]
        cosines = [cosine_similarity(now[layer], before[layer], dim=-1)[:, kept].mean().item() for layer in layers]
        if cosines:
            found[f"{space}, turned"] = 1 - fmean(cosines)
    return found


def measure_projector_norm(model: PreTrainedModel) -> pd.DataFrame | None:
    """Rows of gain and bias; `None` for a model whose projector does not end in a norm."""
    norm = find_norm(model)
    if norm is None:
        return None
    with align_module_device(norm):  # offloaded weights are on the meta device otherwise
        gain = norm.weight.detach().double().cpu()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double().cpu()
    target = getattr(model.config, "projector_norm_target", None)
    start = 1.0 if target is None else target / sqrt(len(gain))
    numbers = {"gain_l2": gain.norm(), "bias_l2": bias.norm(), "gain_drift": (gain - start).norm()}
    return pd.concat([make_rows(name, whole=value.item()) for name, value in numbers.items()])
