"""What a person at the terminal sees of a run."""

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

from script_runs import FAST, INSTRUCT, ROOT, logged, run


def test_the_console_shows_a_table(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.err.splitlines() if re.match(r" +\d/8 ", line)]
    assert [row[0] for row in rows] == ["2/8", "4/8", "6/8", "8/8"]
    for row, line in zip(rows, logged(tmp_path / "out"), strict=False):
        assert row[1] == f"{line['loss']:.4f}"
        assert row[3] == f"{line['norm/ratio']:.3f}"
    assert rows[-1][-1] == "0:00:00"
    assert "grad_norm/" not in printed.err + printed.out


def test_ctrl_c_ends_with_one_line(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    # One long epoch: its workers end with it, and Ctrl-C, which goes to all in the group, may meet them then.
    fields = {**FAST, **INSTRUCT, "model_name_or_path": str(composed()), "disable_tqdm": True, "save_steps": 3}
    fields |= {"datasets": [{"path": str(data), "weight": 99}], "num_train_epochs": 1, "dataloader_num_workers": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**fields, "output_dir": str(tmp_path / "out")}))
    started = subprocess.Popen(
        [sys.executable, "training/sft.py", "--config", str(tmp_path / "recipe.yaml")], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "checkpoint-6").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, printed = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert re.fullmatch(
        r"Stopped. Resume with the same command and --resume_from_checkpoint true, from checkpoint-\d+.", last
    )
