"""Tests of the command that measures the checkpoints of a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from normllava.diagnostics import dynamics, measure
from normllava.diagnostics.loading import load_model


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """A JSON file with the same question about three pictures."""
    rows = []
    for number in range(3):
        picture.rotate(24 * number).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": f"number {number}"}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def run(tmp_path: Path, make_model_folder: Callable[..., Path]) -> Path:
    """A run's folder. Only checkpoint 10 has a norm module after the projector, so the two checkpoints differ."""
    folder = tmp_path / "run"
    shutil.copytree(make_model_folder(projector_norm="none"), folder / "checkpoint-5")
    shutil.copytree(make_model_folder(projector_norm="gwc"), folder / "checkpoint-10")
    return folder


def measure_run(run: Path, data: Path, *options: str) -> pd.DataFrame:
    """Run the command on the first two questions, and return the rows of the file that it writes."""
    dynamics.main(["--run", str(run), "--data", str(data), "--num_samples", "2", *options])
    return pd.read_csv(run / "dynamics.csv")


def rows_of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    """The rows of a step, without the step itself, so that steps can be compared."""
    return table[table["step"] == step].drop(columns="step").reset_index(drop=True)


def test_the_file_has_the_measures_of_start_and_checkpoints(
    run: Path, data: Path, make_model_folder: Callable[..., Path]
) -> None:
    start = str(make_model_folder())  # the same model as checkpoint 10
    table = measure_run(run, data, "--start", start)
    assert (run / "dynamics.png").stat().st_size > 10_000  # bytes: the figure isn't empty
    assert table["step"].unique().tolist() == [0, 5, 10]

    # The command measures no attention and no keys, and so needs no layers.
    expected = measure(*load_model(start), data, num_samples=2, layers=[]).rows
    for step in (0, 10):
        rows = rows_of_step(table, step)
        assert rows["measure"].tolist() == expected["measure"].tolist()
        assert rows["value"].tolist() == pytest.approx(expected["value"].tolist())


def test_only_checkpoints_that_are_new_or_replaced_are_measured(
    run: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_before = measure_run(run, data)
    loaded: list[str] = []  # the folders of the models that are loaded from here on

    def note_and_load(name: str, **options: Any) -> Any:
        loaded.append(Path(name).name)
        return load_model(name, **options)

    monkeypatch.setattr(dynamics, "load_model", note_and_load)
    # Checkpoint 5 is replaced, as by a resumed run, and checkpoint 15 is new. Both are now the same as checkpoint 10.
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-5", dirs_exist_ok=True)
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-15")
    table = measure_run(run, data)

    assert loaded == ["checkpoint-5", "checkpoint-15"]
    for step in (5, 10, 15):
        pd.testing.assert_frame_equal(rows_of_step(table, step), rows_of_step(table_before, 10))


@pytest.mark.parametrize("option", [("--num_samples", "3"), ("--dtype", "bfloat16")])
def test_other_questions_or_another_dtype_are_refused(run: Path, data: Path, option: tuple[str, str]) -> None:
    measure_run(run, data)
    with pytest.raises(SystemExit, match="holds rows of other questions or another dtype"):
        measure_run(run, data, *option)


def test_a_replaced_adapter_is_measured_again(
    tmp_path: Path, data: Path, make_model_folder: Callable[..., Path]
) -> None:
    base = make_model_folder(projector_norm="none")
    checkpoint = tmp_path / "run" / "checkpoint-5"
    AutoProcessor.from_pretrained(base).save_pretrained(checkpoint)
    tables = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_pretrained(base)
        adapter = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(model, adapter).save_pretrained(checkpoint)
        tables.append(measure_run(tmp_path / "run", data))
    first, second = tables
    assert not rows_of_step(first, 5).equals(rows_of_step(second, 5))


def test_a_copy_of_a_checkpoint_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-10-copy").mkdir()
    assert dynamics.find_models(tmp_path, start=None) == {5: str(tmp_path / "checkpoint-5")}
