"""What a run prints on the terminal: a table of its progress, and one line after Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from script_runs import FAST, INSTRUCT, ROOT, dump_recipe, read_steps, run


def test_the_console_shows_a_table(
    make_model_folder: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
    printed = capsys.readouterr()

    # The run logs every second of its 8 steps. A line of the table begins with, for example, " 2/8 ".
    table = [line.split() for line in printed.err.splitlines() if re.match(r" +\d/8 ", line)]
    assert [cells[0] for cells in table] == ["2/8", "4/8", "6/8", "8/8"]
    steps = read_steps(tmp_path / "out")
    for cells, step in zip(table, steps, strict=True):
        loss = cells[1]
        norm_ratio = cells[3]
        assert loss == f"{step['loss']:.4f}"
        assert norm_ratio == f"{step['norm/ratio']:.3f}"
    cells_of_last_line = table[-1]
    time_left = cells_of_last_line[-1]
    assert time_left == "0:00:00"
    # The gradient's norm in each module is logged, but not printed.
    assert "grad_norm/" not in printed.err
    assert "grad_norm/" not in printed.out


def test_a_run_too_short_to_be_logged_says_so(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All 30 rows are one step, and the run logs every second step."""
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    run(tmp_path, **fields, global_batch_size=30, output_dir=str(tmp_path / "short"))
    assert "= global batch 30, 1 step in all; arithmetic in" in caplog.text
    assert "The run ends before step 2, the first that would be logged" in caplog.text
    assert read_steps(tmp_path / "short") == []

    caplog.clear()
    run(tmp_path, **fields, output_dir=str(tmp_path / "long"))
    assert "= global batch 4, 8 steps in all; arithmetic in" in caplog.text
    assert "would be logged" not in caplog.text


def test_ctrl_c_ends_a_run_with_one_line(make_model_folder: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    # One epoch has 99 times the 30 rows, and so lasts longer than the test. At the end of an epoch, the data loader's
    # workers end, and a Ctrl-C at that moment would make them print a traceback.
    fields = {
        **FAST,
        **INSTRUCT,
        "model_name_or_path": str(make_model_folder()),
        "disable_tqdm": True,
        "save_steps": 3,
    }
    fields |= {"datasets": [{"path": str(data), "weight": 99}], "num_train_epochs": 1, "dataloader_num_workers": 2}
    fields["output_dir"] = str(tmp_path / "out")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(**fields))
    process = subprocess.Popen(
        [sys.executable, "training/sft.py", "--config", str(recipe)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,  # a process group of its own, so that Ctrl-C doesn't end the tests
    )

    deadline = time.monotonic() + 120  # seconds
    while not (tmp_path / "out" / "checkpoint-6").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)

    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT  # the shell's exit code for a program that a signal has ended
    assert "Traceback" not in printed
    last_line = printed.splitlines()[-1]
    message = r"Stopped\. Resume with the same command and --resume_from_checkpoint true, from checkpoint-\d+\."
    assert re.fullmatch(message, last_line)
