"""Runs the tests that depend most on transformers and TRL with other versions of both.

These are the lowest versions that pyproject.toml allows for training, and the newest releases. The newest may be above
what training allows, but the model class has no upper limit.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement


ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/modeling_normllava",
    "tests/diagnostics/test_sweep.py",
    "tests/training/test_sft.py",
    "tests/training/test_resume.py::test_a_resumed_run_gives_the_weights_of_an_unbroken_one",
]
# A program that prints the versions.
VERSIONS = "import transformers, trl; print('transformers', transformers.__version__, 'trl', trl.__version__)"


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)


def install_beside(folder: Path, *requirements: str) -> None:
    """Install into `folder` only those distributions that the requirements need and this environment doesn't have."""
    # Where pip can't reach an index, it would take the installed versions for the newest ones.
    probe = pip("download", "--quiet", "--no-deps", "--dest", str(folder / "probe"), "trl")
    if probe.returncode:
        pytest.skip(f"pip can't download trl: {probe.stderr.splitlines()[-1]}")

    report = folder / "report.json"
    resolved = pip("install", "--quiet", "--upgrade", "--dry-run", "--report", str(report), *requirements)
    assert resolved.returncode == 0, resolved.stderr
    missing = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    if missing:
        pinned = [f"{package['name']}=={package['version']}" for package in missing]
        installed = pip("install", "--quiet", "--no-deps", "--target", str(folder), *pinned)
        assert installed.returncode == 0, installed.stderr


def lowest(name: str) -> str:
    """The requirement that pins a dependency to the lowest version that training allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(line) for line in project["optional-dependencies"]["train"]]
    (requirement,) = (requirement for requirement in requirements if requirement.name == name)
    (version,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    return f"{name}=={version}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "requirements", [[lowest("transformers"), lowest("trl")], ["transformers", "trl"]], ids=["lowest", "newest"]
)
def test_other_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str], requirements: list[str]) -> None:
    install_beside(tmp_path, *requirements)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    versions = python("-c", VERSIONS).stdout.strip()
    for requirement in requirements:
        assert requirement.replace("==", " ") in versions
    result = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    with capsys.disabled():
        print(f"\n{versions}: {result.stdout.splitlines()[-1]}")  # noqa: T201 - shows which versions were tested
    assert result.returncode == 0, result.stdout
