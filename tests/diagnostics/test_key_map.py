"""Keys on a plane: of records whose keys are known."""

import dataclasses

import pandas as pd
import pytest
import torch

from diagnostics.key_map import draw_key_map, place_keys
from diagnostics.keys import measure_space
from diagnostics.probe import Record
from diagnostics.table import Summary
from families import build, inputs, record_sample


LAYERS = (0, 5, 9, 20)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Six pictures, four layers. In layer 0 all keys are alike; in the others image tokens lie apart."""
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    is_image_token = record.tokens.visual
    generator = torch.Generator().manual_seed(0)

    records = []
    for _ in range(6):
        keys = {layer: torch.randn(2, len(is_image_token), 8, generator=generator) for layer in LAYERS}
        for layer in LAYERS[1:]:
            keys[layer][:, is_image_token] += 6
        positions = torch.arange(len(is_image_token))
        records.append(dataclasses.replace(record, keys=keys, values={}, key_positions=positions))
    return records


@pytest.fixture(scope="module")
def rows(records: list[Record]) -> pd.DataFrame:
    rows = measure_space("keys", records)
    assert rows is not None
    return rows


def test_image_and_text_tokens_lie_apart_where_their_keys_do(records: list[Record], rows: pd.DataFrame) -> None:
    placed = place_keys(records, rows)
    assert sorted(placed["layer"].unique()) == [0, 9, 20]  # the first, the middle and the last of four
    assert (placed.groupby(["layer", "modality"]).size() == 6 * 12).all()  # as many as the text has

    def neighbours_alike(layer: int) -> float:
        """The share of tokens whose nearest neighbour is of the same modality."""
        tokens = placed[placed["layer"] == layer].reset_index(drop=True)
        points = torch.tensor(tokens[["x", "y"]].to_numpy(dtype="float64"))
        distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
        nearest = distances.argmin(dim=1).numpy()
        return float((tokens["modality"].to_numpy()[nearest] == tokens["modality"].to_numpy()).mean())

    assert neighbours_alike(9) == 1
    assert neighbours_alike(0) < 0.7
    assert place_keys(records, rows).equals(placed)  # the same every time


def test_the_figure_has_a_row_for_each_model(records: list[Record], rows: pd.DataFrame) -> None:
    placed = place_keys(records, rows)
    both = pd.concat([placed.assign(model="before"), placed[placed["layer"] == 9].assign(model="after")])
    figure = draw_key_map({"before": Summary.of(rows), "after": Summary.of(rows)}, both)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    labels = [axis.get_xlabel() for axis in figure.axes if axis.axison]
    assert titles == ["before", "", "", "", "after", "", "", ""]
    assert labels == ["layer", "keys of layer 0", "keys of layer 9", "keys of layer 20", "layer", "keys of layer 9"]


def test_without_enough_keys_nothing_is_placed(records: list[Record], rows: pd.DataFrame) -> None:
    assert place_keys(records, rows[rows["measure"] == "keys.mmd"]).empty
