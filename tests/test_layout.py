"""Packages and modules import each other in one direction, and pip installs only what they need."""

import ast
import os
import subprocess
import sys
import tarfile
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
# The rooms, from the bottom up: a room imports rooms of lower levels only. "normllava" stands for the modules at its
# top, which have no folder of their own.
LEVELS = (
    ("modeling_normllava",),
    ("normllava",),
    ("normllava/conversations",),
    ("normllava/diagnostics",),
    ("normllava/evaluation",),
    ("training",),
    ("hub_cards",),
    ("examples", "benchmarks", "docs"),
)
LEVEL_OF: dict[str, int] = {}  # the level of each room
for level, rooms in enumerate(LEVELS):
    for room in rooms:
        LEVEL_OF[room] = level
OUR_PACKAGES = {room.split("/")[0] for room in LEVEL_OF}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# For each extra of pyproject.toml, the rooms that need it. "" stands for what pip installs without an extra.
ROOMS_OF_EXTRA = {
    "": ("modeling_normllava", "normllava"),
    "diagnose": ("normllava/conversations", "normllava/diagnostics"),
    "train": ("training",),
    "evaluate": ("normllava/evaluation",),
    "release": ("hub_cards",),
}
# For each extra, the distributions (what pip installs under a name) that our code needs without importing them:
# transformers imports bitsandbytes for quantized weights, normllava/evaluation reads training's records by pydantic,
# lmms-eval imports filelock, and lm-eval is run as a command.
NOT_IMPORTED = {"train": {"bitsandbytes", "pydantic"}, "evaluate": {"filelock", "lm-eval"}}

# What rooms import only if it is asked for: trackers that a run reports to, and what the extra "gguf" installs.
ASKED_FOR = {"train": {"trackio", "wandb"}, "release": {"gguf", "xllamacpp"}}


@cache
def imports_by_module(room: str) -> dict[str, set[str]]:
    """For each module of a room, the names that it imports, such as `normllava.errors` and what it takes from it.

    Imports inside functions are found too.
    """
    has_rooms_inside = any(other.startswith(f"{room}/") for other in LEVEL_OF)
    pattern = "*.py" if has_rooms_inside else "**/*.py"
    names_by_module = {}
    for path in (ROOT / room).glob(pattern):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names: set[str] = set()
        for node in ast.walk(tree):
            names |= imported_names(node, room)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)  # normllava.errors of normllava/errors.py
        names_by_module[module.removesuffix(".__init__")] = names
    return names_by_module


def imported_names(node: ast.AST, room: str) -> set[str]:
    """The names that a statement in a module of a room imports. `from a import b` gives `a` and `a.b`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()

    module = node.module or ""
    is_relative = node.level > 0
    if is_relative:  # only modeling_normllava has relative imports, and it has no folders inside
        module = f"{room}.{module}".rstrip(".")
    return {module} | {f"{module}.{alias.name}" for alias in node.names}


def room_of(name: str) -> str | None:
    """The room of an imported name; `None` if it isn't ours."""
    parts = name.split(".")
    for room in ("/".join(parts[:2]), parts[0]):
        if room in LEVEL_OF:
            return room
    return None


def imported_rooms(room: str) -> set[str]:
    """The other rooms that a room imports."""
    rooms: set[str] = set()
    for names in imports_by_module(room).values():
        rooms |= {imported for name in names if (imported := room_of(name)) is not None}
    return rooms - {room}


def test_a_room_imports_only_rooms_of_lower_levels() -> None:
    forbidden_imports = []
    for room, level in LEVEL_OF.items():
        for imported in imported_rooms(room):
            if LEVEL_OF[imported] >= level:
                forbidden_imports.append(f"{room} imports {imported}")
    assert forbidden_imports == []


def test_every_file_is_in_a_room() -> None:
    folders = {Path(file).parts[0] for file in tracked_files("*.py")}
    assert folders == {*OUR_PACKAGES, "tests"}
    folders_of_normllava = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "normllava").rglob("*.py")}
    assert folders_of_normllava <= LEVEL_OF.keys()


