"""Packages and modules import each other in one direction, and pip installs only what they need."""

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
# The packages of each level, from the bottom up. A package imports packages of lower levels only.
LEVELS = (
    ("modeling_normllava", "common"),
    ("conversations",),
    ("diagnostics",),
    ("training",),
    ("evaluation",),
    ("hub_cards",),
    ("examples", "benchmarks", "docs"),
)
LEVEL_OF: dict[str, int] = {}  # the level of each package
for level, packages in enumerate(LEVELS):
    for package in packages:
        LEVEL_OF[package] = level
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# For each extra of pyproject.toml, the packages that need it. "" stands for what pip installs without an extra.
PACKAGES_OF_EXTRA = {
    "": ("modeling_normllava",),
    "diagnostics": ("common", "conversations", "diagnostics"),
    "train": ("training",),
    "evaluation": ("evaluation",),
    "release": ("hub_cards",),
}
# For each extra, the distributions (what pip installs under a name) that our code needs without importing them:
# transformers imports Pillow for pictures and bitsandbytes for quantized weights, lmms-eval imports filelock, and
# lm-eval is run as a command.
NOT_IMPORTED = {"": {"pillow"}, "train": {"bitsandbytes"}, "evaluation": {"filelock", "lm-eval"}}


@cache
def imports_by_module(package: str) -> dict[str, set[str]]:
    """For each module of a package, the names that it imports, such as `common.errors` and `common.errors.UserError`.

    Imports inside functions are found too.
    """
    names_by_module = {}
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names: set[str] = set()
        for node in ast.walk(tree):
            names |= imported_names(node, package)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)  # common.errors of common/errors.py
        names_by_module[module] = names
    return names_by_module


def imported_names(node: ast.AST, package: str) -> set[str]:
    """The names that a statement in a module of `package` imports. `from a import b` gives `a` and `a.b`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()

    module = node.module or ""
    is_relative = node.level > 0
    if is_relative:  # only modeling_normllava has relative imports, and it has no folders inside
        module = f"{package}.{module}".rstrip(".")
    return {module} | {f"{module}.{alias.name}" for alias in node.names}


def imported_packages(package: str) -> set[str]:
    """The other top-level packages that a package imports."""
    packages = set()
    for names in imports_by_module(package).values():
        packages |= {name.split(".")[0] for name in names}
    return packages - {package}


def test_a_package_imports_only_packages_of_lower_levels() -> None:
    forbidden_imports = []
    for package, level in LEVEL_OF.items():
        for imported in imported_packages(package) & LEVEL_OF.keys():
            if LEVEL_OF[imported] >= level:
                forbidden_imports.append(f"{package} imports {imported}")
    assert forbidden_imports == []


def test_every_package_has_a_level() -> None:
    git = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked_files = git.stdout.splitlines()
    folders = {Path(file).parts[0] for file in tracked_files}
    assert folders == {*LEVEL_OF, "tests"}


@pytest.mark.parametrize("package", LEVEL_OF)
def test_the_modules_of_a_package_do_not_import_each_other_in_a_circle(package: str) -> None:
    names_by_module = imports_by_module(package)
    modules = names_by_module.keys()
    imported_modules = {}
    for module, names in names_by_module.items():
        imported_modules[module] = (names & modules) - {module}
    TopologicalSorter(imported_modules).prepare()  # raises CycleError if there is a circle


def requirements_of(extra: str) -> list[Requirement]:
    """The requirements that pyproject.toml lists for an extra. "" stands for those that need no extra."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(line) for line in lines]


def named_by(extra: str) -> set[str]:
    """The distributions that an extra names itself, without those of the extras that it includes."""
    names = {canonicalize_name(requirement.name) for requirement in requirements_of(extra)}
    return names - {PROJECT["name"]}  # normllava[train] includes the extra "train"


def installed_by(extra: str) -> set[str]:
    """All distributions named in pyproject.toml that pip installs with an extra."""
    names = named_by("") | named_by(extra)
    for requirement in requirements_of(extra):
        if requirement.name == PROJECT["name"]:
            for included_extra in requirement.extras:
                names |= installed_by(included_extra)
    return names


def needed_by(packages: Sequence[str]) -> set[str]:
    """The distributions whose modules these packages of ours import."""
    top_level_names = set()
    for package in packages:
        for module, names in imports_by_module(package).items():
            # Files in assets/ are copied into Hub repositories, which list what they need themselves.
            is_asset = module.startswith("hub_cards.assets")
            if not is_asset:
                top_level_names |= {name.split(".")[0] for name in names}

    distributions = packages_distributions()  # such as {"PIL": ["pillow"]}
    needed = set()
    for name in top_level_names - LEVEL_OF.keys() - sys.stdlib_module_names:
        # A distribution that isn't installed here is taken to have the name of its module. If several distributions
        # have the module, the first distribution counts.
        distribution_names = distributions.get(name, [name])
        needed.add(canonicalize_name(distribution_names[0]))
    return needed


@pytest.mark.parametrize("extra", PACKAGES_OF_EXTRA)
def test_an_extra_installs_what_its_packages_import_and_names_nothing_else(extra: str) -> None:
    needed = needed_by(PACKAGES_OF_EXTRA[extra])
    missing = needed - installed_by(extra)
    superfluous = named_by(extra) - needed - NOT_IMPORTED.get(extra, set())
    assert missing == set()
    assert superfluous == set()


def test_the_wheel_holds_the_model_class_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    paths_in_wheel = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    code_in_wheel = {path for path in paths_in_wheel if not path.parts[0].endswith(".dist-info")}
    model_code = {path.relative_to(ROOT) for path in (ROOT / "modeling_normllava").glob("*.py")}
    assert code_in_wheel == model_code
