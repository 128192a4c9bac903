"""Tests of the Jensen-Shannon divergence: against an integral, against scipy's, and of equal and disjoint sets."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from scipy.stats import norm

from normllava.diagnostics.divergence import BINS, SetPairs, histogram_divergence, jensen_shannon, measure_divergence


# Each point belongs to a group. This is one pair of sets of groups: group 0 alone, and group 1 alone.
TWO_GROUPS: SetPairs = (np.array([[True, False]]), np.array([[False, True]]))


def divergence_of_normals(distance: float) -> float:
    """Divergence in bits of two normal distributions whose deviation is 1 and whose means differ by `distance`."""

    def integrand(x: float) -> float:
        first = norm.pdf(x)
        second = norm.pdf(x, distance)
        mixture = (first + second) / 2
        from_first = first * np.log2(first / mixture)
        from_second = second * np.log2(second / mixture)
        return (from_first + from_second) / 2

    # Both densities are practically 0 beyond eight deviations from their means.
    return quad(integrand, -8, distance + 8, limit=200)[0]


@pytest.mark.parametrize("distance", [0.5, 1.5, 3.0])
def test_two_normal_distributions_have_the_divergence_of_their_densities(distance: float) -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 100_000)
    points = rng.normal(size=(200_000, 1))
    points[groups == 1] += distance
    (divergence,) = histogram_divergence(points, groups, TWO_GROUPS)
    assert divergence == pytest.approx(divergence_of_normals(distance), rel=0.02)


def test_components_count_by_their_variance() -> None:
    """Along one component the groups are 3 deviations apart, along the other they are alike."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 100_000)
    points = rng.normal(size=(200_000, 2))
    points[groups == 1, 0] += 3

    # The first axis gets a variance of 4, which is four fifths of the variance of both.
    points[:, 0] *= 2 / points[:, 0].std()
    # The axes are turned, so that PCA has to find them.
    turn = np.array([[0.6, 0.8], [-0.8, 0.6]])
    (divergence,) = histogram_divergence(points @ turn, groups, TWO_GROUPS)
    assert divergence == pytest.approx(0.8 * divergence_of_normals(3.0), rel=0.02)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        pytest.param(0, 0, id="the same points"),
        pytest.param(20, 1, id="points without a common value"),
    ],
)
def test_the_divergence_is_0_for_equal_sets_and_1_for_disjoint_ones(shift: float, expected: float) -> None:
    points = np.random.default_rng(0).normal(size=(500, 1))
    both_sets = np.concatenate([points, points + shift])
    groups = np.repeat([0, 1], 500)
    assert histogram_divergence(both_sets, groups, TWO_GROUPS) == pytest.approx([expected])


def test_the_divergence_of_points_that_are_all_the_same_is_0() -> None:
    groups = np.repeat([0, 1], 500)
    assert histogram_divergence(np.zeros((1000, 4)), groups, TWO_GROUPS) == [0]


def test_one_outlier_changes_little() -> None:
    """If bins had the same width, an outlier would leave all other points in one bin."""
    groups = np.repeat([0, 1], 500)
    points = np.random.default_rng(0).normal(size=(1000, 1))
    points[groups == 1] += 2
    (without_outlier,) = histogram_divergence(points, groups, TWO_GROUPS)

    points[0] = 1e4
    (with_outlier,) = histogram_divergence(points, groups, TWO_GROUPS)
    assert with_outlier == pytest.approx(without_outlier, abs=0.01)


def test_the_divergence_is_the_square_of_scipys_distance() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 9, (50, BINS))  # 50 histograms
    second = rng.integers(0, 9, (50, BINS))
    assert jensen_shannon(first, second) == pytest.approx(jensenshannon(first, second, base=2, axis=1) ** 2)


def test_rounding_does_not_make_the_divergence_nan() -> None:
    """Both histograms have the same shares. scipy's distance is NaN, as the root of -1e-17."""
    divergence = jensen_shannon(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    assert divergence == pytest.approx(0, abs=1e-15)


NUM_PICTURES = 12
# Groups 0 to 11 are the image tokens of twelve pictures, groups 12 to 23 their text tokens. A group has 20 tokens.
NUM_GROUPS = 2 * NUM_PICTURES
GROUPS = np.repeat(np.arange(NUM_GROUPS), 20)
# One pair of sets of groups: all groups of image tokens, and all groups of text tokens.
IS_IMAGE_GROUP = np.arange(NUM_GROUPS)[None] < NUM_PICTURES  # [num_pairs, num_groups], with one pair
IMAGE_AND_TEXT: SetPairs = (IS_IMAGE_GROUP, ~IS_IMAGE_GROUP)


def split_pictures(rng: np.random.Generator, num_splits: int) -> SetPairs:
    """Pairs of a random half of the pictures and the other half.

    The first `num_splits` pairs have the image tokens of the two halves, the other pairs have their text tokens.
    """
    first_sets = np.zeros((2 * num_splits, NUM_GROUPS), dtype=bool)
    second_sets = np.zeros((2 * num_splits, NUM_GROUPS), dtype=bool)
    for split in range(num_splits):
        order = rng.permutation(NUM_PICTURES)
        first_half = order[: NUM_PICTURES // 2]
        second_half = order[NUM_PICTURES // 2 :]
        first_sets[split, first_half] = True
        second_sets[split, second_half] = True
        first_sets[num_splits + split, NUM_PICTURES + first_half] = True
        second_sets[num_splits + split, NUM_PICTURES + second_half] = True
    return first_sets, second_sets


def test_the_floor_tells_modalities_that_are_alike_from_modalities_that_are_apart() -> None:
    """The floor, `jsd_halves`, is what chance makes of the divergence between two halves of the pictures."""
    rng = np.random.default_rng(0)
    halves = split_pictures(rng, num_splits=50)
    heads_alike = rng.normal(size=(3, len(GROUPS), 8))  # [num_heads, num_tokens, head_dim]
    heads_apart = heads_alike.copy()
    heads_apart[:, GROUPS >= NUM_PICTURES] += 2  # text tokens

    alike = measure_divergence(heads_alike, GROUPS, IMAGE_AND_TEXT, halves)
    assert alike["jsd"] < alike["jsd_halves"] < 0.1
    apart = measure_divergence(heads_apart, GROUPS, IMAGE_AND_TEXT, halves)
    assert apart["jsd"] > 5 * apart["jsd_halves"]


def test_without_halves_there_is_no_floor() -> None:
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(3, len(GROUPS), 8))
    no_halves = split_pictures(rng, num_splits=0)
    assert set(measure_divergence(heads, GROUPS, IMAGE_AND_TEXT, no_halves)) == {"jsd"}
