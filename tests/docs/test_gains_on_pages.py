"""Checks that pages, and the help of `training/compose.py`, give the gains that the repository's records give."""

import re
from pathlib import Path

import pandas as pd
import pytest

from examples.emoji.gains import ARMS, CONTROL, differences, measure_study_gains, read_runs, t_interval
from examples.emoji.study.analysis import PAIRS, compare_arms, tabulate_means, tabulate_scores
from examples.emoji.study.records import Arm, read_study
from training.compose import WHICH_NORM


ROOT = Path(__file__).parents[2]
# The columns of scores in depth.csv, one for each kind of question.
KINDS = ["digit", "colour", "both", "compare", "count", "sum", "long"]
# The comparisons on digits in docs/findings.md, in the table's order: the decoder, the arm and the variant of the runs
# in depth.csv. These runs are compared with runs of the arm "none" of the same decoder and variant.
DIGIT_COMPARISONS = [
    ("3x128", "gwc", "plain"),
    ("3x256", "gwc", "plain"),
    ("12x128", "gwc", "plain"),
    ("12x128", "gwc", "doubled"),
    ("12x128", "gwc", "adapters"),
    ("12x128", "small-start", "plain"),
]


def as_written(mean: float, low: float, high: float) -> str:
    """A mean gain and its interval, as pages write them: "−18.1 (−24.4 to −11.7)"."""
    with_hyphens = f"{mean:.1f} ({low:.1f} to {high:.1f})"
    return with_hyphens.replace("-", "−")  # pages have minus signs instead of hyphens


@pytest.fixture(scope="module")
def emoji_gains() -> list[str]:
    """The gain of each arm of the first study, as pages write gains.

    A run is compared with a run of the control arm that has the same seed and the same CPU or GPU ("processor").
    """
    runs = read_runs()
    written = []
    for arm in ARMS:
        gains = differences(runs, arm, CONTROL, pair_by=["seed", "processor"])
        written.append(as_written(*t_interval(gains)))
    return written


@pytest.fixture(scope="module")
def study_scores() -> pd.DataFrame:
    """The scores of the study of all steps."""
    return tabulate_scores(read_study().runs)


@pytest.fixture(scope="module")
def study_gains(study_scores: pd.DataFrame) -> list[str]:
    """The gain of each arm of the study of all steps, as pages write gains."""
    return [as_written(gain.mean, gain.low, gain.high) for gain in measure_study_gains(study_scores)]


@pytest.fixture(scope="module")
def digit_gains() -> list[str]:
    """The gain of each of `DIGIT_COMPARISONS`, as pages write gains."""
    runs = pd.read_csv(ROOT / "examples" / "digits" / "depth.csv")
    runs["score"] = runs[KINDS].mean(axis=1)

    written = []
    for decoder, arm, variant in DIGIT_COMPARISONS:
        compared_runs = runs[(runs["decoder"] == decoder) & (runs["variant"] == variant)]
        gains = differences(compared_runs, arm, "none", pair_by=["seed"])
        written.append(as_written(*t_interval(gains)))
    return written


def test_the_readme_gives_the_gains_of_the_records(emoji_gains: list[str], study_gains: list[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (alternative_text,) = re.findall(r"^!\[(.*)\]\(examples/emoji/gains\.png\)$", text, re.MULTILINE)
    scaled_once, norm = study_gains
    first_scaled_once, first_norm, held_at_30 = emoji_gains
    assert alternative_text == (
        "Points gained over plain Llava (95% intervals). "
        f"All steps: scaled once {scaled_once}, LayerNorm {norm}, 8 pairs each. "
        f"Half the steps: scaled once {first_scaled_once}, 8 pairs; LayerNorm {first_norm}, 16 pairs; "
        f"held at 30 T {held_at_30}, 9 pairs"
    )
    assert f"| {scaled_once}, undecided |" in text
    assert f"| {norm}, undecided |" in text


def test_method_and_the_help_of_compose_give_the_gains_of_the_records(
    emoji_gains: list[str], study_gains: list[str]
) -> None:
    scaled_once, norm = study_gains
    first_scaled_once, first_norm, _ = emoji_gains
    method = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    assert f"(`none --scale_projector`): {scaled_once}, undecided; after half {first_scaled_once}." in method
    assert f"(`gwc`): {norm}, undecided; after half {first_norm}." in method

    # The help has hyphens, since a terminal may not have minus signs. Its columns are filled with spaces.
    help_text = re.sub(" +", " ", WHICH_NORM)
    assert f"scaled once to the text's norm {scaled_once} {first_scaled_once}\n".replace("−", "-") in help_text
    assert f"the paper's LayerNorm {norm} {first_norm}\n".replace("−", "-") in help_text


def test_the_findings_give_the_studys_means_and_differences(study_scores: pd.DataFrame) -> None:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    section = text.split("### All steps")[1].split("### Half the steps")[0]
    written = dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE))  # a row by its first cell

    pages_names = {Arm.NOTHING: "plain", Arm.SCALED: "scaled once", Arm.LAYER_NORM: "LayerNorm at T"}
    means = tabulate_means(study_scores)
    for arm, name in pages_names.items():
        all_seeds_and_each_rate = means.loc[arm].iloc[:3]
        assert written[name].split(" | ") == list(all_seeds_and_each_rate)

    comparison = compare_arms(study_scores)
    for arm, other in PAIRS:
        pair = comparison.pair(arm, other)
        cells = [as_written(pair.estimate, pair.low, pair.high), f"{pair.p:.2f}", comparison.verdict(pair)]
        assert written[f"{pages_names[arm]} less {pages_names[other]}"].split(" | ") == cells


def test_the_findings_give_the_gains_of_the_records(emoji_gains: list[str], digit_gains: list[str]) -> None:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    missing = [gain for gain in emoji_gains if gain not in text]
    assert missing == []

    depth_section = text.split("### Depth")[1].split("### Ablation")[0]
    number = r"−?[\d.]+"
    gain_pattern = rf"{number} \({number} to {number}\)"
    # The gain is the last cell of a row, such as "| **1.0 (0.4 to 1.6)** |". Not every gain is bold.
    gains_in_table = re.findall(rf"\| \**({gain_pattern})\** \|$", depth_section, re.MULTILINE)
    assert gains_in_table == digit_gains
