"""README and docs: what they name is there, their commands take the options that they give, and run."""

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
# Why a block is not run here: its first line says so to the reader.
NOT_HERE = ("# needs the Hub", "# needs a GPU", "# takes an hour", "# after make emoji", "# two terminals")
# Lines that are not run as part of a block: by CI, or because they would change this environment.
ELSEWHERE = ("make test", "make install", "make quality", "make docs", ".venv/bin/pre-commit install")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    number: int
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether it can run on a CPU without the Hub."""
        return not self.text.startswith(NOT_HERE)

    @property
    def commands(self) -> list[list[str]]:
        """Its command lines, each as a list of words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = []
        for line in lines:
            words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if words:
                commands.append(words)
        return commands

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks of code in these languages; the Python of `CONTRIBUTING.md` has tests of its own."""
    for page in PAGES:
        for number, (language, code) in enumerate(fences(page.read_text(encoding="utf-8")), 1):
            if language in languages and (language, page.name) != ("python", "CONTRIBUTING.md"):
                yield Block(page.name, number, language, code)


SHELL = list(blocks("bash"))


def module_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of ours that a command line starts, and its arguments."""
    if words[:2] == ["accelerate", "launch"]:
        return "training.sft", words[words.index("training/sft.py") + 1 :]
    if not words[0].endswith("python"):
        return None
    if words[1] != "-m":
        return words[1].removesuffix(".py").replace("/", "."), words[2:]
    package = words[2]
    is_package = (ROOT / package.replace(".", "/") / "__main__.py").exists()
    return (f"{package}.__main__" if is_package else package), words[3:]


COMMANDS = sorted({shlex.join(words) for block in SHELL for words in block.commands})


def test_the_reference_is_that_of_the_code() -> None:
    """If this fails: python docs/reference.py"""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.render()


def options_on_page(heading: str) -> dict[str, str]:
    """What the page of options says of each option of a command, by the option."""
    section = reference.PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^- `(--\w+)`(.*)$", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "module"), [("compose", "training.compose"), ("diagnostics", "diagnostics.__main__")]
)
def test_the_reference_has_what_help_prints(heading: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    printed = reference.build_parser(module).format_help()
    printed = re.sub(r"\n {10,}", "  ", printed)  # the help of an option with a long name stands below it
    options = re.findall(r"^  (--\w+)(.*)$", printed, re.MULTILINE)
    on_page = options_on_page(heading)
    assert [name for name, _ in options] == list(on_page)

    for name, text in options:
        default = re.search(r"\(default: (.*)\)$", text)
        if default is not None and default[1] not in ("None", "False"):
            value = default[1]
            assert f"(`{value}`)" in on_page[name] or f"(default: {value})" in on_page[name], name


def test_the_reference_has_every_field_of_a_recipe_with_its_default() -> None:
    on_page = options_on_page("sft")
    for name in RunArguments.__annotations__:
        (field,) = [field for field in dataclasses.fields(RunArguments) if field.name == name]
        if not field.init:
            continue  # no option
        said = on_page[f"--{name}"]
        if field.default is not None and field.default is not False:
            assert f"(`{field.default}`)" in said
        else:
            assert not said.startswith(" (")
    # TRL's own default stands beside ours where they differ.
    assert on_page["--max_length"].startswith(" (`None`, in TRL `1024`)")
    assert on_page["--use_cpu"].startswith(" (`False`)")


def test_the_pages_are_built_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MkDocs also warns of a link or an anchor that leads nowhere."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    with caplog.at_level("WARNING", logger="mkdocs"):
        build(config)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")] == []
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "examples" / "digits" / "norms.png").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_the_options_of_pages(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without the folders that a page's command writes, which a parser may refuse
    words = shlex.split(command)
    if words[0] == "make":
        assert words[1] in re.findall(r"^([\w./()$-]+):", makefile(), re.MULTILINE)
        return
    started = module_of(words)
    if started is None or started[0] in ("lmms_eval", "pytest"):
        return  # another project's command
    module, arguments = started
    assert (ROOT / module.split(".")[0]).is_dir()
    parser = reference.build_parser(module)
    if "--config" in arguments:
        at = arguments.index("--config")
        assert (ROOT / arguments[at + 1]).exists()
        if module in ("training.sft", "training.plan"):  # whose parser reads the recipe's fields elsewhere
            del arguments[at : at + 2]
    _, unknown = parser.parse_known_args(arguments)
    assert unknown == []


def test_the_recipe_of_the_readme_is_whole(tmp_path: Path) -> None:
    (recipe,) = (block.text for block in blocks("yaml") if block.page == "README.md")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    run_args, _ = parse_arguments(["--config", str(tmp_path / "recipe.yaml")])  # it refuses what lacks
    assert run_args.stage == "instruct"


def makefile() -> str:
    """The Makefile, with the names of its environments filled in."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, value in re.findall(r"^(\w+) \?= (.*)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", value)
    return text


@pytest.fixture(scope="module")
def workplace() -> Path:
    """The repository, with the quickstart done and what earlier tests of this module left cleared away."""
    subprocess.run([sys.executable, "-m", "examples.digits.quickstart"], cwd=ROOT, check=True, capture_output=True)
    shutil.rmtree(ROOT / "runs" / "docs", ignore_errors=True)
    return ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [block for block in SHELL if block.is_run], ids=str)
def test_a_block_of_commands_runs(
    block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if ".venv-evaluation" in block.text:
        request.getfixturevalue("harness_python")
    lines = [line for line in block.text.splitlines() if not line.startswith(ELSEWHERE)]
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