def all_imports() -> dict[str, set[str]]:
    """The names that each of our modules imports."""
    names_by_module: dict[str, set[str]] = {}
    for room in LEVEL_OF:
        names_by_module |= imports_by_module(room)
    return names_by_module


def test_every_module_that_is_imported_exists() -> None:
    """mypy doesn't tell, since it passes over missing modules of other projects."""
    names_by_module = all_imports()
    missing = set()
    for names in names_by_module.values():
        for name in names:
            is_ours = room_of(name) is not None
            parent = name.rpartition(".")[0]  # of a function or class, the module that it is taken from
            if is_ours and name not in names_by_module and parent not in names_by_module:
                missing.add(name)
    assert missing == set()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    names_by_module = all_imports()
    imported_modules = {}
    for module, names in names_by_module.items():
        ours = names & names_by_module.keys()
        # `from package import module` needs nothing of the package's own code.
        packages = {name.rpartition(".")[0] for name in ours}
        imported_modules[module] = ours - packages - {module}
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


def needed_by(rooms: Sequence[str]) -> set[str]:
    """The distributions whose modules these rooms import."""
    top_level_names = set()
    for room in rooms:
        for module, names in imports_by_module(room).items():
            # Files in assets/ are copied into Hub repositories, which list what they need themselves.
            is_asset = module.startswith("hub_cards.assets")
            if not is_asset:
                top_level_names |= {name.split(".")[0] for name in names}

    distributions = packages_distributions()  # such as {"PIL": ["pillow"]}
    needed = set()
    for name in top_level_names - OUR_PACKAGES - sys.stdlib_module_names:
        # A distribution that isn't installed here is taken to have the name of its module. If several distributions
        # have the module, the first distribution counts.
        distribution_names = distributions.get(name, [name])
        needed.add(canonicalize_name(distribution_names[0]))
    return needed


@pytest.mark.parametrize("extra", ROOMS_OF_EXTRA)
def test_an_extra_installs_what_its_rooms_import_and_names_nothing_else(extra: str) -> None:
    needed = needed_by(ROOMS_OF_EXTRA[extra])
    missing = needed - installed_by(extra) - ASKED_FOR.get(extra, set())
    superfluous = named_by(extra) - needed - NOT_IMPORTED.get(extra, set())
    assert missing == set()
    assert superfluous == set()


def build_distribution(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the wheel or the sdist of a source into a folder."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


def tracked_files(*folders: str) -> set[str]:
    """The files of these folders that git tracks."""
    git = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(git.stdout.splitlines())


def test_the_wheel_holds_the_class_and_what_people_take_along(tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build_distribution("wheel", tmp_path))
    code = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert code == tracked_files("modeling_normllava", "normllava")


def test_the_sdist_holds_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    with tarfile.open(build_distribution("sdist", tmp_path)) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}  # without the folder of the version
    assert tracked_files("modeling_normllava", "normllava") | {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("training", "tests", "examples")) for name in names)


# What a trainer of one's own imports, and where it comes from.
IMPORTING_PROGRAM = """
import sys
from normllava import NormMonitor, add_norm, scale_projector
print(sys.modules["normllava"].__file__)
print({"pandas", "datasets", "matplotlib", "sklearn", "trl"} & sys.modules.keys())
"""


def test_the_wheel_works_without_a_clone_and_loads_no_extra(tmp_path: Path) -> None:
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(build_distribution("wheel", tmp_path / "wheel")) as wheel:
        wheel.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    program = [sys.executable, "-c", IMPORTING_PROGRAM]
    completed = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines() == [str(tmp_path / "site" / "normllava" / "__init__.py"), "set()"]

    command = [sys.executable, "-m", "normllava", "diagnose", "--help"]
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "--sweep" in completed.stdout


def test_a_wheel_built_from_the_sdist_is_the_same(tmp_path: Path) -> None:
    for name in ("sdist", "unpacked", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build_distribution("sdist", tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    wheel = zipfile.ZipFile(build_distribution("wheel", tmp_path / "wheel", source))
    code = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert code == tracked_files("modeling_normllava", "normllava")
