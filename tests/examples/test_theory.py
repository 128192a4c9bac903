"""Checks the theory's functions against plain geometry and against simulations."""

import math

import pytest
import torch

from examples.theory import theory


def test_theorem_1_is_the_mean_of_random_updates() -> None:
    for attraction in (0.0, -0.4, 0.5, 1.0):
        simulated = theory.simulate_cosine(
            0.3, theta_image=0.5, theta_text=1.1, attraction=attraction, size=128, draws=20_000, seed=1
        )
        standard_error = simulated.std().item() / 20_000**0.5
        expected = theory.expected_cosine(torch.tensor(0.3), torch.tensor(0.5), torch.tensor(1.1), attraction).item()
        # With an attraction of 1 nothing is random, and the standard error is 0.
        assert simulated.mean().item() == pytest.approx(expected, abs=4 * standard_error + 1e-6)


def test_lowering_the_norm_of_image_tokens_alone_lowers_retention() -> None:
    # The text token turns by half a right angle. The image token first doesn't turn, and then turns as far as the text
    # token.
    no_turn = torch.zeros(())
    half_right_angle = torch.tensor(math.pi / 4)
    same_direction = torch.ones(())  # the cosine before
    image_stays = theory.expected_cosine(same_direction, no_turn, half_right_angle)
    both_turn = theory.expected_cosine(same_direction, half_right_angle, half_right_angle)
    assert image_stays.item() == pytest.approx(0.7071, abs=1e-4)
    assert both_turn.item() == pytest.approx(0.5)

    shares = theory.check_statements(draws=20_000, seed=3)
    assert shares["retention falls when the norm of image tokens alone is lowered"] == 1
    assert shares["Lemma 1 fails"] == 0
    assert shares["the longer token turns by a larger angle"] == 0
    # Angles above 90 degrees have negative tangents, so here the tangents' order isn't that of the angles.
    assert 0.05 < shares["eq. 9 fails: its tangent is the larger"] < 0.15


def test_the_window_is_where_turning_more_helps() -> None:
    cosine, before, after = torch.tensor([0.5, 0.05, 0.7], dtype=torch.float64)
    low, high = theory.attraction_window(cosine, theta_text=after, theta_before=before, theta_after=after)
    assert 0 < low < high < 1
    for attraction, helps in ((low - 0.02, False), ((low + high) / 2, True), (high + 0.02, False)):
        if_turned_more = theory.expected_cosine(cosine, after, after, attraction)
        if_turned_less = theory.expected_cosine(cosine, before, after, attraction)
        assert (if_turned_more > if_turned_less).item() == helps, attraction

    # Here turning more helps at no attraction.
    cosine, theta_text, before, after = torch.tensor([0.9, 1.0, 0.2, 1.0], dtype=torch.float64)
    low, high = theory.attraction_window(cosine, theta_text, before, after)
    assert low == high


def test_turning_angle_is_the_angle_between_before_and_after() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2000, 16, dtype=torch.float64)
    update = torch.randn_like(hidden) * torch.logspace(-2, 2, 2000, dtype=torch.float64)[:, None]
    cosine = torch.nn.functional.cosine_similarity
    update_angle = cosine(hidden, update).clamp(-1, 1).acos()
    angle = theory.turning_angle(hidden.norm(dim=-1), update.norm(dim=-1), update_angle)
    expected = cosine(hidden, hidden + update).clamp(-1, 1).acos()
    assert (expected > math.pi / 2).any()  # a plain arctangent gives wrong values for these
    torch.testing.assert_close(angle, expected, rtol=1e-6, atol=1e-6)
