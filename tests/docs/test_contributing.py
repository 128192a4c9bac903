"""CONTRIBUTING.md does what it says: its changes are applied to a copy of the source, and its tests are run there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fences import fences


ROOT = Path(__file__).parents[2]
PACKAGES = ("modeling_normllava", "common", "conversations", "diagnostics", "training")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# By heading, the text below each that adds something.
SECTIONS = dict(re.findall(r"^## (Add .*?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section in a language."""
    return [code for block_language, code in fences(SECTIONS[section]) if block_language == language]


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
    return copy


def test_an_arm_a_measure_and_a_family_take_two_files_at_most() -> None:
    changed = {section: re.findall(r"^\+\+\+ b/(.*)$", "".join(blocks(section, "diff")), re.M) for section in SECTIONS}
    assert list(changed) == ["Add an arm", "Add a measure", "Add a family"]
    assert all(1 <= len(set(files)) <= 2 for files in changed.values()), changed


def test_the_pages_tests_pass(extended: Path) -> None:
    tests = [code for section in SECTIONS for code in blocks(section, "python")]
    for number, code in enumerate(tests):
        (extended / f"tests/test_{number}.py").write_text(code)
    # The packages are those of the copy.
    environment = os.environ | {"PYTHONPATH": str(extended), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "3 passed" in done.stdout
