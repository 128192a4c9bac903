"""Functions for the theory of "The Unseen Bias" (arXiv 2512.08374), and a check of its statements by random draws.

    python examples/theory/theory.py

THEORY.md in this folder says which statements hold. An update is what a layer adds to the hidden state of a token. An
update turns the token: the token's direction changes. Numbers of equations are the paper's, and angles are in radians.
"""

import argparse
import logging
import math
from collections.abc import Sequence

import torch


logger = logging.getLogger(__name__)


def turning_angle(hidden_norm: torch.Tensor, update_norm: torch.Tensor, update_angle: torch.Tensor) -> torch.Tensor:
    """The angle θ by which an update turns a token (eq. 8, 13).

    The token h and the update Δh have the angle φ, so `tan θ = ‖Δh‖ sin φ / (‖h‖ + ‖Δh‖ cos φ)`. An update that points
    backwards and is longer than the token can turn the token by more than a right angle. A plain arctangent would give
    a wrong angle in that case, so the function uses atan2.

    Args:
        hidden_norm: The token's norm ‖h‖.
        update_norm: The update's norm ‖Δh‖.
        update_angle: The angle φ between the token and the update.
    """
    return torch.atan2(update_norm * update_angle.sin(), hidden_norm + update_norm * update_angle.cos())


