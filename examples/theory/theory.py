"""The theory of "The Unseen Bias" (arXiv 2512.08374) as functions, and a check of it by random draws.

    python examples/theory/theory.py

What holds and what doesn't is written up in THEORY.md beside this file. Angles are in radians.
"""

import argparse
import logging
import math

import torch


logger = logging.getLogger(__name__)


def turning_angle(hidden_norm: torch.Tensor, update_norm: torch.Tensor, update_angle: torch.Tensor) -> torch.Tensor:
    """Angle between a token before and after a residual update (eq. 8, 13 of "The Unseen Bias").

    `tan θ = ‖Δh‖ sin φ / (‖h‖ + ‖Δh‖ cos φ)`, by atan2: an update that is longer than the token and points backwards
    turns it by more than a right angle, which a plain arctangent folds back.

    Args:
        hidden_norm: ‖h‖.
        update_norm: ‖Δh‖.
        update_angle: φ, between h and Δh.
    """
    return torch.atan2(update_norm * update_angle.sin(), hidden_norm + update_norm * update_angle.cos())


def expected_cosine(
    cosine: torch.Tensor, theta_visual: torch.Tensor, theta_text: torch.Tensor, attraction: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Expected cosine of a visual and a text token after both have turned.

    Without attraction this is Theorem 1 (eq. 15, 16): `cos θ_v cos θ_t cos α`, for updates in random directions. With
    attraction κ the part κ of each unit update, orthogonal to its token, points to the other token, and the rest is
    random; then it is `(cos θ_v cos θ_t - κ² sin θ_v sin θ_t) cos α + κ sin(θ_v + θ_t) sin α`, which κ = 1 turns into
    `cos(α - θ_v - θ_t)`. This extension is ours, not the paper's.

    Args:
        cosine: cos α of the two tokens before.
        theta_visual, theta_text: Angles that they turn by.
        attraction: κ, from -1 to 1.
    """
    kept = theta_visual.cos() * theta_text.cos() - attraction**2 * theta_visual.sin() * theta_text.sin()
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return kept * cosine + attraction * (theta_visual + theta_text).sin() * sine


def balanced_angle(theta_visual: torch.Tensor, theta_text: torch.Tensor) -> torch.Tensor:
    """The angle that both tokens turn by when the product of the tangents is shared evenly (Lemma 1)."""
    return (theta_visual.tan() * theta_text.tan()).sqrt().atan()


def attraction_window(
    cosine: float, theta_text: float, theta_before: float, theta_after: float
) -> tuple[float, float] | None:
    """The attractions κ in [0, 1] with which turning a visual token by more brings it closer to a text token.

    The gain in [`expected_cosine`] is a quadratic in κ that opens downwards, so it is positive between its roots.

    Args:
        cosine: cos α of the two tokens before, above 0.
        theta_text: Angle that the text token turns by, above 0.
        theta_before, theta_after: Angles that the visual token turns by, before and after its norm is lowered; the
            latter is larger. All angles are at most a right one.

    Returns:
        Both ends, or `None` where it never helps.

    Raises:
        ValueError: for a cosine or angles outside these ranges.
    """
    if not (0 < cosine < 1 and 0 < theta_text <= math.pi / 2 and 0 <= theta_before < theta_after <= math.pi / 2):
        raise ValueError(
            "0 < cosine < 1, 0 < theta_text <= π/2 and 0 <= theta_before < theta_after <= π/2 are needed, got "
            f"{cosine}, {theta_text}, {theta_before}, {theta_after}."
        )
    sine = math.sqrt(1 - cosine**2)
    a = -(math.sin(theta_after) - math.sin(theta_before)) * math.sin(theta_text) * cosine
    b = (math.sin(theta_after + theta_text) - math.sin(theta_before + theta_text)) * sine
    c = (math.cos(theta_after) - math.cos(theta_before)) * math.cos(theta_text) * cosine
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return None
    low, high = sorted(((-b + sign * math.sqrt(discriminant)) / (2 * a)) for sign in (1, -1))
    low, high = max(low, 0.0), min(high, 1.0)
    return (low, high) if low < high else None


def simulate_cosine(
    cosine: float, theta_visual: float, theta_text: float, attraction: float, size: int, draws: int, seed: int
) -> torch.Tensor:
    """Cosines after random updates of two tokens, `(draws,)` in float64, to check [`expected_cosine`].

    Args:
        cosine, theta_visual, theta_text, attraction: As in [`expected_cosine`].
        size: Hidden size.
        draws: Number of draws.
        seed: Of the generator.
    """
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
    windows = [
        attraction_window(*values)
        for values in zip(cosine[:2000].tolist(), after.tolist(), before.tolist(), after.tolist(), strict=False)
    ]
    widths = [0.0 if window is None else window[1] - window[0] for window in windows]

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
        "no attraction at all makes lowering it help": sum(width == 0 for width in widths) / len(widths),
        "mean width of the window of attraction in which it helps": sum(widths) / len(widths),
        "largest distance of a simulation from the formula, in standard errors": max(errors),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Check the theory by random draws.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200_000, help="number of draws")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in count_failures(args.draws, args.seed).items():
        logger.info("%-72s %8.4f", name, value)


if __name__ == "__main__":
    main()
