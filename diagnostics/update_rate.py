"""How long visual and text tokens are at each layer of the decoder, and how fast they turn.

Source: "The Unseen Bias" (arXiv 2512.08374), Fig. 1b, 3, 4 and 5: the cosine between a token's hidden states before
and after a layer stands for its angular velocity (eq. 8); the closer to 1, the slower it turns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from diagnostics.capture import Record
from diagnostics.statistics import describe


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


def measure_layers(records: Sequence[Record]) -> dict[str, Any]:
    """The numbers of `DEFINITIONS` by modality and layer, with intervals.

    Returns:
        Under `"visual"` and `"text"`, by name `{"mean": [...], "interval": [...]}` over the layers, and `update_rate`
        alike for one value; under `"gap"` the same over the layers, and under `"mean_gap"` for their mean.
    """
    values = {
        modality: {
            "norm": _by_sample(records, modality, lambda record: record.layer_norms),
            "cosine": _by_sample(records, modality, lambda record: record.cosines),
            "update_ratio": _by_sample(records, modality, lambda record: record.update_ratios),
            "update_cosine": _by_sample(records, modality, lambda record: record.update_cosines),
            "angle": _by_sample(records, modality, lambda record: record.angles.rad2deg()),
        }
        for modality in ("visual", "text")
    }
    measured: dict[str, Any] = {}
    for modality, by_name in values.items():
        measured[modality] = {name: describe(samples) for name, samples in by_name.items()}
        measured[modality]["update_rate"] = _describe_one(1 - by_name["cosine"].mean(axis=1, keepdims=True))
    gap = values["visual"]["cosine"] - values["text"]["cosine"]
    measured["gap"] = describe(gap)
    measured["mean_gap"] = _describe_one(gap.mean(axis=1, keepdims=True))
    return measured


def _by_sample(records: Sequence[Record], modality: str, value: Callable[[Record], torch.Tensor]) -> np.ndarray:
    """Mean over a sample's tokens, `(num_samples, num_values)`."""
    return np.stack([value(r)[:, getattr(r.tokens, modality)].double().mean(1).numpy() for r in records])


def _describe_one(samples: np.ndarray) -> dict[str, Any]:
    """What [`describe`] returns of a single value, `(num_samples, 1)`, out of its lists."""
    return {name: values[0] for name, values in describe(samples).items()}
