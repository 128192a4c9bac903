"""Attention of text to the picture (App. G of "The Unseen Bias", arXiv 2512.08374)."""

from collections.abc import Sequence

import numpy as np
import torch

from diagnostics.probe import Record
from diagnostics.results import Attention, ByLayer, ComparedGaze, Gaze
from diagnostics.statistics import by_layer, by_picture
from diagnostics.tokens import Tokens


DEFINITIONS = {
    "queries": "the last ordinary text tokens after the last picture, 15 at most, and the position that the answer "
    "begins from; numbers are means over queries and heads",
    "mass": "share of a query's attention that falls on visual tokens",
    "evenly spread": "the same for uniform attention over all tokens that the mask allows",
    "entropy": "entropy of the attention over visual tokens, renormalised to sum to 1, over its maximum log2(n), n "
    "the visual tokens that the query sees: 1 is uniform, 0 is all on one token. Heads and queries without attention "
    "to visual tokens are left out",
    "bottom_third": "share of the attention on visual tokens that falls on the lowest third of the picture's rows, "
    "for the same queries",
    "without_sinks": "the same without sink, special and newline tokens among the keys, renormalised to sum to 1; "
    "`with_sinks` includes all keys",
}


def bottom_rows(grid: tuple[int, int]) -> torch.Tensor:
    """Which visual tokens lie in the lowest third of the picture, `(height * width,)`: rows whose centre does."""
    height, width = grid
    low = (torch.arange(height) + 0.5) / height > 2 / 3
    return low.repeat_interleave(width)


def attention_numbers(
    attention: torch.Tensor, visible: torch.Tensor, tokens: Tokens, counted: torch.Tensor, bottom: torch.Tensor | None
) -> dict[str, float]:
    """`mass`, `entropy` and, if the layout is known, `bottom_third` of one layer of one sample; see `DEFINITIONS`.

    Args:
        attention: `(num_heads, num_queries, S)`, of any scale: normalised to sum to 1 over the counted keys.
        visible: Which keys the mask lets each query see, `(num_queries, S)`.
        tokens: Type of each position.
        counted: Keys to count, `(S,)`.
        bottom: Positions of visual tokens in the lowest third, `(S,)`.
    """
    attention = attention.double() * counted
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=1e-30)
    mass = attention[..., tokens.visual].sum(-1)
    # Without attention to the picture this is 0 / 0 = NaN, and left out.
    within = attention[..., tokens.visual] / mass[..., None]
    seen = visible[:, tokens.visual].sum(-1).clamp(min=2)  # [num_queries]
    entropy = torch.special.entr(within).sum(-1) / seen.log()
    numbers = {"mass": mass.mean().item(), "entropy": entropy.nanmean().item()}
    if bottom is not None:
        numbers["bottom_third"] = within[..., bottom[tokens.visual]].sum(-1).nanmean().item()
    return numbers


def measure_attention(records: Sequence[Record], pictures: np.ndarray) -> Attention | None:
    """The numbers of `DEFINITIONS` by layer, `None` where the model's attention was not recorded.

    `bottom_third` is included if every picture's layout is known.

    Args:
        records: One for each sample.
        pictures: Number of each sample's picture.
    """
    layers = sorted(set.intersection(*(set(record.attention) for record in records)))
    if not layers:
        return None
    bottoms = [_bottom_positions(record) for record in records]
    if any(bottom is None for bottom in bottoms):
        bottoms = [None] * len(records)
    by_head = [
        [record.attention[layer][..., record.with_sinks.visual].double().sum(-1).mean(-1).numpy() for layer in layers]
        for record in records
    ]
    with_sinks, without_sinks = (_compare(records, pictures, bottoms, layers, sinks) for sinks in (True, False))
    return Attention(
        layers,
        with_sinks,
        without_sinks,
        mass_by_head=by_picture(np.array(by_head), pictures).mean(axis=0).tolist(),
    )


def _compare(
    records: Sequence[Record],
    pictures: np.ndarray,
    bottoms: Sequence[torch.Tensor | None],
    layers: Sequence[int],
    with_sinks: bool,
) -> ComparedGaze:
    """Attention of text to the picture, over all keys or over ordinary tokens only."""
    seen, even = [], []
    for record, bottom in zip(records, bottoms, strict=True):
        tokens, counted = record.tokens, record.tokens.visual | record.tokens.text
        if with_sinks:
            tokens, counted = record.with_sinks, torch.ones_like(counted)
        low = None if bottom is None else bottom & tokens.visual
        seen.append([attention_numbers(record.attention[n], record.visible[n], tokens, counted, low) for n in layers])
        even.append(
            [attention_numbers(record.visible[n][None], record.visible[n], tokens, counted, low) for n in layers]
        )
    return ComparedGaze(**_by_layer(seen, pictures), evenly_spread=Gaze(**_by_layer(even, pictures)))


def _bottom_positions(record: Record) -> torch.Tensor | None:
    """Positions of visual tokens in the lowest third of the picture, `(S,)`; `None` where its layout is not known."""
    if record.grid is None:
        return None
    bottom = torch.zeros_like(record.with_sinks.visual)
    bottom[record.with_sinks.visual] = bottom_rows(record.grid)
    return bottom


def _by_layer(samples: list[list[dict[str, float]]], pictures: np.ndarray) -> dict[str, ByLayer]:
    """Curves over the layers by name, from a dict for each layer of each sample."""
    return {
        name: by_layer(by_picture(np.array([[numbers[name] for numbers in sample] for sample in samples]), pictures))
        for name in samples[0][0]
    }


def attention_map(
    record: Record, layer: int, heads: Sequence[int] | None = None, query: int = -1
) -> torch.Tensor | None:
    """One query's attention over the picture, `(height, width)`, or `None` where its layout is not known.

    Args:
        record: Of one sample.
        layer: A recorded layer.
        heads: Heads to average; all by default.
        query: Index into the recorded queries; the last one is where the answer begins.
    """
    if record.grid is None:
        return None
    rows = record.attention[layer][:, query, record.with_sinks.visual]
    return (rows if heads is None else rows[list(heads)]).mean(0).reshape(record.grid)
