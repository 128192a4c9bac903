"""Checks README and docs: files that they name exist, and commands that they show take their options and run."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import reference
from fences import fences
from mkdocs.commands.build import build
from mkdocs.config import load_config

from normllava.__main__ import SUBCOMMANDS
from training.modules.stages import Stage
from training.options.arguments import RunArguments


ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# How the first lines of blocks that are not run begin. Such a line tells the page's reader what the block needs.
NOT_RUN = ("# needs ", "# takes an hour", "# after make emoji", "# two terminals")
# Lines that begin like this are left out when a block is run: CI runs them anyway, or they change this environment.
LINES_NOT_RUN = ("make test", "make install", "make quality", "make docs", ".venv/bin/pre-commit install")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    """The name of the page's file."""
    number: int
    """Number of the block on its page, from 1."""
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether the tests run the block."""
        return not self.text.startswith(NOT_RUN)

    @property
    def commands(self) -> list[list[str]]:
        """The block's command lines, each as a list of words, without comments and variables such as `HF_TOKEN=x`."""
        # Lines that end in a backslash are joined with the next line.
        whole_lines = self.text.replace("\\\n", " ").splitlines()
        commands = []
        for line in whole_lines:
            words = shlex.split(line, comments=True)
            command = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if command:
                commands.append(command)
        return commands

    def __str__(self) -> str:
        """The block's id in the names of tests, such as "README.md-1"."""
        return f"{self.page}-{self.number}"


def find_blocks(*languages: str) -> Iterator[Block]:
    """All blocks of code in these languages, except Python in CONTRIBUTING.md, which test_contributing.py tests."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, (language, code) in enumerate(fences(text), start=1):
            is_tested_elsewhere = language == "python" and page.name == "CONTRIBUTING.md"
            if language in languages and not is_tested_elsewhere:
                yield Block(page.name, number, language, code)


SHELL_BLOCKS = list(find_blocks("bash"))


def find_module(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that a command line runs, and the command's arguments; `None` if the command doesn't run Python.

    For example, `python training/compose.py --help` runs "training.compose" with the argument "--help".
    """
    if words[:2] == ["accelerate", "launch"]:
        position = words.index("training/sft.py")  # the only script that pages launch
        return "training.sft", words[position + 1 :]
    if Path(words[0]).name == "normllava":
        return SUBCOMMANDS[words[1]].module, words[2:]
    if not words[0].endswith("python"):
        return None
    if words[1] != "-m":  # a script, such as `python training/compose.py`
        module = words[1].removesuffix(".py").replace("/", ".")
        return module, words[2:]

    # A module, such as `python -m hub_cards`, which runs the package's `__main__`.
    module = words[2]
    is_package = (ROOT / module.replace(".", "/") / "__main__.py").exists()
    if is_package:
        module += ".__main__"
    return module, words[3:]


def command_lines() -> list[str]:
    """The command lines of all pages, each line once."""
    lines = set()
    for block in SHELL_BLOCKS:
        lines.update(shlex.join(words) for words in block.commands)
    return sorted(lines)


