"""Functions for the theory of "The Unseen Bias" (arXiv 2512.08374), and a check of its statements by random draws.

    python examples/theory/theory.py

THEORY.md in this folder says which statements hold. Angles are in radians.
"""

import argparse
import logging
import math
from collections.abc import Sequence

import torch


logger = logging.getLogger(__name__)


def turning_angle(hidden_norm: torch.Tensor, update_norm: torch.Tensor, update_angle: torch.Tensor) -> torch.Tensor:
    """The angle θ by which an update turns a token (eq. 8, 13).

    `tan θ = ‖Δh‖ sin φ / (‖h‖ + ‖Δh‖ cos φ)`. An update that is longer than the token and points backwards turns it by
    more than a right angle. This uses atan2, as a plain arctangent would give a wrong angle there.

    Args:
        hidden_norm: The token's norm ‖h‖.
        update_norm: The update's norm ‖Δh‖.
        update_angle: The angle φ between the token and the update.
    """
    return torch.atan2(update_norm * update_angle.sin(), hidden_norm + update_norm * update_angle.cos())


def expected_cosine(
    cosine: torch.Tensor, theta_image: torch.Tensor, theta_text: torch.Tensor, attraction: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """The expected cosine of an image and a text token after both have turned.

    Without attraction the tokens turn in random directions, and this is Theorem 1 (eq. 15, 16):
    `cos θ_v cos θ_t cos α`. Attraction is our addition: a part κ of each token's direction of turning points to the
    other token, and the rest is random. Then it is
    `(cos θ_v cos θ_t - κ² sin θ_v sin θ_t) cos α + κ sin(θ_v + θ_t) sin α`.

    Args:
        cosine: The cosine of the tokens before, cos α.
        theta_image: The angle by which the image token turns, θ_v.
        theta_text: The angle by which the text token turns, θ_t.
        attraction: κ, from -1 to 1.
    """
    kept = theta_image.cos() * theta_text.cos() - attraction**2 * theta_image.sin() * theta_text.sin()
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return kept * cosine + attraction * (theta_image + theta_text).sin() * sine


def balanced_angle(theta_image: torch.Tensor, theta_text: torch.Tensor) -> torch.Tensor:
    """The angle whose tangent is the geometric mean of the two angles' tangents (Lemma 1)."""
    return (theta_image.tan() * theta_text.tan()).sqrt().atan()


def attraction_window(
    cosine: torch.Tensor, theta_text: torch.Tensor, theta_before: torch.Tensor, theta_after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attractions κ for which an image token ends closer to a text token if it turns by the larger of two angles.

    All angles are at most right angles.

    Args:
        cosine: The cosine of the two tokens before they turn; above 0.
        theta_text: The angle by which the text token turns.
        theta_before: The smaller angle by which the image token may turn.
        theta_after: The larger angle by which the image token may turn.

    Returns:
        Both ends of the window of κ within [0, 1]. They are equal if the larger angle helps at no attraction.
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
    """The cosines of two tokens after random updates, `(draws,)` in float64. `size` is the hidden size."""
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
    """Turn a token of norm 1 by an angle in random directions.

    Args:
        token: The token.
        other: The other token, also of norm 1.
        theta: The angle.
        attraction: The part of the direction that points to the other token. The rest is random.
        draws: How many directions are drawn.
        generator: The source of randomness.

    Returns:
        The turned tokens, `(draws, size)`.
    """
    towards = torch.nn.functional.normalize(other - (other @ token) * token, dim=0)
    random = torch.randn(draws, len(token), dtype=torch.float64, generator=generator)
    random -= (random @ token)[:, None] * token + (random @ towards)[:, None] * towards
    random = torch.nn.functional.normalize(random, dim=-1)

    direction = attraction * towards + math.sqrt(1 - attraction**2) * random
    return math.cos(theta) * token + math.sin(theta) * direction


def check_statements(draws: int, seed: int) -> dict[str, float]:
    """The share of random draws in which each statement holds, and a simulation's distance from the formula."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(draws, dtype=torch.float64, generator=generator)

    theta_image = uniform(0.001, math.pi / 2 - 0.001)
    theta_text = uniform(0.001, math.pi / 2 - 0.001)
    balanced = balanced_angle(theta_image, theta_text)
    one = torch.ones(1, dtype=torch.float64)
    lemma_fails = expected_cosine(one, theta_image, theta_text) > expected_cosine(one, balanced, balanced) + 1e-12

    # Only the norm of image tokens changes: it is lowered to that of text tokens.
    text_norm = uniform(0.5, 2)
    image_norm = uniform(2, 100) * text_norm
    update_norm = uniform(0.1, 2)
    update_angle = uniform(0.1, math.pi / 2)
    before = turning_angle(image_norm, update_norm, update_angle)
    after = turning_angle(text_norm, update_norm, update_angle)
    cosine = uniform(0.01, 0.9)
    retention_falls = expected_cosine(cosine, after, after) < expected_cosine(cosine, before, after)
    low, high = attraction_window(cosine, after, before, after)

    # Here the update may point backwards. If it turns the token by more than 90 degrees, the tangent is negative.
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
    """The largest distance of a simulation's mean from the formula, in standard errors, at three attractions."""
    cosine = 0.4
    theta_image = 0.3
    theta_text = 0.9
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
    """Print the shares of 200,000 draws in which the statements hold."""
    build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in check_statements(200_000, seed=0).items():
        logger.info("%-72s %8.4f", name, value)


if __name__ == "__main__":
    main()
