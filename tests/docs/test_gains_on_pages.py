"""Checks that the gains in README's table and in the findings are those of the records in the repository."""

import re
from pathlib import Path

import pandas as pd
import pytest

from examples.emoji.gains import ARMS, CONTROL, differences, read_runs, t_interval


ROOT = Path(__file__).parents[2]
# Kinds of questions about digits; columns of depth.csv.
KINDS = ["digit", "colour", "both", "compare", "count", "sum", "long"]
# The comparisons on digits in README's table: decoder, arm and variant of depth.csv. The controls are the arm "none".
DIGITS = [
    ("3x128", "gwc", "plain"),
    ("3x256", "gwc", "plain"),
    ("12x128", "gwc", "plain"),
    ("12x128", "gwc", "doubled"),
    ("12x128", "gwc", "adapters"),
    ("12x128", "small-start", "plain"),
]


def as_written(gains: pd.Series) -> str:
    """The mean gain and its interval, as pages write them."""
    mean, low, high = t_interval(gains)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})".replace("-", "−")


@pytest.fixture(scope="module")
def decoder_gains() -> list[str]:
    """The gains with the pretrained decoder."""
    runs = read_runs()
    return [as_written(differences(runs, arm, CONTROL, ["seed", "processor"])) for arm in ARMS]


@pytest.fixture(scope="module")
def digit_gains() -> list[str]:
    """The gains on digits."""
    runs = pd.read_csv(ROOT / "examples" / "digits" / "depth.csv")
    runs["score"] = runs[KINDS].mean(axis=1)

    gains = []
    for decoder, arm, variant in DIGITS:
        compared = runs[(runs["decoder"] == decoder) & (runs["variant"] == variant)]
        gains.append(as_written(differences(compared, arm, "none", ["seed"])))
    return gains


def test_the_readme_gives_the_gains_of_the_records(decoder_gains: list[str], digit_gains: list[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    in_tables = re.findall(r"\| \**(−?[\d.]+ \(−?[\d.]+ to −?[\d.]+\))\** \|$", text, re.MULTILINE)
    assert sorted(in_tables) == sorted([*decoder_gains, *digit_gains])


def test_the_findings_give_the_gains_of_the_records(decoder_gains: list[str]) -> None:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    missing = [gain for gain in decoder_gains if gain not in text]
    assert missing == []
