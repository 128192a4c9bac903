"""A command ends with one line if the user can mend what is wrong, and with a traceback if there is a bug of ours."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from normllava.command_line import command, parse

import pytest

from normllava.conversations.loading import load_rows
from normllava.errors import UserError
from normllava.evaluation.json_records import read_record
from normllava.files import folder_or_id


def expect_one_line(message: str, mistake: Callable[[], object]) -> None:
    """Make a mistake in a command, and expect one line that begins with "error: " and ends with `message`, a regex."""
    with pytest.raises(SystemExit, match=rf"^error: .*{message}$"), command():
        mistake()


def test_a_missing_file_is_told_in_one_line(tmp_path: Path) -> None:
    expect_one_line(r"none.json: there is no such file\.", lambda: load_rows(str(tmp_path / "none.json")))
    expect_one_line("recipe.yaml: No such file or directory", lambda: (tmp_path / "recipe.yaml").read_text())


def test_a_record_that_is_a_folder_is_told_in_one_line(tmp_path: Path) -> None:
    expect_one_line(r"can't be read \(.*Is a directory.*\)\.", lambda: read_record(dict[str, int], tmp_path))


def test_an_unknown_option_is_told_in_one_line() -> None:
    parser = argparse.ArgumentParser()
    serve = parser.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("--port")
    expect_one_line(r"--prot is unknown, did you mean --port\?", lambda: parse(parser, ["serve", "--prot=1"]))
    expect_one_line(r"picture is unknown\.", lambda: parse(parser, ["serve", "picture"]))


def test_a_library_error_without_a_text_is_told_by_its_type() -> None:
    def lose_connection() -> None:
        raise ConnectionError

    expect_one_line("ConnectionError", lose_connection)


def unpack_pair(pair: list[int]) -> int:
    first, _ = pair
    return first


# Bugs. For each: a function that has the bug, the type of its error, and a regex for the error's message.
BUGS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "zip": (lambda: list(zip([1], [2, 3], strict=True)), ValueError, r"zip\(\) argument 2 is longer"),
    "unpacking": (lambda: unpack_pair([1, 2, 3]), ValueError, "too many values to unpack"),
    "int": (lambda: int("x"), ValueError, "invalid literal for int"),
    "division": (lambda: 1 // len([]), ZeroDivisionError, "by zero"),
}


@pytest.mark.parametrize(("bug", "error", "message"), BUGS.values(), ids=BUGS)
def test_a_bug_keeps_its_traceback(bug: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), command():
        bug()


def test_an_error_of_a_library_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="Expecting property name"), command():
        json.loads("{")
    with pytest.raises(KeyError), command():
        os.environ["NO_SUCH_VARIABLE"]


def test_a_hub_id_or_an_existing_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "google/siglip-so400m-patch14-384", str(tmp_path)):
        assert folder_or_id(name) == name


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    in_an_existing_folder = "runs/none"
    too_long_for_a_hub_id = "checkpoints/none/stage1"
    both = "runs/none/stage1"
    no_name_on_the_hub = "./none"
    for name in (in_an_existing_folder, too_long_for_a_hub_id, both, no_name_on_the_hub):
        with pytest.raises(UserError, match=f"{name}: there is no such folder"):
            folder_or_id(name)


# Imports a module, and prints whether bitsandbytes' warning is silenced when Python first looks for bitsandbytes.
IMPORTING_PROGRAM = """
import importlib
import logging
import sys

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name == "bitsandbytes":
            sys.meta_path.remove(self)
            print(logging.getLogger("bitsandbytes.backends.cpu.ops").level >= logging.ERROR)

sys.meta_path.insert(0, Watcher())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["training.sft", "training.merge", "training.plan", "examples.digits.pretrain", "benchmarks.real"]
)
def test_commands_silence_bitsandbytes_before_they_import_it(module: str) -> None:
    program = [sys.executable, "-c", IMPORTING_PROGRAM, module]
    completed = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert completed.stdout == "True\n"


def test_all_of_a_librarys_message_is_told() -> None:
    """transformers' first line about a gated model doesn't say which model it is."""

    def ask_for_gated_model() -> None:
        raise OSError("You are trying to access a gated repo.\nAsk for access at https://huggingface.co/google/gemma.")

    expect_one_line(r"gated repo\. Ask for access at https://huggingface.co/google/gemma\.", ask_for_gated_model)
