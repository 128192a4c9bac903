"""The theory of "The Unseen Bias" (arXiv 2512.08374) as functions, and a check of it by random draws.

    python examples/theory/theory.py

What holds and what doesn't is written up in THEORY.md beside this file. Angles are in radians.
"""

import logging
import math

import torch


logger = logging.getLogger(__name__)


def turning_angle(hidden_norm: torch.Tensor, update_norm: torch.Tensor, update_angle: torch.Tensor) -> torch.Tensor:
    """Angle between a token of norm ‖h‖ before and after an update of norm ‖Δh‖ at an angle φ to it (eq. 8, 13).

    `tan θ = ‖Δh‖ sin φ / (‖h‖ + ‖Δh‖ cos φ)`, by atan2: an update that is longer than the token and points backwards
    turns it by more than a right angle, which a plain arctangent folds back.
    """
    return torch.atan2(update_norm * update_angle.sin(), hidden_norm + update_norm * update_angle.cos())


def expected_cosine(
    cosine: torch.Tensor, theta_visual: torch.Tensor, theta_text: torch.Tensor, attraction: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Expected cosine of a visual and a text token, `cosine` before, after they have turned by their angles.

    Without attraction this is Theorem 1 (eq. 15, 16): `cos θ_v cos θ_t cos α`, for updates in random directions. With
    attraction κ, from -1 to 1, the part κ of each unit update, orthogonal to its token, points to the other token, and
    the rest is random: `(cos θ_v cos θ_t - κ² sin θ_v sin θ_t) cos α + κ sin(θ_v + θ_t) sin α`. This is ours.
    """
    kept = theta_visual.cos() * theta_text.cos() - attraction**2 * theta_visual.sin() * theta_text.sin()
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return kept * cosine + attraction * (theta_visual + theta_text).sin() * sine


def balanced_angle(theta_visual: torch.Tensor, theta_text: torch.Tensor) -> torch.Tensor:
    """The angle that both tokens turn by when the product of the tangents is shared evenly (Lemma 1)."""
    return (theta_visual.tan() * theta_text.tan()).sqrt().atan()


def attraction_window(
    cosine: torch.Tensor, theta_text: torch.Tensor, theta_before: torch.Tensor, theta_after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends of the attractions κ in [0, 1] with which turning a visual token by `theta_after`, not by the smaller
    `theta_before`, brings it closer to a text token; they are equal where it never helps. All angles are at most right
    ones, the cosine is above 0. The gain in [`expected_cosine`] is a quadratic in κ that opens downwards."""
    a = -(theta_after.sin() - theta_before.sin()) * theta_text.sin() * cosine
    b = ((theta_after + theta_text).sin() - (theta_before + theta_text).sin()) * (1 - cosine.square()).sqrt()
    c = (theta_after.cos() - theta_before.cos()) * theta_text.cos() * cosine
    root = (b.square() - 4 * a * c).clamp(min=0).sqrt()
    return ((root - b) / (2 * a)).clamp(0, 1), ((-root - b) / (2 * a)).clamp(0, 1)


def simulate_cosine(
    cosine: float, theta_visual: float, theta_text: float, attraction: float, size: int, draws: int, seed: int
) -> torch.Tensor:
    """Cosines after random updates of two tokens of a hidden size, `(draws,)` in float64."""
    generator = torch.Generator().manual_seed(seed)
    visual = torch.zeros(size, dtype=torch.float64)
    text, sine = visual.clone(), math.sqrt(1 - cosine**2)
    visual[0], text[0], text[1] = 1, cosine, sine
    turned = []
    for token, other, theta in ((visual, text, theta_visual), (text, visual, theta_text)):
        towards = torch.nn.functional.normalize(other - (other @ token) * token, dim=0)
        random = torch.randn(draws, size, dtype=torch.float64, generator=generator)
        random -= (random @ token)[:, None] * token + (random @ towards)[:, None] * towards
        random = torch.nn.functional.normalize(random, dim=-1)
        direction = attraction * towards + math.sqrt(1 - attraction**2) * random
        turned.append(math.cos(theta) * token + math.sin(theta) * direction)
    return (turned[0] * turned[1]).sum(-1)


def count_failures(draws: int, seed: int) -> dict[str, float]:
    """Shares of random draws in which each statement fails, and how far a simulation is from the formulas."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(draws, dtype=torch.float64, generator=generator)

    theta_visual, theta_text = uniform(0.001, math.pi / 2 - 0.001), uniform(0.001, math.pi / 2 - 0.001)
    shared = balanced_angle(theta_visual, theta_text)
    one = torch.ones(1, dtype=torch.float64)
    lemma = expected_cosine(one, theta_visual, theta_text) > expected_cosine(one, shared, shared) + 1e-12

    # The norm of text tokens and all updates stay as they are; only the visual norm comes down to it.
    text_norm, ratio, update, angle = uniform(0.5, 2), uniform(2, 100), uniform(0.1, 2), uniform(0.1, math.pi / 2)
    before = turning_angle(ratio * text_norm, update, angle)
    after = turning_angle(text_norm, update, angle)
    cosine = uniform(0.01, 0.9)
    falls = expected_cosine(cosine, after, after) < expected_cosine(cosine, before, after)
    low, high = attraction_window(cosine, after, before, after)

    # Any direction of the update; the tangent turns negative where the angle passes 90 degrees.
    obtuse = uniform(0.001, math.pi - 0.001)
    longer, shorter = (turning_angle(norm, update, obtuse) for norm in (ratio * text_norm, text_norm))

    errors = []
    for attraction in (0.0, 0.3, 0.8):
        simulated = simulate_cosine(0.4, 0.3, 0.9, attraction, 256, 20_000, seed)
        expected = expected_cosine(torch.tensor(0.4), torch.tensor(0.3), torch.tensor(0.9), attraction).item()
        errors.append(abs(simulated.mean().item() - expected) / (simulated.std().item() / math.sqrt(20_000)))
    return {
        "Lemma 1 fails": lemma.double().mean().item(),
        "the longer token turns by a larger angle": (longer >= shorter).double().mean().item(),
        "eq. 9 fails: its tangent is the larger": (longer.tan() >= shorter.tan()).double().mean().item(),
        "retention falls when the visual norm alone is lowered": falls.double().mean().item(),
        "no attraction at all makes lowering it help": (high <= low).double().mean().item(),
        "mean width of the window of attraction in which it helps": (high - low).mean().item(),
        "largest distance of a simulation from the formula, in standard errors": max(errors),
    }


def main() -> None:
    """Print what holds in 200,000 draws."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in count_failures(200_000, seed=0).items():
        logger.info("%-72s %8.4f", name, value)


if __name__ == "__main__":
    main()
