"""Jensen-Shannon divergence: against the integral over known densities, of sets that are alike or disjoint."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from scipy.stats import norm

from diagnostics.divergence import BINS, histogram_divergence, jensen_shannon, measure_divergence


FIRST_AND_SECOND = (np.array([[True, False]]), np.array([[False, True]]))


def divergence_of_normals(distance: float) -> float:
    """Bits between two normal distributions with deviation 1, by the definition's integral."""

    def integrand(x: float) -> float:
        first, second = norm.pdf(x), norm.pdf(x, distance)
        mixture = (first + second) / 2
        return (first * np.log2(first / mixture) + second * np.log2(second / mixture)) / 2

    return quad(integrand, -8, 8 + distance, limit=200)[0]


@pytest.mark.parametrize("distance", [0.5, 1.5, 3.0])
def test_two_normal_distributions(distance: float) -> None:
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(size=100_000), rng.normal(size=100_000) + distance])[:, None]
    groups = np.repeat([0, 1], 100_000)
    (divergence,) = histogram_divergence(points, groups, FIRST_AND_SECOND)
    assert divergence == pytest.approx(divergence_of_normals(distance), rel=0.02)


def test_components_count_by_their_variance() -> None:
    """Along the first axis, with four fifths of the variance, the sets differ; along the second they don't."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(200_000, 2))
    groups = np.repeat([0, 1], 100_000)
    points[:, 0] += 3 * groups
    points[:, 0] *= 2 / points[:, 0].std()
    turn = np.array([[0.6, 0.8], [-0.8, 0.6]])
    (divergence,) = histogram_divergence(points @ turn, groups, FIRST_AND_SECOND)
    assert divergence == pytest.approx(0.8 * divergence_of_normals(3.0), rel=0.02)


def test_the_same_set_and_disjoint_ones() -> None:
    rng = np.random.default_rng(0)
    half = rng.normal(size=(500, 1))
    groups = np.repeat([0, 1], 500)
    assert histogram_divergence(np.concatenate([half, half]), groups, FIRST_AND_SECOND) == pytest.approx([0])
    assert histogram_divergence(np.concatenate([half, half + 20]), groups, FIRST_AND_SECOND) == pytest.approx([1])
    assert histogram_divergence(np.zeros((1000, 4)), groups, FIRST_AND_SECOND) == [0]


def test_one_outlier_changes_little() -> None:
    """With bins of equal width it would put all others into one bin."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 500)
    points = rng.normal(size=(1000, 1)) + 2 * groups[:, None]
    (before,) = histogram_divergence(points, groups, FIRST_AND_SECOND)
    points[0] = 1e4
    assert histogram_divergence(points, groups, FIRST_AND_SECOND) == pytest.approx([before], abs=0.01)


def test_it_is_the_square_of_the_distance() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (2, 50, BINS))
    assert jensen_shannon(*counts) == pytest.approx(jensenshannon(*counts, base=2, axis=1) ** 2)
    # scipy takes the root of -1e-17 here.
    assert jensen_shannon(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3])) == pytest.approx(0, abs=1e-15)


def test_the_floor_is_the_divergence_of_tokens_that_are_alike() -> None:
    """Twelve pictures, each with a group of image tokens and a group of text tokens."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(24), 20)
    observed = (np.arange(24)[None] < 12, np.arange(24)[None] >= 12)
    order = np.array([rng.permutation(12) for _ in range(50)])
    nothing = np.zeros_like(order, dtype=bool)
    in_first, in_second = np.hstack([order < 6, nothing]), np.hstack([order >= 6, nothing])
    halves = (np.concatenate([in_first, in_first[:, ::-1]]), np.concatenate([in_second, in_second[:, ::-1]]))

    alike = rng.normal(size=(3, len(groups), 8))
    apart = alike + 2 * (groups >= 12)[None, :, None]
    found_alike = measure_divergence(alike, groups, observed, halves)
    found_apart = measure_divergence(apart, groups, observed, halves)
    assert found_alike["jsd"] < found_alike["jsd_halves"] < 0.1
    assert found_apart["jsd"] > 5 * found_apart["jsd_halves"]

    no_ways = (np.zeros((0, 24), dtype=bool), np.zeros((0, 24), dtype=bool))
    assert set(measure_divergence(alike, groups, observed, no_ways)) == {"jsd"}
