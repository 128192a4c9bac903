"""The packages import one way: each reads only those below it."""

import ast
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
# From the bottom up; packages of one level don't import each other.
LEVELS = (
    ("modeling_normllava", "conversations"),
    ("diagnostics",),
    ("training",),
    ("evaluation",),
    ("hub_cards",),
    ("examples", "benchmarks", "docs"),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


def imported_packages(package: str) -> set[str]:
    """The packages of ours that a package imports, in functions too."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").split(".")[0])
    return (found & LEVEL.keys()) - {package}


def draw(imports: dict[str, set[str]]) -> str:
    """The packages from the top down, each with what it imports."""
    lines = []
    for packages in reversed(LEVELS):
        for package in packages:
            if package in imports:
                lines.append(f"{package:20} -> {', '.join(sorted(imports[package], key=LEVEL.get)) or 'none of ours'}")
        lines.append("  |")
    return "\n".join(lines[:-1])


def test_imports_point_down(capsys: pytest.CaptureFixture[str]) -> None:
    imports = {package: imported_packages(package) for package in LEVEL if (ROOT / package).is_dir()}
    with capsys.disabled():
        print(f"\n{draw(imports)}")  # noqa: T201 - the drawing is the test's output
    upwards = {
        f"{package} imports {other}"
        for package, others in imports.items()
        for other in others
        if LEVEL[other] >= LEVEL[package]
    }
    assert upwards == set()
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {path.split("/")[0] for path in tracked.splitlines()} - LEVEL.keys() == {"tests"}
