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
# The packages that the page's changes and tests need.
PACKAGES = ("modeling_normllava", "normllava", "training")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def read_sections() -> dict[str, str]:
    """The text of each section of the page whose heading begins with "Add", by the heading."""
    _before_first_heading, *all_sections = PAGE.split("\n## ")
    sections = {}
    for section in all_sections:
        heading, text = section.split("\n", maxsplit=1)
        if heading.startswith("Add "):
            sections[heading] = text
    return sections


SECTIONS = read_sections()


def find_blocks(heading: str, language: str) -> list[str]:
    """The code of all blocks in this language, in the section with this heading."""
    return [code for block_language, code in fences(SECTIONS[heading]) if block_language == language]


@pytest.fixture(scope="module")
def extended_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source to which all changes on the page have been applied."""
    copy = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, copy / name)

    # Git must not look for the changed files in a repository that the temporary folder may be inside of.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    for heading in SECTIONS:
        for diff in find_blocks(heading, "diff"):
            # The line numbers on the page may be outdated, but git finds the place of a change by the lines around it.
            applied = subprocess.run(
                ["git", "apply", "-"], input=diff, cwd=copy, env=environment, capture_output=True, text=True
            )
            assert applied.returncode == 0, f"{heading}: {applied.stderr}"
    return copy


def test_each_addition_changes_two_files_at_most() -> None:
    assert list(SECTIONS) == ["Add an arm", "Add a measure", "Add a family"]
    for heading in SECTIONS:
        diffs = "".join(find_blocks(heading, "diff"))
        # A diff names a changed file in a line such as "+++ b/training/sft.py".
        changed_files = set(re.findall(r"^\+\+\+ b/(.*)$", diffs, re.MULTILINE))
        assert 1 <= len(changed_files) <= 2, heading


def test_the_tests_on_the_page_pass(extended_source: Path) -> None:
    for number, heading in enumerate(SECTIONS):
        (test_code,) = find_blocks(heading, "python")
        (extended_source / f"tests/test_{number}.py").write_text(test_code, encoding="utf-8")

    # With this `PYTHONPATH`, the tests import the packages of the copy.
    environment = os.environ | {"PYTHONPATH": str(extended_source), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    completed = subprocess.run(command, cwd=extended_source, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-3000:]
    assert "3 passed" in completed.stdout  # one test in each section
