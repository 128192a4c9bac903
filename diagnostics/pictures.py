"""Data of the report's image figures: pictures, attention maps over them, and keys in 2D."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from diagnostics.attention import attention_map
from diagnostics.key_space import project
from diagnostics.probe import Record
from diagnostics.results import Space
from diagnostics.samples import Sample


# Samples whose attention is drawn.
NUM_MAPS = 3


@dataclass(frozen=True)
class Pictures:
    """One model's data to draw.

    Attributes:
        seen: By sample, the picture as the vision encoder got it.
        maps: By sample, attention over it by layer.
        keys: Number of a layer, and t-SNE of its visual and text keys; `None` if keys were not measured.
    """

    seen: list[Image.Image]
    maps: list[dict[int, torch.Tensor]]
    keys: tuple[int, np.ndarray, np.ndarray] | None


def take_pictures(
    samples: Sequence[Sample],
    records: Sequence[Record],
    pictures: np.ndarray,
    key_space: Space | None,
    heads: Sequence[int] | None,
    query: int,
) -> Pictures:
    """The first `NUM_MAPS` samples with their attention maps, and the keys of the middle layer of `key_space`.

    Args:
        samples, records: One for each question; the first ones are of different pictures, if there are any.
        pictures: Number of each sample's picture.
        key_space: Measures of the keys.
        heads, query: As in [`attention_map`].
    """
    maps = []
    for record in records[:NUM_MAPS]:
        by_layer = {layer: attention_map(record, layer, heads, query) for layer in sorted(record.attention)}
        maps.append({layer: values for layer, values in by_layer.items() if values is not None})
    keys = None
    if key_space is not None:
        middle = key_space.layers[len(key_space.layers) // 2]
        keys = (middle, *project(records, pictures, middle))
    return Pictures([sample.picture for sample in samples[:NUM_MAPS]], maps, keys)
