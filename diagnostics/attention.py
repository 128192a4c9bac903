"""Where text looks in the picture (App. G of "The Unseen Bias", arXiv 2512.08374)."""

from collections.abc import Sequence

import numpy as np
import torch

from diagnostics.probe import Record
from diagnostics.results import Attention, ComparedGaze, Curve, Gaze
from diagnostics.statistics import curve
from diagnostics.tokens import Tokens


DEFINITIONS = {
    "queries": "the last ordinary text tokens past the last picture, 15 at most, and the position that the answer "
    "begins from; numbers are means over queries and heads",
    "mass": "share of a query's attention that falls on visual tokens",
    "evenly spread": "the same if a query looked alike at every token that the mask lets it see",
    "entropy": "entropy of the attention over visual tokens alone, made to sum to 1, over its largest value log2(n): "
    "1 is evenly spread, 0 is all on one token",
    "bottom_third": "share of the attention on visual tokens that falls on the lowest third of the picture's rows",
    "without_sinks": "the same with sink, special and newline tokens taken out of the keys and the rest made to sum "
    "to 1; `with_sinks` leaves everything in",
}


def bottom_rows(grid: tuple[int, int]) -> torch.Tensor:
    """Which visual tokens lie in the lowest third of the picture, `(height * width,)`: rows whose centre does."""
    height, width = grid
    low = (torch.arange(height) + 0.5) / height > 2 / 3
    return low.repeat_interleave(width)


def attention_numbers(
    attention: torch.Tensor, tokens: Tokens, counted: torch.Tensor, bottom: torch.Tensor | None
) -> dict[str, float]:
    """`mass`, `entropy` and, if the layout is known, `bottom_third` of one layer of one sample; see `DEFINITIONS`.

    Args:
        attention: `(num_heads, num_queries, S)`, of any scale: it is made to sum to 1 over the keys that count.
        tokens: Which position is what.
        counted: Keys that count, `(S,)`.
        bottom: Positions of visual tokens in the lowest third, `(S,)`.
    """
    attention = attention.double() * counted
    attention = attention / attention.sum(-1, keepdim=True).clamp(min=1e-30)
    mass = attention[..., tokens.visual].sum(-1)
    within = attention[..., tokens.visual] / mass.clamp(min=1e-30)[..., None]
    entropy = torch.special.entr(within).sum(-1) / np.log(max(int(tokens.visual.sum()), 2))
    numbers = {"mass": mass.mean().item(), "entropy": entropy.mean().item()}
    if bottom is not None:
        numbers["bottom_third"] = (attention[..., bottom].sum(-1) / mass.clamp(min=1e-30)).mean().item()
    return numbers


def measure_attention(records: Sequence[Record]) -> Attention | None:
    """The numbers of `DEFINITIONS` by layer, `None` where the model's attention was not recorded.

    `bottom_third` is there if every picture's layout is known.
    """
    layers = sorted(records[0].attention)
    if not layers:
        return None
    bottoms = [_bottom_positions(record) for record in records]
    if any(bottom is None for bottom in bottoms):
        bottoms = [None] * len(records)
    return Attention(layers, *(_compare(records, bottoms, layers, sinks) for sinks in (True, False)))


def _compare(
    records: Sequence[Record], bottoms: Sequence[torch.Tensor | None], layers: Sequence[int], with_sinks: bool
) -> ComparedGaze:
    """Where text looks, with everything among the keys or with ordinary tokens alone."""
    seen, even = [], []
    for record, bottom in zip(records, bottoms, strict=True):
        tokens, counted = record.tokens, record.tokens.visual | record.tokens.text
        if with_sinks:
            tokens, counted = record.with_sinks, torch.ones_like(counted)
        low = None if bottom is None else bottom & tokens.visual
        seen.append([attention_numbers(record.attention[layer], tokens, counted, low) for layer in layers])
        even.append([attention_numbers(record.visible[layer][None], tokens, counted, low) for layer in layers])
    return ComparedGaze(**_by_layer(seen), evenly_spread=Gaze(**_by_layer(even)))


def _bottom_positions(record: Record) -> torch.Tensor | None:
    """Positions of visual tokens in the lowest third of the picture, `(S,)`; `None` where its layout is not known."""
    if record.grid is None:
        return None
    bottom = torch.zeros_like(record.with_sinks.visual)
    bottom[record.with_sinks.visual] = bottom_rows(record.grid)
    return bottom


def _by_layer(samples: list[list[dict[str, float]]]) -> dict[str, Curve]:
    """By name the curve over the layers, from a dict for each layer of each sample."""
    return {
        name: curve(np.array([[numbers[name] for numbers in sample] for sample in samples])) for name in samples[0][0]
    }


def attention_map(
    record: Record, layer: int, heads: Sequence[int] | None = None, query: int = -1
) -> torch.Tensor | None:
    """One query's attention over the picture, `(height, width)`, or `None` where its layout is not known.

    Args:
        record: Of one sample.
        layer: One of the layers that were recorded.
        heads: Heads to take the mean of; all by default.
        query: Number of the query among those recorded; the last one is where the answer begins.
    """
    if record.grid is None:
        return None
    rows = record.attention[layer][:, query, record.with_sinks.visual]
    return (rows if heads is None else rows[list(heads)]).mean(0).reshape(record.grid)