def expected_cosine(
    cosine: torch.Tensor, theta_image: torch.Tensor, theta_text: torch.Tensor, attraction: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """The expected cosine of an image token and a text token after both have turned.

    The tokens have the angle α before they turn. The image token turns by θ_v, and the text token by θ_t. If both turn
    in random directions, the expected cosine is `cos θ_v cos θ_t cos α` (Theorem 1; eq. 15, 16).

    Attraction is our addition: the direction in which a token turns has the component κ towards the other token, and
    is otherwise random. With attraction, the expected cosine is
    `(cos θ_v cos θ_t - κ² sin θ_v sin θ_t) cos α + κ sin(θ_v + θ_t) sin α`.

    Args:
        cosine: cos α.
        theta_image: θ_v.
        theta_text: θ_t.
        attraction: κ, from -1 to 1. Below 0, the tokens turn away from each other.
    """
    cosine_factor = theta_image.cos() * theta_text.cos() - attraction**2 * theta_image.sin() * theta_text.sin()
    sine_factor = attraction * (theta_image + theta_text).sin()
    sine = (1 - cosine.square()).clamp(min=0).sqrt()  # sin α
    return cosine_factor * cosine + sine_factor * sine


def balanced_angle(theta_image: torch.Tensor, theta_text: torch.Tensor) -> torch.Tensor:
    """The angle whose tangent is the geometric mean of the two angles' tangents.

    Lemma 1 compares two tokens that turn by these two angles with two tokens that both turn by the returned angle.
    """
    return (theta_image.tan() * theta_text.tan()).sqrt().atan()


def attraction_window(
    cosine: torch.Tensor, theta_text: torch.Tensor, theta_before: torch.Tensor, theta_after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of attractions κ at which a larger turn of an image token helps.

    The larger turn helps if it gives a higher expected cosine of the image token and the text token.

    Args:
        cosine: The cosine of the two tokens before they turn; above 0.
        theta_text: The angle by which the text token turns; at most a right angle.
        theta_before: The smaller angle by which the image token turns.
        theta_after: The larger angle by which the image token turns; at most a right angle.

    Returns:
        The lowest and the highest κ of the range, within [0, 1]. They are equal if the larger turn helps at no κ.
    """
    # The gain is `expected_cosine` at the larger angle less `expected_cosine` at the smaller angle: a parabola,
    # a κ² + b κ + c, which opens downwards. So the gain is positive between the two roots.
    sine = (1 - cosine.square()).sqrt()
    a = -(theta_after.sin() - theta_before.sin()) * theta_text.sin() * cosine
    b = ((theta_after + theta_text).sin() - (theta_before + theta_text).sin()) * sine
    c = (theta_after.cos() - theta_before.cos()) * theta_text.cos() * cosine

    # Without real roots the discriminant is negative. It is set to 0, so that `low` and `high` are equal.
    root_of_discriminant = (b.square() - 4 * a * c).clamp(min=0).sqrt()
    low = (-b + root_of_discriminant) / (2 * a)  # the lower root, because a is negative
    high = (-b - root_of_discriminant) / (2 * a)
    return low.clamp(0, 1), high.clamp(0, 1)


def simulate_cosine(
    cosine: float,
    theta_image: float,
    theta_text: float,
    attraction: float,
    hidden_size: int,
    num_draws: int,
    seed: int,
) -> torch.Tensor:
    """Draw the cosine of an image token and a text token after both have turned in directions drawn at random.

    The arguments up to `attraction` are those of `expected_cosine`.

    Returns:
        The cosine in each draw, `(num_draws,)` in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    # Two tokens of norm 1 with this cosine.
    image = torch.zeros(hidden_size, dtype=torch.float64)
    image[0] = 1
    text = torch.zeros(hidden_size, dtype=torch.float64)
    text[0] = cosine
    text[1] = math.sqrt(1 - cosine**2)

    turned_image = turn_at_random(image, text, theta_image, attraction, num_draws, generator)
    turned_text = turn_at_random(text, image, theta_text, attraction, num_draws, generator)
    return (turned_image * turned_text).sum(-1)


def turn_at_random(
    token: torch.Tensor,
    other: torch.Tensor,
    theta: float,
    attraction: float,
    num_draws: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Turn a token of norm 1 by an angle, in many random directions.

    Args:
        token: The token, `(hidden_size,)`.
        other: The token that attracts `token`, also of norm 1.
        theta: The angle.
        attraction: The component of each direction towards the other token. The rest of the direction is random.
        num_draws: Number of directions.
        generator: The source of randomness.

    Returns:
        The turned tokens, `(num_draws, hidden_size)`.
    """
    # The direction towards the other token, among those orthogonal to the token.
    towards_other = torch.nn.functional.normalize(other - (other @ token) * token, dim=0)

    # Random directions that are orthogonal to the token and to `towards_other`.
    vectors = torch.randn(num_draws, len(token), dtype=torch.float64, generator=generator)
    along_token = (vectors @ token)[:, None] * token
    along_towards_other = (vectors @ towards_other)[:, None] * towards_other
    random_directions = torch.nn.functional.normalize(vectors - along_token - along_towards_other, dim=-1)

    directions = attraction * towards_other + math.sqrt(1 - attraction**2) * random_directions
    return math.cos(theta) * token + math.sin(theta) * directions


def check_statements(num_draws: int, seed: int) -> dict[str, float]:
    """Check the statements of the theory by random draws.

    Returns:
        For each statement, the share of draws in which it holds. The last two values are no shares, but a mean width
        and a distance.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(num_draws, dtype=torch.float64, generator=generator)

    # Lemma 1: for a fixed product of the tangents, the cosine is highest if both tokens turn by the same angle.
    # The margins of 0.001 keep away from angles whose tangent is 0 or infinite.
    first_angle = uniform(0.001, math.pi / 2 - 0.001)
    second_angle = uniform(0.001, math.pi / 2 - 0.001)
    balanced = balanced_angle(first_angle, second_angle)
    any_cosine = torch.ones(1, dtype=torch.float64)  # a factor of both sides, so any positive cosine does
    cosine_as_drawn = expected_cosine(any_cosine, first_angle, second_angle)
    cosine_if_balanced = expected_cosine(any_cosine, balanced, balanced)
    lemma_fails = cosine_as_drawn > cosine_if_balanced + 1e-12  # more than rounding

    # Next, the norm of image tokens is lowered to that of text tokens, and nothing else is changed. So afterwards
    # image tokens turn by the same angle as text tokens. The ranges are arbitrary, but updates don't point backwards.
    text_norm = uniform(0.5, 2)
    image_norm = uniform(2, 100) * text_norm
    update_norm = uniform(0.1, 2)
    update_angle = uniform(0.1, math.pi / 2)
    theta_before = turning_angle(image_norm, update_norm, update_angle)
    theta_text = turning_angle(text_norm, update_norm, update_angle)
    theta_after = theta_text
    cosine = uniform(0.01, 0.9)
    cosine_before = expected_cosine(cosine, theta_before, theta_text)
    cosine_after = expected_cosine(cosine, theta_after, theta_text)
    # Retention is how much of the cosine of an image token and a text token is left after both have turned.
    retention_falls = cosine_after < cosine_before
    low, high = attraction_window(cosine, theta_text, theta_before, theta_after)

    # "The longer token" is the token with the larger norm: here the image token. From here on, updates may also
    # point backwards. If an update turns a token by more than 90 degrees, the tangent of the angle is negative.
    any_angle = uniform(0.001, math.pi - 0.001)
    theta_of_longer = turning_angle(image_norm, update_norm, any_angle)
    theta_of_shorter = turning_angle(text_norm, update_norm, any_angle)

    return {
        "Lemma 1 fails": share(lemma_fails),
        "the longer token turns by a larger angle": share(theta_of_longer >= theta_of_shorter),
        "eq. 9 fails: the longer token's tangent is larger": share(theta_of_longer.tan() >= theta_of_shorter.tan()),
        "retention falls when the norm of image tokens alone is lowered": share(retention_falls),
        "there is no attraction at which lowering that norm helps": share(high <= low),
        "mean width of the window of attraction in which lowering helps": (high - low).mean().item(),
        "largest distance of a simulation from the formula, in standard errors": largest_simulation_error(seed),
    }


def share(holds: torch.Tensor) -> float:
    """The share of draws in which a statement holds. `holds` has a boolean for each draw."""
    return holds.double().mean().item()


def largest_simulation_error(seed: int, num_draws: int = 20_000) -> float:
    """How far a simulation's mean cosine is from `expected_cosine`, in standard errors: the worst of three cases."""
    # The cosine and the angles are arbitrary. The cases differ in attraction.
    cosine = 0.4
    theta_image = 0.3
    theta_text = 0.9
    errors = []
    for attraction in (0.0, 0.3, 0.8):
        simulated = simulate_cosine(
            cosine, theta_image, theta_text, attraction, hidden_size=256, num_draws=num_draws, seed=seed
        )
        expected = expected_cosine(
            torch.tensor(cosine), torch.tensor(theta_image), torch.tensor(theta_text), attraction
        )
        standard_error = simulated.std().item() / math.sqrt(num_draws)
        errors.append(abs(simulated.mean().item() - expected.item()) / standard_error)
    return max(errors)


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(argv: Sequence[str] | None = None) -> None:
    """Check the statements by 200,000 draws, and print the results."""
    build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in check_statements(200_000, seed=0).items():
        logger.info("%-72s %8.4f", name, value)


if __name__ == "__main__":
    main()
