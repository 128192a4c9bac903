"""The study's analysis against counting by hand, its rules, and that it goes on where it was stopped."""

import itertools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.emoji import evaluate, trial
from examples.emoji.trial import LONG, NORM, PLAIN, RATES, STARTED, compare, judge, num_pairs, plan


def test_pairs_are_compared_by_all_sign_flips() -> None:
    values = np.array([1.0, 2.5, -0.5, 4.0, 3.0])
    flipped = [abs(np.array(signs) @ values) for signs in itertools.product((1, -1), repeat=5)]
    found = compare(values)
    assert found["p"] == pytest.approx(sum(total >= 10.0 for total in flipped) / 32)
    reach = 2.776 * math.sqrt(sum((value - 2.0) ** 2 for value in values) / 4 / 5)  # t's 97.5% for 4 degrees
    assert (found["low"], found["mean"], found["high"]) == pytest.approx((2 - reach, 2, 2 + reach), abs=1e-3)
    # Half of 100 drawings are named by one arm alone: a deviation of 5; four pairs 10 points to either side: 5 again.
    found = compare([np.repeat([100.0 + apart, apart], 50) for apart in (-10, 10, -10, 10)])
    assert found["high, redrawn"] - 50 == pytest.approx(1.96 * math.sqrt(5**2 + 5**2), abs=1)


def test_the_verdict_and_the_number_of_pairs() -> None:
    found = {"pairs": 8, "mean": 0.4, "low": -0.9, "high": 1.7, "p": 0.3}
    assert judge(found, 8) == "equivalent within 2 points"
    assert judge(found | {"high": 2.1}, 8) == judge(found | {"low": -2.1}, 8) == "undecided"
    assert (judge(found | {"p": 0.03}, 8), judge(found | {"p": 0.03, "mean": -1.0}, 8)) == ("ahead", "behind")
    assert judge(found | {"p": 0.001}, 9) == "undecided, after 8 of 9 pairs"
    four = np.array([1.0, 3.0, 5.0, 3.0]) * 1.2247  # deviation 2: 2.306 x 2 / 3 is 1.54, 2.262 x 2 / 3.16 is 1.43
    assert [num_pairs(of) for of in (four, -four, np.append(four, 90.0), four[:3], four * 10)] == [10, 10, 10, 8, 16]


def stand_in(cell: tuple[str, int, float]) -> dict[str, object]:
    """The record of a run: the middle rate is best, the next as good; the norm gains 3 points, and 30 T loses 9."""
    arm, seed, rate = cell
    row = {"arm": arm, "seed": seed, "rate": rate, "processor": "a CPU", "length": 1.0, "OpenMoji": 77.7}
    if seed == 0:
        return row | {"searched": 40.0 if rate >= RATES[1] else 20.0}
    share = 30 + seed + {PLAIN: 0, NORM: 3, LONG: -9, STARTED: 0}[arm] + (seed % 2 if arm != PLAIN else 0)
    hits = {"names": share, "hits": ("1" * share).ljust(100, "0")}
    return row | hits | {f"names, x {scale}": share for scale in trial.SCALES}


def test_it_searches_then_pairs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(trial, "RECORDS", tmp_path / "trial.jsonl")
    monkeypatch.setattr(trial, "WORK", tmp_path / "work")
    monkeypatch.setattr(trial, "run", stand_in)
    trial.main(10)
    monkeypatch.setattr(trial, "run", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial.main()
    monkeypatch.setattr(trial, "run", stand_in)
    trial.main()
    rows = [json.loads(line) for line in trial.RECORDS.read_text().splitlines()]
    cells = [(row["arm"], row["seed"], row["rate"]) for row in rows]
    assert len(cells) == len(set(cells)) == 3 * 3 + 3 * 8 + 3 + 8
    assert cells[:8] == [*itertools.product((PLAIN, NORM), [0], RATES), (PLAIN, 1, 5e-5), (NORM, 1, 5e-5)]
    assert [cell[0] for cell in cells[22:]] == [LONG] * 11 + [STARTED] * 11
    assert plan(rows) == cells
    elsewhere = [row | {"processor": "a GPU"} for row in rows if row["arm"] == LONG]  # no norm didn't run there
    assert [pair.mean() for pair in trial.differences(rows + elsewhere, LONG)] == [-8, -9] * 4
    text = caplog.records[-1].getMessage()
    assert "GWC at T: ahead\n\n44 done, 0 left" in text
    assert ["77.7" in record.getMessage() for record in caplog.records][-3:] == [False, False, True]
    assert (tmp_path / "trial.png").exists()
    # 30 T always loses: 2 of 256 flips, doubled. The start at T gains in four pairs and ties in four: 2 of 16.
    assert [line.split()[-1] for line in text.splitlines() if line.startswith((LONG, STARTED))] == ["0.016", "0.125"]


def test_a_model_of_one_name(always_a: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is right for its drawing and for a near copy, with any dose; drawing and blank are the same to it."""
    monkeypatch.setattr(trial, "RUN", tmp_path)
    monkeypatch.setattr(evaluate, "RUN", tmp_path)
    monkeypatch.setattr(trial, "ONE_NAME", {"AA": "A"})
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (28, 28), "red").save(tmp_path / "pictures" / "a.png")
    sets = {"emojione": ["A", "b", "b", "b"], "twemoji": ["A", "AA", "b", "c"], "openmoji": ["b"]}
    rows = [{"image": "a.png", "set": of, "name": name, "group": "A"} for of, names in sets.items() for name in names]
    (tmp_path / "pictures" / "pictures.json").write_text(json.dumps(rows))
    assert trial.evaluate(always_a(), search=True) == {"searched": 25.0}
    figures = trial.evaluate(always_a(), search=False)
    assert (figures["names"], figures["name, free"], figures["group, free"], figures["OpenMoji"]) == (50, 25, 100, 0)
    assert (sorted(figures["hits"]), figures["names, x 0.03"]) == (["0", "0", "1", "1"], 50)
    assert figures["loss"] == pytest.approx(figures["loss, blank"])
