"""Packages and modules import each other in one direction, and pip installs what they import and nothing else."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
# The levels of the packages, from the bottom up. A package imports packages of lower levels only.
LEVELS = (
    ("modeling_normllava", "common"),
    ("conversations",),
    ("diagnostics",),
    ("training",),
    ("evaluation",),
    ("hub_cards",),
    ("examples", "benchmarks", "docs"),
)
LEVEL_OF: dict[str, int] = {}
for level, packages in enumerate(LEVELS):
    LEVEL_OF |= dict.fromkeys(packages, level)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# For each extra, the packages that need it. "" stands for what pip installs without an extra.
PACKAGES_OF_EXTRA = {
    "": ("modeling_normllava",),
    "diagnostics": ("common", "conversations", "diagnostics"),
    "train": ("training",),
    "evaluation": ("evaluation",),
    "release": ("hub_cards",),
}
# For each extra, the distributions that are needed, though our code doesn't import them. transformers imports Pillow
# for pictures and bitsandbytes for quantized weights, lmms-eval imports filelock, and lm-eval is run as a command.
NOT_IMPORTED = {"": {"pillow"}, "train": {"bitsandbytes"}, "evaluation": {"filelock", "lm-eval"}}


@cache
def imports(package: str) -> dict[str, set[str]]:
    """For each module of a package, what it imports, inside functions too: modules, and names in modules."""
    by_module = {}
    for path in (ROOT / package).rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names |= imported_names(node, package)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        by_module[module] = names
    return by_module


def imported_names(node: ast.AST, package: str) -> set[str]:
    """What a statement in a module of a package imports: modules, and names in modules."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()

    module = node.module or ""
    is_relative = node.level > 0
    if is_relative:  # no package has a package inside, so the import is relative to the package itself
        module = f"{package}.{module}".rstrip(".")
    return {module, *(f"{module}.{alias.name}" for alias in node.names)}


def imported_packages(package: str) -> set[str]:
    """The top-level packages that a package imports, without itself."""
    packages = set()
    for names in imports(package).values():
        packages |= {name.split(".")[0] for name in names}
    return packages - {package}


def test_packages_import_those_below() -> None:
    upwards = []
    for package, level in LEVEL_OF.items():
        for other in imported_packages(package) & LEVEL_OF.keys():
            if LEVEL_OF[other] >= level:
                upwards.append(f"{package} imports {other}")
    assert upwards == []


def test_every_package_has_a_level() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.split("/")[0] for path in tracked.splitlines()}
    assert folders == {*LEVEL_OF, "tests"}


@pytest.mark.parametrize("package", LEVEL_OF)
def test_modules_import_in_no_circle(package: str) -> None:
    modules = imports(package)
    imported_modules = {module: names & modules.keys() - {module} for module, names in modules.items()}
    TopologicalSorter(imported_modules).prepare()  # raises CycleError if there is a circle


def named_by(extra: str) -> set[str]:
    """The distributions that an extra names itself, without those of the extras that it includes."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines} - {PROJECT["name"]}


def installed_by(extra: str) -> set[str]:
    """All distributions named in pyproject.toml that pip installs with an extra."""
    names = named_by("") | named_by(extra)
    for line in PROJECT["optional-dependencies"].get(extra, []):
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for included in requirement.extras:
                names |= installed_by(included)
    return names


def needed_by(packages: Sequence[str]) -> set[str]:
    """The distributions that packages of ours import."""
    names = set()
    for package in packages:
        for module, imported in imports(package).items():
            # The Space and the endpoint's handler have requirements of their own.
            if not module.startswith("hub_cards.assets"):
                names |= {name.split(".")[0] for name in imported}

    distributions = packages_distributions()
    needed = set()
    for name in names - LEVEL_OF.keys() - sys.stdlib_module_names:
        distribution = distributions.get(name, [name])[0]
        needed.add(canonicalize_name(distribution))
    return needed


@pytest.mark.parametrize("extra", PACKAGES_OF_EXTRA)
def test_an_extra_names_what_its_packages_import_and_nothing_else(extra: str) -> None:
    needed = needed_by(PACKAGES_OF_EXTRA[extra])
    missing = needed - installed_by(extra)
    superfluous = named_by(extra) - needed - NOT_IMPORTED.get(extra, set())
    assert missing == set()
    assert superfluous == set()


def test_the_wheel_holds_the_class_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    paths_in_wheel = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    packed_code = {path for path in paths_in_wheel if not path.parts[0].endswith(".dist-info")}
    code = {path.relative_to(ROOT) for path in (ROOT / "modeling_normllava").glob("*.py")}
    assert packed_code == code
