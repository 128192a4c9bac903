"""The theory of "The Unseen Bias" (arXiv 2512.08374) as functions, and a check of it by random draws.

    python examples/theory/theory.py

What holds and what doesn't is written up in THEORY.md beside this file. Angles are in radians.
"""

import argparse
import logging
import math
from collections.abc import Sequence

import torch


logger = logging.getLogger(__name__)


def turning_angle(hidden_norm: torch.Tensor, update_norm: torch.Tensor, update_angle: torch.Tensor) -> torch.Tensor:
    """Angle between a token of norm ‖h‖ before and after an update of norm ‖Δh‖ at an angle φ to it (eq. 8, 13).

    `tan θ = ‖Δh‖ sin φ / (‖h‖ + ‖Δh‖ cos φ)`, by atan2: an update that is longer than the token and points backwards
    turns it by more than a right angle, which a plain arctangent folds back.
    """
    return torch.atan2(update_norm * update_angle.sin(), hidden_norm + update_norm * update_angle.cos())


def expected_cosine(
    cosine: torch.Tensor, theta_image: torch.Tensor, theta_text: torch.Tensor, attraction: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Expected cosine of an image and a text token, `cosine` before, after they have turned by their angles.

    Without attraction this is Theorem 1 (eq. 15, 16): `cos θ_v cos θ_t cos α`, for updates in random directions. With
    attraction κ, from -1 to 1, the part κ of each unit update, orthogonal to its token, points to the other token, and
    the rest is random: `(cos θ_v cos θ_t - κ² sin θ_v sin θ_t) cos α + κ sin(θ_v + θ_t) sin α`. This is ours.
    """
    kept = theta_image.cos() * theta_text.cos() - attraction**2 * theta_image.sin() * theta_text.sin()
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return kept * cosine + attraction * (theta_image + theta_text).sin() * sine


def balanced_angle(theta_image: torch.Tensor, theta_text: torch.Tensor) -> torch.Tensor:
    """The angle that both tokens turn by when the product of the tangents is shared evenly (Lemma 1)."""
    return (theta_image.tan() * theta_text.tan()).sqrt().atan()


def attraction_window(
    cosine: torch.Tensor, theta_text: torch.Tensor, theta_before: torch.Tensor, theta_after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attractions with which turning an image token further brings it closer to a text token.

    Args:
        cosine: Of the two tokens before they turn; above 0.
        theta_text: Angle that the text token turns by; at most a right one, as the others.
        theta_before: The smaller angle that the image token turns by.
        theta_after: The larger one.

    Returns:
        Both ends of the window of κ in [0, 1]; they are equal where it never helps.
    """
    # The gain in `expected_cosine` is a quadratic in κ that opens downwards: a κ² + b κ + c.
    a = -(theta_after.sin() - theta_before.sin()) * theta_text.sin() * cosine
    b = ((theta_after + theta_text).sin() - (theta_before + theta_text).sin()) * (1 - cosine.square()).sqrt()
    c = (theta_after.cos() - theta_before.cos()) * theta_text.cos() * cosine

    root = (b.square() - 4 * a * c).clamp(min=0).sqrt()
    low = ((root - b) / (2 * a)).clamp(0, 1)
    high = ((-root - b) / (2 * a)).clamp(0, 1)
    return low, high


def simulate_cosine(
    cosine: float, theta_image: float, theta_text: float, attraction: float, size: int, draws: int, seed: int
) -> torch.Tensor:
    """Cosines after random updates of two tokens of a hidden size, `(draws,)` in float64."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.zeros(size, dtype=torch.float64)
    image[0] = 1
    text = torch.zeros(size, dtype=torch.float64)
    text[0] = cosine
    text[1] = math.sqrt(1 - cosine**2)

    turned_image = turn_at_random(image, text, theta_image, attraction, draws, generator)
    turned_text = turn_at_random(text, image, theta_text, attraction, draws, generator)
    return (turned_image * turned_text).sum(-1)


def turn_at_random(
    token: torch.Tensor,
    other: torch.Tensor,
    theta: float,
    attraction: float,
    draws: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """A token turned by an angle in random directions, of which a part points to another token, `(draws, size)`.

    Both tokens have norm 1.
    """
    towards = torch.nn.functional.normalize(other - (other @ token) * token, dim=0)
    random = torch.randn(draws, len(token), dtype=torch.float64, generator=generator)
    random -= (random @ token)[:, None] * token + (random @ towards)[:, None] * towards
    random = torch.nn.functional.normalize(random, dim=-1)

    direction = attraction * towards + math.sqrt(1 - attraction**2) * random
    return math.cos(theta) * token + math.sin(theta) * direction


def count_failures(draws: int, seed: int) -> dict[str, float]:
    """Shares of random draws in which each statement fails, and how far a simulation is from the formulas."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(draws, dtype=torch.float64, generator=generator)

    theta_image = uniform(0.001, math.pi / 2 - 0.001)
    theta_text = uniform(0.001, math.pi / 2 - 0.001)
    balanced = balanced_angle(theta_image, theta_text)
    one = torch.ones(1, dtype=torch.float64)
    lemma_fails = expected_cosine(one, theta_image, theta_text) > expected_cosine(one, balanced, balanced) + 1e-12

    # The norm of text tokens and all updates stay as they are; only the norm of image tokens comes down to it.
    text_norm = uniform(0.5, 2)
    image_norm = uniform(2, 100) * text_norm
    update_norm = uniform(0.1, 2)
    update_angle = uniform(0.1, math.pi / 2)
    before = turning_angle(image_norm, update_norm, update_angle)
    after = turning_angle(text_norm, update_norm, update_angle)
    cosine = uniform(0.01, 0.9)
    retention_falls = expected_cosine(cosine, after, after) < expected_cosine(cosine, before, after)
    low, high = attraction_window(cosine, after, before, after)

    # Any direction of the update; the tangent turns negative where the angle passes 90 degrees.
    any_angle = uniform(0.001, math.pi - 0.001)
    longer_turn = turning_angle(image_norm, update_norm, any_angle)
    shorter_turn = turning_angle(text_norm, update_norm, any_angle)

    return {
        "Lemma 1 fails": share(lemma_fails),
        "the longer token turns by a larger angle": share(longer_turn >= shorter_turn),
        "eq. 9 fails: its tangent is the larger": share(longer_turn.tan() >= shorter_turn.tan()),
        "retention falls when the norm of image tokens alone is lowered": share(retention_falls),
        "no attraction at all makes lowering it help": share(high <= low),
        "mean width of the window of attraction in which it helps": (high - low).mean().item(),
        "largest distance of a simulation from the formula, in standard errors": largest_simulation_error(seed),
    }


def share(holds: torch.Tensor) -> float:
    """The share of draws in which something holds."""
    return holds.double().mean().item()


def largest_simulation_error(seed: int, draws: int = 20_000) -> float:
    """How far a simulation's mean cosine is from the formula, in standard errors: the largest of three attractions."""
    cosine, theta_image, theta_text = 0.4, 0.3, 0.9
    errors = []
    for attraction in (0.0, 0.3, 0.8):
        simulated = simulate_cosine(cosine, theta_image, theta_text, attraction, size=256, draws=draws, seed=seed)
        expected = expected_cosine(
            torch.tensor(cosine), torch.tensor(theta_image), torch.tensor(theta_text), attraction
        )
        standard_error = simulated.std().item() / math.sqrt(draws)
        errors.append(abs(simulated.mean().item() - expected.item()) / standard_error)
    return max(errors)


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what holds in 200,000 draws."""
    build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in count_failures(200_000, seed=0).items():
        logger.info("%-72s %8.4f", name, value)


if __name__ == "__main__":
    main()
