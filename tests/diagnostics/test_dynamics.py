"""A run measured from its checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from diagnostics import dynamics, measure
from diagnostics.loading import load_model


def test_the_command_measures_each_checkpoint_once_and_draws_the_run(
    composed: Callable[..., Path], picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, run, start = tmp_path / "rows.json", tmp_path / "run", str(composed())
    made = []
    for number in range(3):
        picture.rotate(24 * number).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": f"number {number}"}]
        made.append({"image": f"{number}.png", "conversations": turns})
    rows.write_text(json.dumps(made))
    for step, norm in ((10, "gwc"), (5, "none")):
        shutil.copytree(composed(projector_norm=norm), run / f"checkpoint-{step}")
    loaded: list[str] = []

    def watched(name: str, **options: Any) -> Any:
        loaded.append(name)
        return load_model(name, **options)

    monkeypatch.setattr(dynamics, "load_model", watched)

    def command(*options: str) -> pd.DataFrame:
        arguments = ["--run", str(run), "--data", str(rows), "--num_samples", "2", "--start", start]
        dynamics.main([*arguments, *options])
        return pd.read_csv(run / "dynamics.csv")

    table = command()
    assert (run / "dynamics.png").stat().st_size > 10_000
    assert table["step"].unique().tolist() == [0, 5, 10]
    expected = measure(*load_model(start), rows, num_samples=2, layers=[]).rows
    for step in (0, 10):
        measured = table[table["step"] == step]
        assert measured["measure"].tolist() == expected["measure"].tolist()
        assert measured["value"].tolist() == pytest.approx(expected["value"].tolist())

    for step in (5, 15):  # the first as a resumed run replaces it
        shutil.copytree(run / "checkpoint-10", run / f"checkpoint-{step}", dirs_exist_ok=True)
    again = command()
    assert [Path(name).name for name in loaded[3:]] == ["checkpoint-5", "checkpoint-15"]
    steps = {step: measured.reset_index(drop=True) for step, measured in again.groupby("step")}
    for step, before in ((0, 0), (10, 10), (5, 10), (15, 10)):
        expected = table[table["step"] == before].reset_index(drop=True)
        pd.testing.assert_frame_equal(steps[step].drop(columns="step"), expected.drop(columns="step"))
    for option in (("--num_samples", "3"), ("--dtype", "bfloat16")):
        with pytest.raises(SystemExit, match="holds rows of other questions or another dtype"):
            command(*option)