def test_the_reference_is_that_of_the_code() -> None:
    """If this fails, run `python docs/reference.py`."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.render()


def options_on_page(heading: str) -> dict[str, str]:
    """What docs/reference.md says of each option in a section, by the option's name."""
    page = reference.PAGE.read_text(encoding="utf-8")
    _before, _heading, after_heading = page.partition(f"## {heading}\n")
    section, _next_heading, _after = after_heading.partition("\n## ")
    # An option's line is such as "- `--limit` (`8`): Help."
    return dict(re.findall(r"^- `(--\w+)`(.*)$", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "module"),
    [
        pytest.param("compose", "training.compose", id="compose"),
        pytest.param("diagnostics", "normllava.diagnostics.command", id="diagnostics"),
    ],
)
def test_the_reference_has_what_help_prints(heading: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # argparse then doesn't wrap help texts
    help_text = reference.build_parser(module).format_help()
    # After a long name, argparse puts the help text into the next line, which begins with many spaces.
    joined_lines = re.sub(r"\n {10,}", "  ", help_text)
    # An option's line begins with two spaces: "  --limit LIMIT  Help (default: 8)". That of --help doesn't match, as
    # it begins with "-h".
    printed = dict(re.findall(r"^  (--\w+)(.*)$", joined_lines, re.MULTILINE))
    on_page = options_on_page(heading)
    assert list(printed) == list(on_page)

    for name, text in printed.items():
        match = re.search(r"\(default: (.*)\)$", text)
        if match is None or match[1] in ("None", "False"):  # the page shows no such defaults
            continue
        default = match[1]
        # The page shows the default behind the option's name, or in the help text as `--help` does.
        shown_forms = [f"(`{default}`)", f"(default: {default})"]
        assert any(form in on_page[name] for form in shown_forms), name


def test_the_reference_has_every_field_of_a_recipe_with_its_default() -> None:
    on_page = options_on_page("sft")
    fields = {field.name: field for field in dataclasses.fields(RunArguments)}
    for name in RunArguments.__annotations__:  # without the fields that `RunArguments` inherits from TRL
        field = fields[name]
        if not field.init:  # the user can't set such a field, so it has no option
            continue
        text = on_page[f"--{name}"]
        if field.default is None or field.default is False:
            assert not text.startswith(" (")  # the page shows no such default
        else:
            assert f"(`{field.default}`)" in text


def test_the_reference_gives_both_defaults_where_ours_differs_from_trls() -> None:
    on_page = options_on_page("sft")
    assert on_page["--max_length"].startswith(" (`None`, in TRL `1024`)")
    assert on_page["--use_cpu"].startswith(" (`False`)")  # the same default as in TRL


def test_the_pages_are_built_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MkDocs also warns of links to missing files and anchors."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    with caplog.at_level("WARNING", logger="mkdocs"):
        build(config)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")]
    assert warnings == []
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "examples" / "digits" / "norms.png").exists()  # a picture outside docs/ that a page shows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_wrapped_line_begins_no_list(page: Path) -> None:
    """Markdown takes a line that begins with "3. " for a list. Pages have no numbered lists."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^\s*\d+\. .*", text, re.MULTILINE) == []


def test_commands_take_the_options_that_pages_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A parser may refuse a command whose output folder exists. In an empty folder no such folder exists.
    monkeypatch.chdir(tmp_path)
    for command in command_lines():
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in make_targets(), command
            continue

        module_and_arguments = find_module(words)
        if module_and_arguments is None:
            continue
        module, arguments = module_and_arguments
        if module in ("lmms_eval", "pytest"):  # other projects' commands
            continue
        unknown = unknown_arguments(module, arguments)
        assert unknown == [], command


def composed_recipes() -> set[str]:
    """The recipes that the pages' own commands of `training/compose.py` write."""
    recipes = set()
    for command in command_lines():
        words = shlex.split(command)
        if "training/compose.py" in words:
            folder = words[words.index("--output_dir") + 1]
            recipes |= {f"{folder}/{stage}.yaml" for stage in Stage}
    return recipes


def unknown_arguments(module: str, arguments: list[str]) -> list[str]:
    """The arguments of a command that its parser doesn't know. The recipe that a command names must exist, or be one
    that a page's command writes."""
    package = module.split(".")[0]
    assert (ROOT / package).is_dir()

    if "--config" in arguments:
        position = arguments.index("--config")
        recipe = arguments[position + 1]
        assert (ROOT / recipe).exists() or recipe in composed_recipes()
        if module in ("training.sft", "training.plan"):  # these commands read --config before they call their parsers
            arguments = arguments[:position] + arguments[position + 2 :]
    _, unknown = reference.build_parser(module).parse_known_args(arguments)
    return unknown


def make_targets() -> list[str]:
    """The targets of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    # A variable is set by a line such as "BIN ?= .venv/bin".
    for name, value in re.findall(r"^(\w+) \?= (.*)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", value)
    # A target's line begins with the target and a colon, such as "docs: requirements". A target may be a path.
    return re.findall(r"^([\w./()$-]+):", text, re.MULTILINE)


@pytest.fixture(scope="module")
def workplace() -> Path:
    """The repository after the quickstart has run in it. Outputs of earlier tests of blocks are deleted."""
    subprocess.run([sys.executable, "-m", "examples.digits.quickstart"], cwd=ROOT, check=True, capture_output=True)
    shutil.rmtree(ROOT / "runs" / "docs", ignore_errors=True)  # where commands on pages write
    return ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if block.is_run], ids=str)
def test_a_block_of_commands_runs(
    block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if ".venv-evaluation" in block.text:
        request.getfixturevalue("harness_python")  # this fixture makes the folder .venv-evaluation
    lines = [line for line in block.text.splitlines() if not line.startswith(LINES_NOT_RUN)]
    script = "\n".join(lines)
    # The block finds the commands of this environment.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    # With "-euo pipefail", the block ends at the first command that fails.
    completed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=workplace, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in find_blocks("python") if block.is_run], ids=str)
def test_a_block_of_python_runs(block: Block, workplace: Path) -> None:
    completed = subprocess.run([sys.executable, "-c", block.text], cwd=workplace, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
