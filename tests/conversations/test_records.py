"""Results as JSON: what is written is read again, and what a file lacks is named."""

import json
import math
from dataclasses import dataclass

import pytest

from conversations.records import from_json, to_json


@dataclass(frozen=True)
class Score:
    value: float
    n: int
    note: str | None = None


@dataclass(frozen=True)
class Scores:
    by_task: dict[str, Score]
    seen: list[str]


def test_what_is_written_is_read_again_and_what_is_lacking_is_named() -> None:
    scores = Scores({"first": Score(0.5, 3), "second": Score(math.nan, 4, "broken")}, ["a"])
    written = json.loads(json.dumps(to_json(scores), allow_nan=False))
    assert written["by_task"]["first"] == {"value": 0.5, "n": 3}
    again = from_json(Scores, {**written, "newer": 1}, "r.json")
    assert math.isnan(again.by_task["second"].value)
    assert to_json(again) == written
    for spoil, message in (
        (lambda of: of.pop("seen"), r"r\.json: no seen\."),
        (lambda of: of["by_task"]["first"].pop("n"), r"r\.json: no by_task\.first\.n\."),
        (lambda of: of.update(seen=3), r"r\.json: seen is 3\."),
        (lambda of: of["by_task"]["first"].update(n="many"), r"r\.json: by_task\.first\.n is 'many'\."),
    ):
        spoiled = json.loads(json.dumps(written))
        spoil(spoiled)
        with pytest.raises(ValueError, match=message):
            from_json(Scores, spoiled, "r.json")
