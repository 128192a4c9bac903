"""What the house promises: packages and modules import one way, and pip installs what is imported and nothing else."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
# From the bottom up; packages of one level don't import each other.
LEVELS = (
    ("modeling_normllava", "common"),
    ("conversations",),
    ("diagnostics",),
    ("training",),
    ("evaluation",),
    ("hub_cards",),
    ("examples", "benchmarks", "docs"),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The packages whose imports an extra serves; "" is what pip installs without any extra.
SERVED = {
    "": ("modeling_normllava",),
    "diagnostics": ("common", "conversations", "diagnostics"),
    "train": ("training",),
    "evaluation": ("evaluation",),
    "release": ("hub_cards",),
}
# Used without an import: by transformers for pictures and quantized weights, and by or as a harness's command.
INDIRECT = {"": {"pillow"}, "train": {"bitsandbytes"}, "evaluation": {"filelock", "lm-eval"}}


@cache
def imports(package: str) -> dict[str, set[str]]:
    """By module of a package, the modules and names that it imports, in functions too."""
    by_module = {}
    for path in (ROOT / package).rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names |= imported_names(node, package)
        by_module[".".join(path.relative_to(ROOT).with_suffix("").parts)] = names
    return by_module


def imported_names(node: ast.AST, package: str) -> set[str]:
    """What a statement in a module of a package imports: modules, and names in them."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()

    module = node.module or ""
    if node.level:  # relative: no package has another inside
        module = f"{package}.{module}".rstrip(".")
    return {module, *(f"{module}.{alias.name}" for alias in node.names)}


def imported_packages(package: str) -> set[str]:
    """The other packages, ours and others', that a package imports."""
    packages = set()
    for names in imports(package).values():
        packages |= {name.split(".")[0] for name in names}
    return packages - {package}


def test_packages_import_those_below() -> None:
    upwards = []
    for package, level in LEVEL.items():
        for other in imported_packages(package) & LEVEL.keys():
            if LEVEL[other] >= level:
                upwards.append(f"{package} imports {other}")
    assert upwards == []

    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.split("/")[0] for path in tracked.splitlines()}
    assert folders == {*LEVEL, "tests"}


@pytest.mark.parametrize("package", LEVEL)
def test_modules_import_in_no_circle(package: str) -> None:
    modules = imports(package)
    TopologicalSorter({name: names & modules.keys() - {name} for name, names in modules.items()}).prepare()


def stated(extra: str) -> set[str]:
    """The distributions that an extra names, without those of the extras that it includes."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines} - {PROJECT["name"]}


def brought(extra: str) -> set[str]:
    """All that an extra installs of what pyproject.toml names."""
    names = stated("") | stated(extra)
    for line in PROJECT["optional-dependencies"].get(extra, []):
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for included in requirement.extras:
                names |= brought(included)
    return names


@pytest.mark.parametrize("extra", SERVED)
def test_what_is_imported_is_stated_and_nothing_else(extra: str) -> None:
    names = set()
    for package in SERVED[extra]:
        for module, imported in imports(package).items():
            if not module.startswith("hub_cards.assets"):  # the Space and the handler have requirements of their own
                names |= {name.split(".")[0] for name in imported}

    distributions = packages_distributions()
    needed = set()
    for name in names - LEVEL.keys() - sys.stdlib_module_names:
        needed.add(canonicalize_name(distributions.get(name, [name])[0]))
    assert needed - brought(extra) == set()
    assert stated(extra) - needed - INDIRECT.get(extra, set()) == set()


def test_the_wheel_holds_the_class_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    code = {path.relative_to(ROOT) for path in (ROOT / "modeling_normllava").glob("*.py")}
    assert {path for path in packed if not path.parts[0].endswith(".dist-info")} == code
