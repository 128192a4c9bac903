"""How commands end: with one line if the user can mend what is wrong, with a traceback if it is a bug of ours."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.console import command, parse
from common.files import folder_or_id
from common.records import read_record
from conversations.loading import load_rows


def lose_connection() -> None:
    raise ConnectionError


def test_what_the_user_can_mend_is_told_in_one_line(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve = parser.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("--port")

    for mistake, message in (
        (lambda: load_rows(str(tmp_path / "none.json")), "none.json: there is no such file"),
        (lambda: (tmp_path / "recipe.yaml").read_text(), r"recipe.yaml: No such file or directory$"),
        (lambda: read_record(dict[str, int], tmp_path), "can't be read"),
        (lambda: parse(parser, ["serve", "--prot=1"]), r"--prot is unknown, did you mean --port\?$"),
        (lambda: parse(parser, ["serve", "picture"]), r"picture is unknown\.$"),
        (lose_connection, "ConnectionError$"),
    ):
        with pytest.raises(SystemExit, match=rf"^error: .*{message}"), command():
            mistake()


def unpack(row: list[int]) -> int:
    first, _ = row
    return first


BUGS = [
    (lambda: list(zip([1], [2, 3], strict=True)), ValueError, r"zip\(\) argument 2 is longer"),
    (lambda: unpack([1, 2, 3]), ValueError, "too many values to unpack"),
    (lambda: int("x"), ValueError, "invalid literal for int"),
    (lambda: 1 // len([]), ZeroDivisionError, "by zero"),
]


@pytest.mark.parametrize(("bug", "error", "message"), BUGS, ids=["zip", "unpacking", "int", "division"])
def test_a_line_of_ours_that_fails_keeps_its_traceback(
    bug: Callable[[], object], error: type[Exception], message: str
) -> None:
    """The line that fails is in this repository, not in a library."""
    with pytest.raises(error, match=message), command():
        bug()


def test_an_error_of_a_library_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="Expecting property name"), command():
        json.loads("{")
    with pytest.raises(KeyError), command():
        sys.modules["none"]


def test_hub_ids_and_folders_that_exist_are_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "google/siglip-so400m-patch14-384", str(tmp_path)):
        assert folder_or_id(name) == name


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()  # so runs/none is a folder's name; checkpoints/none/stage1 is too long for a Hub id
    for name in ("runs/none", "runs/none/stage1", "checkpoints/none/stage1"):
        with pytest.raises(ValueError, match=f"{name}: there is no such folder"):
            folder_or_id(name)
