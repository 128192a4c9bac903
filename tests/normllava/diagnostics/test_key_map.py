"""Tests of the key map, which places attention keys on a plane. The keys are made up."""

import dataclasses

import pandas as pd
import pytest
import torch

from families import build, inputs, record_sample
from normllava.diagnostics.key_map import draw_key_map, place_keys
from normllava.diagnostics.keys import measure_space
from normllava.diagnostics.probe import Record
from normllava.diagnostics.table import Summary


LAYERS = (0, 5, 9, 20)  # the layers whose keys the records have
PLACED_LAYERS = [0, 9, 20]  # the first, the third and the last of `LAYERS`
NUM_PICTURES = 6
NUM_TEXT_TOKENS = 12  # of the question that is asked about each picture


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Records with random keys. In each layer but layer 0, the keys of image tokens lie apart from those of text."""
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    is_image_token = record.tokens.image
    all_positions = torch.arange(len(is_image_token))
    keys_shape = (2, len(is_image_token), 8)  # num_key_value_heads, num_tokens, head_dim
    generator = torch.Generator().manual_seed(0)

    records = []
    for _ in range(NUM_PICTURES):
        keys = {layer: torch.randn(keys_shape, generator=generator) for layer in LAYERS}
        for layer in LAYERS[1:]:  # all but layer 0
            keys[layer][:, is_image_token] += 6
        records.append(dataclasses.replace(record, keys=keys, values={}, key_positions=all_positions))
    return records


@pytest.fixture(scope="module")
def rows(records: list[Record]) -> pd.DataFrame:
    """Rows with the distances between the keys of image and text tokens in these records."""
    rows = measure_space("keys", records)
    assert rows is not None
    return rows


def test_each_placed_layer_has_as_many_image_tokens_as_text_tokens(records: list[Record], rows: pd.DataFrame) -> None:
    placed = place_keys(records, rows)
    assert sorted(placed["layer"].unique()) == PLACED_LAYERS
    num_tokens = placed.groupby(["layer", "modality"]).size()
    assert len(num_tokens) == len(PLACED_LAYERS) * 2  # two modalities
    # A picture has more image tokens than text tokens, so all text tokens are placed, and as many image tokens.
    assert (num_tokens == NUM_PICTURES * NUM_TEXT_TOKENS).all()


def test_keys_get_the_same_places_every_time(records: list[Record], rows: pd.DataFrame) -> None:
    assert place_keys(records, rows).equals(place_keys(records, rows))


def share_of_alike_neighbours(tokens: pd.DataFrame) -> float:
    """The share of tokens whose nearest neighbour is of the same modality."""
    places = torch.tensor(tokens[["x", "y"]].to_numpy(dtype="float64"))
    distances = torch.cdist(places, places).fill_diagonal_(torch.inf)
    nearest = distances.argmin(dim=1).numpy()
    modalities = tokens["modality"].to_numpy()
    return float((modalities[nearest] == modalities).mean())


def test_image_and_text_tokens_lie_apart_where_their_keys_do(records: list[Record], rows: pd.DataFrame) -> None:
    placed = place_keys(records, rows)
    assert share_of_alike_neighbours(placed[placed["layer"] == 9]) == 1
    assert share_of_alike_neighbours(placed[placed["layer"] == 0]) < 0.7  # by chance it is 0.5


def test_the_figure_has_a_row_for_each_model(records: list[Record], rows: pd.DataFrame) -> None:
    placed = place_keys(records, rows)
    before = placed.assign(model="before")
    after = placed[placed["layer"] == 9].assign(model="after")
    summaries = {"before": Summary.of(rows), "after": Summary.of(rows)}
    figure = draw_key_map(summaries, pd.concat([before, after]))

    # The second model has a single layer, so the last two axes of its row are empty.
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    labels = [axis.get_xlabel() for axis in figure.axes if axis.axison]
    assert titles == ["before", "", "", "", "after", "", "", ""]
    assert labels == ["layer", "keys of layer 0", "keys of layer 9", "keys of layer 20", "layer", "keys of layer 9"]


def test_without_a_measured_divergence_nothing_is_placed(records: list[Record], rows: pd.DataFrame) -> None:
    """Only layers that have a row of the divergence, "keys.jsd", are placed."""
    rows_of_another_measure = rows[rows["measure"] == "keys.mmd"]
    assert place_keys(records, rows_of_another_measure).empty
