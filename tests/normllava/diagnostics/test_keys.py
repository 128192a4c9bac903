"""Tests of two distances between the keys of image and of text tokens: MMD², and the accuracy of a linear probe.

MMD² is compared with its definition. Both distances are measured for keys whose distribution is known.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from families import build, inputs, record_sample
from normllava.diagnostics.divergence import SetPairs
from normllava.diagnostics.keys import kernel_matrix, linear_probe, measure_space, unbiased_mmd
from normllava.diagnostics.probe import Record
from normllava.diagnostics.table import Estimate, summarize_rows
from normllava.kernels import BANDWIDTHS


# Number of tokens of each modality in the records below. Each record is of another picture.
NUM_IMAGE_TOKENS = 16
NUM_TEXT_TOKENS = 12


def test_mmd_is_the_double_sum_of_its_definition_over_different_pictures() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.uniform(1, 2, (24, 1))  # so that the distribution is not normal
    points = lengths * rng.normal(size=(24, 3))

    # Four tokens of each group: groups 0 to 2 are image tokens of three pictures, groups 3 to 5 their text tokens.
    groups = np.repeat(np.arange(6), 4)
    picture_of_group = np.array([0, 1, 2, 0, 1, 2])
    image_tokens = range(12)
    text_tokens = range(12, 24)

    def squared_distance(i: int, j: int) -> float:
        return float(np.sum((points[i] - points[j]) ** 2))

    mean_squared_distance = np.mean([squared_distance(i, j) for i, j in itertools.permutations(range(24), 2)])

    def mean_kernel(first_tokens: range, second_tokens: range) -> float:
        kernels = []
        for i, j in itertools.product(first_tokens, second_tokens):
            if picture_of_group[groups[i]] == picture_of_group[groups[j]]:
                continue
            for bandwidth in BANDWIDTHS:
                scale = bandwidth * mean_squared_distance
                kernels.append(np.exp(-squared_distance(i, j) / scale))
        return float(np.mean(kernels))

    within_modalities = mean_kernel(image_tokens, image_tokens) + mean_kernel(text_tokens, text_tokens)
    expected = within_modalities - 2 * mean_kernel(image_tokens, text_tokens)
    # One pair of sets: all image tokens, and all text tokens.
    is_image_group = np.array([[True, True, True, False, False, False]])
    modalities: SetPairs = (is_image_group, ~is_image_group)
    mmd = unbiased_mmd(kernel_matrix(points), groups, picture_of_group, modalities)
    assert mmd == pytest.approx([expected])


def test_the_linear_probe_finds_the_modality_of_tokens_that_lie_apart() -> None:
    rng = np.random.default_rng(3)
    groups = np.arange(200) % 20  # 0 to 9 are the image tokens of ten pictures, 10 to 19 their text tokens
    points = rng.normal(size=(200, 3))
    points[groups < 10] += 5
    assert linear_probe(points, groups, num_pictures=10) == 1


def test_the_linear_probe_keeps_all_tokens_of_a_picture_in_one_fold() -> None:
    """All tokens of a group have the same key, which tells nothing of other groups.

    If a picture's tokens were in several folds, the linear probe would know all groups, and its accuracy would be 1.
    """
    groups = np.arange(200) % 20  # 0 to 9 are the image tokens of ten pictures, 10 to 19 their text tokens
    points = np.eye(20)[groups]
    assert 0.3 < linear_probe(points, groups, num_pictures=10) < 0.7  # 0.5 is chance


def test_the_linear_probe_takes_a_picture_without_tokens() -> None:
    """The last of five pictures has no tokens, so its groups, 4 and 9, are missing."""
    rng = np.random.default_rng(3)
    groups = np.repeat([0, 1, 2, 3, 5, 6, 7, 8], 9)
    points = rng.normal(size=(72, 3))
    points[groups < 5] += 5
    assert linear_probe(points, groups, num_pictures=5) == 1


@pytest.fixture(scope="module")
def record() -> Record:
    """The record of a sample with `NUM_IMAGE_TOKENS` image tokens and `NUM_TEXT_TOKENS` text tokens."""
    return record_sample(build("llava-siglip"), inputs("llava-siglip"))


def with_vectors(
    record: Record, image_vectors: torch.Tensor, text_vectors: torch.Tensor, space: str = "keys"
) -> Record:
    """A copy of the record with a single layer, which has these vectors as its keys or values.

    Args:
        record: The record.
        image_vectors: Keys or values of the image tokens, `(num_heads, NUM_IMAGE_TOKENS, head_dim)`.
        text_vectors: Keys or values of the text tokens, `(num_heads, NUM_TEXT_TOKENS, head_dim)`.
        space: `"keys"` or `"values"`.
    """
    num_heads, _, head_dim = image_vectors.shape
    tokens = record.tokens_with_sinks  # all image and text tokens, also those that are sinks in the real record
    length = len(tokens.image)
    vectors = torch.zeros(num_heads, length, head_dim)
    vectors[:, tokens.image] = image_vectors
    vectors[:, tokens.text] = text_vectors
    return dataclasses.replace(record, **{space: {0: vectors}}, key_positions=torch.arange(length))


def measure_only_layer(records: list[Record], space: str = "keys") -> dict[str, Estimate]:
    """The estimates of the only layer by measure, such as `"mmd"`."""
    rows = measure_space(space, records)
    assert rows is not None
    estimates = {}
    for row in summarize_rows(rows).itertuples():
        measure = row.measure.removeprefix(f"{space}.")
        estimates[measure] = Estimate(row.mean, row.low, row.high)
    return estimates


def draw_vectors(count: int, generator: torch.Generator) -> torch.Tensor:
    """Keys or values of one head, all from the same distribution."""
    return torch.randn(1, count, 8, generator=generator)


def test_modalities_that_are_alike_have_no_distance(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)
    records = []
    for _ in range(8):
        image_vectors = draw_vectors(NUM_IMAGE_TOKENS, generator)
        text_vectors = draw_vectors(NUM_TEXT_TOKENS, generator)
        records.append(with_vectors(record, image_vectors, text_vectors))

    estimates = measure_only_layer(records)
    # `tokens` is the number of tokens of each modality: all text tokens, and as many image tokens.
    assert estimates["tokens"].mean == 8 * NUM_TEXT_TOKENS
    assert abs(estimates["mmd"].mean) < 0.02
    assert 0.3 < estimates["probe"].mean < 0.7  # 0.5 is chance


def test_modalities_that_lie_apart_have_a_distance(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)
    records = []
    for _ in range(8):
        image_vectors = draw_vectors(NUM_IMAGE_TOKENS, generator) + 3
        text_vectors = draw_vectors(NUM_TEXT_TOKENS, generator)
        records.append(with_vectors(record, image_vectors, text_vectors, space="values"))

    estimates = measure_only_layer(records, space="values")
    assert estimates["mmd"].mean > 0.2
    assert estimates["probe"].mean == 1


def draw_records(
    record: Record,
    generator: torch.Generator,
    num_pictures: int = 8,
    num_heads: int = 1,
    head_dim: int = 8,
    shift: float = 0.0,
) -> list[Record]:
    """Records of pictures whose image tokens lie around one random place, and whose text tokens lie at another.

    Both places are drawn from the same distribution, so modalities differ only by `shift`, which is added to image
    tokens.
    """
    places = torch.randn(num_pictures, 2, num_heads, 1, head_dim, generator=generator)
    records = []
    for image_place, text_place in places:
        noise = 0.3 * torch.randn(num_heads, NUM_IMAGE_TOKENS, head_dim, generator=generator)
        image_vectors = image_place + noise + shift
        text_vectors = text_place.expand(num_heads, NUM_TEXT_TOKENS, head_dim)
        records.append(with_vectors(record, image_vectors, text_vectors))
    return records


def test_tokens_of_one_picture_that_are_alike_do_not_raise_mmd(record: Record) -> None:
    mmds = []
    floors = []  # `mmd_halves`, which 95% of the distances between random halves of the pictures don't reach
    for seed in range(20):
        records = draw_records(record, torch.Generator().manual_seed(seed))
        estimates = measure_only_layer(records)
        mmds.append(estimates["mmd"].mean)
        floors.append(estimates["mmd_halves"].mean)

    # The mean of 20 estimates is 0 within three standard errors. With pairs of tokens of one picture it would be 0.03.
    standard_error = np.std(mmds) / np.sqrt(20)
    assert abs(np.mean(mmds)) < 3 * standard_error
    # The modalities differ by chance alone, so most of the estimates don't reach the floor either.
    is_below_floor = np.array(mmds) < np.array(floors)
    assert 0.7 < is_below_floor.mean() < 1


def test_one_picture_is_not_measured(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)
    assert measure_space("keys", draw_records(record, generator, num_pictures=1)) is None


def test_more_than_nine_of_ten_intervals_of_mmd_hold_the_mean_of_all(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(30):
        records = draw_records(record, generator, num_heads=3, head_dim=4, shift=0.5)
        estimates.append(measure_only_layer(records)["mmd"])

    mean = np.mean([estimate.mean for estimate in estimates])
    holds_mean = [estimate.low <= mean <= estimate.high for estimate in estimates]
    assert np.mean(holds_mean) > 0.9
