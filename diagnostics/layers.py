"""How long visual and text tokens are at each layer of the decoder, and how fast they turn.

Source: "The Unseen Bias" (arXiv 2512.08374), Fig. 1b, 3, 4 and 5: the cosine between a token's hidden states before
and after a layer stands for its angular velocity (eq. 8); the closer to 1, the slower it turns.
"""

from collections.abc import Sequence

import numpy as np
import torch

from diagnostics.probe import Record
from diagnostics.results import Layers, Turning
from diagnostics.statistics import curve, estimate


DEFINITIONS = {
    "norm": "L2 norm of the hidden states that enter each layer, and last of what leaves the last layer, before the "
    "decoder's final norm",
    "cosine": "cosine between what enters a layer and what leaves it; 1 means that the token does not turn",
    "update_ratio": "norm of a layer's whole residual update over the norm of what enters, ‖u‖/‖h‖",
    "update_cosine": "cosine between what enters a layer and the update, cos(u, h)",
    "angle": "angle in degrees by which the update turns the token, by equation 8 from the two numbers before",
    "update_rate": "1 - cosine, mean over the layers",
    "gap": "cosine of visual tokens less that of text tokens, by layer in pairs within each sample; above 0, visual "
    "tokens turn more slowly",
}


def measure_layers(records: Sequence[Record]) -> Layers:
    """The numbers of `DEFINITIONS` by modality and layer, with intervals."""
    visual, text = ([getattr(record.tokens, modality) for record in records] for modality in ("visual", "text"))
    visual_cosines, text_cosines = (
        _by_sample([record.cosines for record in records], masks) for masks in (visual, text)
    )
    gap = visual_cosines - text_cosines
    return Layers(
        visual=_turning(records, visual, visual_cosines),
        text=_turning(records, text, text_cosines),
        gap=curve(gap),
        mean_gap=estimate(gap.mean(axis=1, keepdims=True)),
    )


def _turning(records: Sequence[Record], masks: Sequence[torch.Tensor], cosines: np.ndarray) -> Turning:
    return Turning(
        norm=curve(_by_sample([record.layer_norms for record in records], masks)),
        cosine=curve(cosines),
        update_ratio=curve(_by_sample([record.update_ratios for record in records], masks)),
        update_cosine=curve(_by_sample([record.update_cosines for record in records], masks)),
        angle=curve(_by_sample([record.angles.rad2deg() for record in records], masks)),
        update_rate=estimate(1 - cosines.mean(axis=1, keepdims=True)),
    )


def _by_sample(values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean over the chosen tokens of each sample, `(num_samples, num_values)`, of `(num_values, S)` each."""
    return np.stack([v[:, mask].double().mean(1).numpy() for v, mask in zip(values, masks, strict=True)])
