"""How far apart tokens are: against the definition on paper, and where tokens of one picture are alike."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from diagnostics.keys import BANDWIDTHS, kernel, linear_probe, measure_space, unbiased_mmd
from diagnostics.probe import Record
from diagnostics.table import Estimate, summarize_rows
from families import build, inputs, record_sample


def test_mmd_is_the_double_sum_of_its_definition_over_different_pictures() -> None:
    rng = np.random.default_rng(0)
    points, groups = rng.normal(size=(24, 3)) * rng.uniform(1, 2, (24, 1)), np.repeat(np.arange(6), 4)
    pictures = np.arange(6) % 3  # visual and text tokens of three pictures
    pairs = list(itertools.permutations(range(24), 2))
    scale = np.mean([np.sum((points[i] - points[j]) ** 2) for i, j in pairs])

    def mean(one: int, other: int) -> float:
        """Of the kernel, over pairs of tokens of two modalities and different pictures."""
        apart = [
            np.sum((points[i] - points[j]) ** 2)
            for i, j in itertools.product(range(12 * one, 12 * one + 12), range(12 * other, 12 * other + 12))
            if pictures[groups[i]] != pictures[groups[j]]
        ]
        return float(np.mean([np.exp(-distance / (s * scale)) for distance in apart for s in BANDWIDTHS]))

    visual, text = np.array([[1, 1, 1, 0, 0, 0]]) > 0, np.array([[0, 0, 0, 1, 1, 1]]) > 0
    expected = mean(0, 0) + mean(1, 1) - 2 * mean(0, 1)
    assert unbiased_mmd(kernel(points), groups, pictures, (visual, text)) == pytest.approx([expected])


def test_the_probe_keeps_a_picture_in_one_part() -> None:
    rng = np.random.default_rng(3)
    groups = np.arange(200) % 20  # of ten pictures, visual and text
    assert linear_probe(rng.normal(size=(200, 3)) + 5 * (groups < 10)[:, None], groups, 10) == 1
    # Each modality of each picture has a place of its own, which says nothing about another picture's tokens.
    assert 0.3 < linear_probe(np.eye(20)[groups], groups, 10) < 0.7
    # One picture of five has no token left.
    few = np.concatenate([np.repeat(np.arange(4), 9), np.repeat(np.arange(5, 9), 9)])
    assert linear_probe(rng.normal(size=(72, 3)) + 5 * (few < 5)[:, None], few, 5) == 1


@pytest.fixture(scope="module")
def record() -> Record:
    return record_sample(build("llava-siglip"), inputs("llava-siglip"))


def fabricate(record: Record, visual: torch.Tensor, text: torch.Tensor, space: str = "keys") -> Record:
    """The record with one layer, whose keys (or values) are given, `(num_heads, n, head_dim)` or `(n, head_dim)`."""
    keys = torch.zeros(*visual.shape[:-2] or (1,), len(record.tokens.visual), visual.shape[-1])
    keys[:, record.with_sinks.visual], keys[:, record.with_sinks.text] = visual, text
    return dataclasses.replace(record, **{space: {0: keys}}, key_positions=torch.arange(keys.shape[1]))


def measured(records: list[Record], space: str = "keys") -> dict[str, Estimate]:
    """Estimates of the only layer, by measure."""
    rows = measure_space(space, records)
    assert rows is not None
    found = summarize_rows(rows).itertuples()
    return {of.measure.removeprefix(f"{space}."): Estimate(of.mean, of.low, of.high) for of in found}


def test_keys_apart_and_alike(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(count, 8, generator=generator)

    alike = measured([fabricate(record, draw(16), draw(12)) for _ in range(8)])
    apart = measured([fabricate(record, draw(16) + 3, draw(12), "values") for _ in range(8)], "values")
    assert alike["tokens"].mean == 96  # all text tokens, and as many visual ones
    assert abs(alike["mmd"].mean) < 0.02 < 0.2 < apart["mmd"].mean
    assert apart["probe"].mean == 1
    assert 0.3 < alike["probe"].mean < 0.7


def of_pictures(record: Record, num_pictures: int, generator: torch.Generator) -> list[Record]:
    """Keys of which only the picture says where they lie, in either modality for itself."""
    at = torch.randn(num_pictures, 2, 1, 8, generator=generator)
    return [
        fabricate(record, visual + 0.3 * torch.randn(16, 8, generator=generator), text.expand(12, 8))
        for visual, text in at
    ]


def test_tokens_of_one_picture_are_no_evidence(record: Record) -> None:
    """Pictures differ, modalities do not: halves of tokens, not of pictures, looked alike."""
    distances = []
    for seed in range(20):
        space = measured(of_pictures(record, 8, torch.Generator().manual_seed(seed)))
        distances.append((space["mmd"].mean, space["mmd_halves"].mean))
    apart, halves = np.array(distances).T
    assert abs(apart.mean()) < 3 * apart.std() / 20**0.5  # about 0, where pairs within pictures made it 0.03
    assert 0.7 < (apart < halves).mean() < 1  # halves of the pictures are as far apart as the modalities


def test_one_picture_says_nothing(record: Record) -> None:
    assert measure_space("keys", of_pictures(record, 1, torch.Generator().manual_seed(0))) is None


def test_the_interval_of_mmd_holds_its_mean(record: Record) -> None:
    """Pictures that differ, several heads, a true difference; pairs within a picture raised it past its interval."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(30):
        at = torch.randn(8, 2, 3, 1, 4, generator=generator)
        records = [
            fabricate(record, v + 0.3 * torch.randn(3, 16, 4, generator=generator) + 0.5, t.expand(3, 12, 4))
            for v, t in at
        ]
        found.append(measured(records)["mmd"])
    means, low, high = np.array(found).T
    assert ((low <= means.mean()) & (means.mean() <= high)).mean() > 0.9
