"""Checks CONTRIBUTING.md: its changes are applied to a copy of the source, and its tests are run on that copy."""

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
# The text of each section whose heading begins with "Add", by its heading.
SECTIONS = dict(re.findall(r"^## (Add .*?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section that are in this language."""
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

    # Git must not take the copy for a part of a repository around it, whose paths it would apply the changes to.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    for section in SECTIONS:
        for diff in blocks(section, "diff"):
            # The page's line numbers may be outdated, but git finds the place by the lines around a change.
            applied = subprocess.run(
                ["git", "apply", "-"], input=diff, cwd=copy, env=environment, capture_output=True, text=True
            )
            assert applied.returncode == 0, f"{section}: {applied.stderr}"
    return copy


def test_an_arm_a_measure_and_a_family_take_two_files_at_most() -> None:
    assert list(SECTIONS) == ["Add an arm", "Add a measure", "Add a family"]
    for section in SECTIONS:
        diffs = "".join(blocks(section, "diff"))
        changed_files = set(re.findall(r"^\+\+\+ b/(.*)$", diffs, re.M))
        assert 1 <= len(changed_files) <= 2, section


def test_the_pages_tests_pass(extended: Path) -> None:
    for number, section in enumerate(SECTIONS):
        (test_code,) = blocks(section, "python")
        (extended / f"tests/test_{number}.py").write_text(test_code)

    # The tests import the packages of the copy.
    environment = os.environ | {"PYTHONPATH": str(extended), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "3 passed" in done.stdout
