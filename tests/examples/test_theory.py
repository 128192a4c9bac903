"""The theory's functions against plain geometry and simulation."""

import math

import pytest
import torch

from examples.theory import theory


def test_theorem_1_is_the_mean_of_random_updates() -> None:
    for attraction in (0.0, -0.4, 0.5, 1.0):
        drawn = theory.simulate_cosine(0.3, 0.5, 1.1, attraction, 128, 20_000, seed=1)
        expected = theory.expected_cosine(torch.tensor(0.3), torch.tensor(0.5), torch.tensor(1.1), attraction).item()
        assert drawn.mean().item() == pytest.approx(expected, abs=4 * drawn.std().item() / 20_000**0.5 + 1e-6)


def test_lowering_the_norm_of_image_tokens_alone_lowers_retention() -> None:
    # Half a right angle for text; image tokens that hardly turn, and then as much as text: 0.707 to 0.500.
    text, one = torch.tensor(math.pi / 4), torch.ones(())
    assert theory.expected_cosine(one, torch.zeros(()), text).item() == pytest.approx(0.7071, abs=1e-4)
    assert theory.expected_cosine(one, text, text).item() == pytest.approx(0.5)
    shares = theory.count_failures(draws=20_000, seed=3)
    assert shares["retention falls when the norm of image tokens alone is lowered"] == 1
    assert shares["Lemma 1 fails"] == shares["the longer token turns by a larger angle"] == 0
    assert 0.05 < shares["eq. 9 fails: its tangent is the larger"] < 0.15  # past 90 degrees a tangent is negative


def test_the_window_is_where_turning_more_helps() -> None:
    cosine, before, after = torch.tensor([0.5, 0.05, 0.7], dtype=torch.float64)
    low, high = theory.attraction_window(cosine, after, before, after)
    assert 0 < low < high < 1
    for attraction, helps in ((low - 0.02, False), ((low + high) / 2, True), (high + 0.02, False)):
        more, less = (theory.expected_cosine(cosine, turned, after, attraction) for turned in (after, before))
        assert (more > less).item() == helps, attraction
    never = theory.attraction_window(*torch.tensor([0.9, 1.0, 0.2, 1.0], dtype=torch.float64))
    assert never[0] == never[1]


def test_turning_angle_is_the_angle_between_before_and_after() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2000, 16, dtype=torch.float64)
    update = torch.randn_like(hidden) * torch.logspace(-2, 2, 2000, dtype=torch.float64)[:, None]
    cosine = torch.nn.functional.cosine_similarity
    angle = theory.turning_angle(hidden.norm(dim=-1), update.norm(dim=-1), cosine(hidden, update).clamp(-1, 1).acos())
    expected = cosine(hidden, hidden + update).clamp(-1, 1).acos()
    assert (expected > math.pi / 2).any()  # which a plain arctangent gets wrong
    torch.testing.assert_close(angle, expected, rtol=1e-6, atol=1e-6)
