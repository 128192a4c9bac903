"""The command that measures the checkpoints of a run."""

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
    data = tmp_path / "rows.json"
    rows = []
    for number in range(3):
        picture.rotate(24 * number).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": f"number {number}"}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    data.write_text(json.dumps(rows))

    # The run starts from a model that is the same as its checkpoint 10.
    start = str(composed())
    run = tmp_path / "run"
    shutil.copytree(composed(projector_norm="none"), run / "checkpoint-5")
    shutil.copytree(composed(projector_norm="gwc"), run / "checkpoint-10")

    loaded: list[str] = []

    def note_and_load(name: str, **options: Any) -> Any:
        loaded.append(Path(name).name)
        return load_model(name, **options)

    monkeypatch.setattr(dynamics, "load_model", note_and_load)

    def run_command(*options: str) -> pd.DataFrame:
        arguments = ["--run", str(run), "--data", str(data), "--num_samples", "2", "--start", start]
        dynamics.main([*arguments, *options])
        return pd.read_csv(run / "dynamics.csv")

    def rows_of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
        return table[table["step"] == step].drop(columns="step").reset_index(drop=True)

    first_table = run_command()
    assert (run / "dynamics.png").stat().st_size > 10_000
    assert first_table["step"].unique().tolist() == [0, 5, 10]
    expected = measure(*load_model(start), data, num_samples=2, layers=[]).rows
    for step in (0, 10):
        measured = rows_of_step(first_table, step)
        assert measured["measure"].tolist() == expected["measure"].tolist()
        assert measured["value"].tolist() == pytest.approx(expected["value"].tolist())

    # Checkpoint 5 is replaced, as by a resumed run, and checkpoint 15 is new. Both are now the same as checkpoint 10.
    loaded.clear()
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-5", dirs_exist_ok=True)
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-15")
    second_table = run_command()
    assert loaded == ["checkpoint-5", "checkpoint-15"]
    pd.testing.assert_frame_equal(rows_of_step(second_table, 0), rows_of_step(first_table, 0))
    for step in (5, 10, 15):
        pd.testing.assert_frame_equal(rows_of_step(second_table, step), rows_of_step(first_table, 10))

    for option in (("--num_samples", "3"), ("--dtype", "bfloat16")):
        with pytest.raises(SystemExit, match="holds rows of other questions or another dtype"):
            run_command(*option)
