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

from training.arguments import RunArguments
from training.command_line import parse_arguments


ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# First lines of blocks that are not run here. They tell the reader what a block needs.
NOT_RUN = ("# needs the Hub", "# needs a GPU", "# takes an hour", "# after make emoji", "# two terminals")
# Beginnings of lines that are not run in a block: CI runs them already, or they would change this environment.
LINES_NOT_RUN = ("make test", "make install", "make quality", "make docs", ".venv/bin/pre-commit install")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    number: int
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether the tests run it: it needs neither a GPU nor the Hub, and doesn't take long."""
        return not self.text.startswith(NOT_RUN)

    @property
    def commands(self) -> list[list[str]]:
        """Its command lines, each as a list of words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = []
        for line in lines:
            words = shlex.split(line, comments=True)
            words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]  # without variables
            if words:
                commands.append(words)
        return commands

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks of code in these languages, but the Python of CONTRIBUTING.md, which test_contributing.py tests."""
    for page in PAGES:
        for number, (language, code) in enumerate(fences(page.read_text(encoding="utf-8")), start=1):
            is_tested_elsewhere = language == "python" and page.name == "CONTRIBUTING.md"
            if language in languages and not is_tested_elsewhere:
                yield Block(page.name, number, language, code)


SHELL = list(blocks("bash"))


def module_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that a command line starts, and its arguments; `None` if it doesn't start Python."""
    if words[:2] == ["accelerate", "launch"]:
        return "training.sft", words[words.index("training/sft.py") + 1 :]
    if not words[0].endswith("python"):
        return None
    if words[1] != "-m":
        return words[1].removesuffix(".py").replace("/", "."), words[2:]

    module = words[2]
    is_package = (ROOT / module.replace(".", "/") / "__main__.py").exists()
    if is_package:
        module += ".__main__"
    return module, words[3:]


def command_lines() -> list[str]:
    """All different command lines of the pages."""
    lines = set()
    for block in SHELL:
        lines.update(shlex.join(words) for words in block.commands)
    return sorted(lines)


def test_the_reference_is_that_of_the_code() -> None:
    """If this fails, run `python docs/reference.py`."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.render()


def options_on_page(heading: str) -> dict[str, str]:
    """The text of each option in a section of the reference, by the option."""
    section = reference.PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^- `(--\w+)`(.*)$", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "module"), [("compose", "training.compose"), ("diagnostics", "diagnostics.__main__")]
)
def test_the_reference_has_what_help_prints(heading: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    printed = reference.build_parser(module).format_help()
    printed = re.sub(r"\n {10,}", "  ", printed)  # puts the help of options with long names into their lines
    options = re.findall(r"^  (--\w+)(.*)$", printed, re.MULTILINE)
    on_page = options_on_page(heading)
    assert [name for name, _ in options] == list(on_page)

    for name, text in options:
        default = re.search(r"\(default: (.*)\)$", text)
        if default is None or default[1] in ("None", "False"):
            continue
        # The page gives a default in code behind the name, or as the help gives it.
        value = default[1]
        assert f"(`{value}`)" in on_page[name] or f"(default: {value})" in on_page[name], name


def test_the_reference_has_every_field_of_a_recipe_with_its_default() -> None:
    on_page = options_on_page("sft")
    fields = {field.name: field for field in dataclasses.fields(RunArguments)}
    for name in RunArguments.__annotations__:
        field = fields[name]
        if not field.init:
            continue  # it is computed, so there is no option for it
        text = on_page[f"--{name}"]
        if field.default is None or field.default is False:
            assert not text.startswith(" (")
        else:
            assert f"(`{field.default}`)" in text

    # Where our default isn't TRL's, the page gives both.
    assert on_page["--max_length"].startswith(" (`None`, in TRL `1024`)")
    assert on_page["--use_cpu"].startswith(" (`False`)")


def test_the_pages_are_built_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MkDocs also warns of links to missing files and anchors."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    with caplog.at_level("WARNING", logger="mkdocs"):
        build(config)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")]
    assert warnings == []
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "examples" / "digits" / "norms.png").exists()


@pytest.mark.parametrize("command", command_lines())
def test_commands_take_the_options_of_pages(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In an empty folder no parser refuses a command because its output exists already.
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([\w./()$-]+):", makefile(), re.MULTILINE)
        assert words[1] in targets
        return

    started = module_of(words)
    if started is None or started[0] in ("lmms_eval", "pytest"):
        return  # another project's command
    module, arguments = started
    assert (ROOT / module.split(".")[0]).is_dir()
    parser = reference.build_parser(module)
    if "--config" in arguments:
        position = arguments.index("--config")
        assert (ROOT / arguments[position + 1]).exists()
        if module in ("training.sft", "training.plan"):  # their parsers don't have this option, which is read before
            del arguments[position : position + 2]
    _, unknown = parser.parse_known_args(arguments)
    assert unknown == []


def test_the_recipe_of_the_readme_is_whole(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("yaml") if block.page == "README.md"]
    (tmp_path / "recipe.yaml").write_text(block.text, encoding="utf-8")
    # An error is raised here if the recipe lacks a required field.
    run_args, _ = parse_arguments(["--config", str(tmp_path / "recipe.yaml")])
    assert run_args.stage == "instruct"


def makefile() -> str:
    """The text of the Makefile, with the values of its variables filled in."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, value in re.findall(r"^(\w+) \?= (.*)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", value)
    return text


@pytest.fixture(scope="module")
def workplace() -> Path:
    """The repository, with the quickstart done and without the folder that the pages' commands write."""
    subprocess.run([sys.executable, "-m", "examples.digits.quickstart"], cwd=ROOT, check=True, capture_output=True)
    shutil.rmtree(ROOT / "runs" / "docs", ignore_errors=True)
    return ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [block for block in SHELL if block.is_run], ids=str)
def test_a_block_of_commands_runs(
    block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if ".venv-evaluation" in block.text:  # the fixture makes this environment
        request.getfixturevalue("harness_python")
    lines = [line for line in block.text.splitlines() if not line.startswith(LINES_NOT_RUN)]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)], cwd=workplace, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in blocks("python") if block.is_run], ids=str)
def test_a_block_of_python_runs(block: Block, workplace: Path) -> None:
    run = subprocess.run([sys.executable, "-c", block.text], cwd=workplace, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
