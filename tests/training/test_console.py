"""The output of a run on the terminal."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from script_runs import FAST, INSTRUCT, ROOT, read_steps, run


def test_the_console_shows_a_table(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
    printed = capsys.readouterr()
    table = [line.split() for line in printed.err.splitlines() if re.match(r" +\d/8 ", line)]
    steps = [cells[0] for cells in table]
    assert steps == ["2/8", "4/8", "6/8", "8/8"]
    logs = read_steps(tmp_path / "out")
    for cells, log in zip(table, logs, strict=True):
        assert cells[1] == f"{log['loss']:.4f}"
        assert cells[3] == f"{log['norm/ratio']:.3f}"
    time_left = table[-1][-1]
    assert time_left == "0:00:00"
    assert "grad_norm/" not in printed.err + printed.out


def test_ctrl_c_ends_with_one_line(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    # One epoch that lasts longer than the test. At the end of an epoch its workers end, too, and Ctrl-C, which goes to
    # the whole process group, could reach them just then.
    fields = {**FAST, **INSTRUCT, "model_name_or_path": str(composed()), "disable_tqdm": True, "save_steps": 3}
    fields |= {"datasets": [{"path": str(data), "weight": 99}], "num_train_epochs": 1, "dataloader_num_workers": 2}
    fields["output_dir"] = str(tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    process = subprocess.Popen(
        [sys.executable, "training/sft.py", "--config", str(tmp_path / "recipe.yaml")], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "checkpoint-6").exists() and time.monotonic() < deadline:
        time.sleep(0.05)

    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert re.fullmatch(
        r"Stopped. Resume with the same command and --resume_from_checkpoint true, from checkpoint-\d+.", last
    )
