"""Norms of visual and text tokens at each layer of the decoder, and how fast the tokens turn.

Source: "The Unseen Bias" (arXiv 2512.08374), Fig. 1b, 3, 4 and 5: the cosine between a token's hidden states before
and after a layer measures its angular velocity (eq. 8); the closer to 1, the slower it turns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from diagnostics.parts import layer_groups
from diagnostics.probe import Record
from diagnostics.results import LargestGap, LayerGroup, Layers, Turning
from diagnostics.statistics import LEVEL, by_layer, by_picture, estimate, ratio_by_layer


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
DEFINITIONS = {
    "norm": "L2 norm of the hidden states that enter each layer; the last value is the last layer's output, before "
    "the decoder's final norm",
    "cosine": "cosine between a layer's input and its output; 1 means that the token does not turn",
    "update_ratio": "norm of a layer's whole residual update over the norm of its input, ‖u‖/‖h‖",
    "update_cosine": "cosine between a layer's input and the update, cos(u, h)",
    "update_rate": "1 - cosine, mean over the layers",
    "gap": "cosine of visual tokens minus that of text tokens, paired within each sample; above 0, visual tokens turn "
    "more slowly. The interval of the layer with the largest gap is corrected for the choice of layer (Bonferroni)",
    "norm_ratio": "mean norm of visual tokens over that of text tokens, at the input of a layer",
}


def measure_layers(records: Sequence[Record], pictures: np.ndarray) -> Layers:
    """The numbers of `DEFINITIONS` by modality and layer, with intervals.

    Args:
        records: One for each sample.
        pictures: Number of each sample's picture.
    """
    visual, text = (_modality(records, pictures, modality) for modality in ("visual", "text"))
    gap = visual.cosines - text.cosines  # [num_pictures, L]
    largest = int(np.abs(gap.mean(axis=0)).argmax())
    return Layers(
        visual=visual.turning,
        text=text.turning,
        gap=by_layer(gap),
        norm_ratio=ratio_by_layer(visual.norms, text.norms),
        groups=[
            LayerGroup(
                name=name,
                first=int(third[0]),
                last=int(third[-1]),
                gap=by_layer(gap[:, third]).overall,
                norm_ratio=ratio_by_layer(visual.norms[:, third], text.norms[:, third]).overall,
            )
            for name, third in layer_groups(gap.shape[1]).items()
        ],
        largest_gap=LargestGap(largest, estimate(gap[:, largest], 1 - (1 - LEVEL) / gap.shape[1])),
    )


class _Modality(NamedTuple):
    """One modality's mean norms `(num_pictures, L + 1)`, mean cosines `(num_pictures, L)`, and their summary."""

    norms: np.ndarray
    cosines: np.ndarray
    turning: Turning


def _modality(records: Sequence[Record], pictures: np.ndarray, modality: str) -> _Modality:
    masks = [getattr(record.tokens, modality) for record in records]

    def means(values: Sequence[torch.Tensor]) -> np.ndarray:
        within = [v[:, mask].double().mean(1).numpy() for v, mask in zip(values, masks, strict=True)]
        return by_picture(np.stack(within), pictures)

    norms, cosines = means([record.layer_norms for record in records]), means([record.cosines for record in records])
    tokens = torch.cat([record.layer_norms[:, mask] for record, mask in zip(records, masks, strict=True)], dim=1)
    turning = Turning(
        norm=by_layer(norms),
        norm_quantiles={f"{q:.0%}": np.quantile(tokens.double().numpy(), q, axis=1).tolist() for q in QUANTILES},
        cosine=by_layer(cosines),
        update_ratio=by_layer(means([record.update_ratios for record in records])),
        update_cosine=by_layer(means([record.update_cosines for record in records])),
        update_rate=by_layer(1 - cosines).overall,
    )
    return _Modality(norms, cosines, turning)
