"""Runs the tests that depend most on transformers and TRL again, with other versions of both.

These versions are the lowest that pyproject.toml allows for training, and the newest that pip finds. If the newest is
higher than pyproject.toml allows for training, a failure says only that pyproject.toml's limit is right.
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
    "tests/normllava/diagnostics/test_sweep.py",
    "tests/training/test_sft.py",
    "tests/training/test_resume.py::test_a_resumed_run_gives_the_weights_of_an_unbroken_one",
]
# A program that prints, for example, "transformers==5.18.0 trl==1.16.0".
PRINT_VERSIONS = "import transformers as t, trl; print(f'transformers=={t.__version__} trl=={trl.__version__}')"


def run_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)


def install_beside(folder: Path, *requirements: str) -> None:
    """Install into a folder what the requirements need and this environment doesn't have."""
    # Without an index of packages, pip would take the installed versions for the newest. A download shows whether pip
    # reaches an index.
    download = run_pip("download", "--quiet", "--no-deps", "--dest", str(folder / "download"), "trl")
    if download.returncode != 0:
        pytest.skip(f"pip can't download trl: {download.stderr.splitlines()[-1]}")

    # Let pip report which versions it would install.
    report_file = folder / "report.json"
    dry_run = run_pip("install", "--quiet", "--upgrade", "--dry-run", "--report", str(report_file), *requirements)
    assert dry_run.returncode == 0, dry_run.stderr
    pinned = []
    for package in json.loads(report_file.read_text())["install"]:
        metadata = package["metadata"]
        pinned.append(f"{metadata['name']}=={metadata['version']}")

    if pinned:
        installation = run_pip("install", "--quiet", "--no-deps", "--target", str(folder), *pinned)
        assert installation.returncode == 0, installation.stderr


def pin_lowest(name: str) -> str:
    """The requirement that pins a dependency to the lowest version that training allows, such as "trl==1.16"."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = pyproject["project"]["optional-dependencies"]["train"]
    requirements = [Requirement(line) for line in lines]
    (requirement,) = [requirement for requirement in requirements if requirement.name == name]
    (lowest_version,) = [bound.version for bound in requirement.specifier if bound.operator == ">="]
    return f"{name}=={lowest_version}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "requirements",
    [[pin_lowest("transformers"), pin_lowest("trl")], ["transformers", "trl"]],
    ids=["lowest", "newest"],
)
def test_the_tests_pass_with_other_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], requirements: list[str]
) -> None:
    install_beside(tmp_path, *requirements)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    printed = run_python("-c", PRINT_VERSIONS)
    assert printed.returncode == 0, printed.stderr
    versions = printed.stdout.strip()
    for requirement in requirements:
        assert requirement in versions  # such as "trl==1.16", or "trl" for the newest
    no_cache = ("-p", "no:cacheprovider")  # so that these tests don't replace the outer pytest's list of failed tests
    result = run_python("-m", "pytest", "-q", *no_cache, *TESTS)
    with capsys.disabled():
        print(f"\n{versions}: {result.stdout.splitlines()[-1]}")  # noqa: T201 - shows which versions were tested
    assert result.returncode == 0, result.stdout
