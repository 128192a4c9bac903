"""docs/extend.md does what it says: its changes are applied to a copy of the source, and its tests are run there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fences import fences


ROOT = Path(__file__).parents[2]
PACKAGES = ("modeling_normllava", "conversations", "diagnostics", "training", "evaluation")
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
# The text below each heading, by heading.
SECTIONS = dict(re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
TASK = "A benchmark task"


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section in a language."""
    return [code for found, code in fences(SECTIONS[section]) if found == language]


def changed_files(section: str) -> set[str]:
    """The source files that a section changes or adds."""
    changed = re.findall(r"^\+\+\+ b/(.*)$", "".join(blocks(section, "diff")), re.M)
    return {*changed, *re.findall(r"`(evaluation/tasks/\w+\.yaml)`", SECTIONS[section])}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with all changes of the page."""
    copy = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, copy / name)
    for section in SECTIONS:
        for diff in blocks(section, "diff"):
            # Line numbers may have moved since: git looks for the lines themselves.
            outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}  # of any repository
            options = {"cwd": copy, "env": outside, "capture_output": True, "text": True}
            applied = subprocess.run(["git", "apply", "-"], input=diff, **options)
            assert applied.returncode == 0, f"{section}: {applied.stderr}"
    (task,) = blocks(TASK, "yaml")
    (copy / "evaluation/tasks/shapes.yaml").write_text(task)
    return copy


def environment(source: Path) -> dict[str, str]:
    """Variables under which the packages are those of a copy."""
    return os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def test_every_change_fits_the_source_and_takes_two_files_at_most(extended: Path) -> None:
    counts = {section: len(changed_files(section)) for section in SECTIONS}
    assert len(counts) == 5
    assert all(1 <= count <= 2 for count in counts.values()), counts
    assert all((extended / path).exists() for section in SECTIONS for path in changed_files(section))


def test_the_pages_tests_pass(extended: Path) -> None:
    tests = [code for section in SECTIONS for code in blocks(section, "python") if "def test_" in code]
    assert len(tests) == 4
    for number, code in enumerate(tests):
        (extended / f"tests/test_{number}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=extended, env=environment(extended), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "4 passed" in done.stdout


@pytest.mark.slow
def test_the_pages_task_runs(
    extended: Path, harness_python: Path, always_a: Callable[..., Path], tmp_path: Path
) -> None:
    (rows,), (line,) = blocks(TASK, "python"), blocks(TASK, "bash")
    options = {"cwd": tmp_path, "env": environment(extended), "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", rows], check=True, **options)
    model = shutil.copytree(always_a(), tmp_path / "runs/digits/stage2")
    assert line.startswith(".venv-evaluation/bin/python ")
    done = subprocess.run([harness_python, *line.split()[1:]], **options)
    assert "| shapes | 50.0 ± 50.0 |" in done.stdout, done.stderr[-3000:]
    assert (model / "evaluation/shapes/result.json").exists()
