"""Telling people which row is bad and why, and what the good ones hold."""

import json
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Image
from transformers import AutoProcessor

from conversations.checks import control_tokens
from conversations.loading import load_rows
from conversations.measured import _picture_references
from conversations.rows import BadRowError
from conversations.tokens import RowTokenizer
from row_files import GOOD_ROWS, NO_TOKENS, check_rows, check_stream, one_token, turns, write_json
from training.collator import VisionLanguageCollator


BAD_ROWS = {
    "image file .* is missing": {"image": "gone.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    "1 <image> marks but 0 images": {"conversations": turns("<image>\nWhat?", "A dog.")},
    "0 <image> marks but 1 images": {"image": "a.png", "conversations": turns("What?", "A dog.")},
    "no assistant turn": {"image": "a.png", "conversations": turns("<image>\nWhat?")},
    "empty or not a list": {"image": "a.png", "conversations": []},
    "empty or not a list of": {"image": "a.png"},
    "turn 0 is not": {"conversations": [{"from": "robot", "value": "Hi."}]},
    "an assistant turn contains <image>": {"image": "a.png", "conversations": turns("What?", "<image>")},
    r"turn 1 contains <\|image_pad\|>": {"conversations": turns("What?", "I say <|image_pad|>.")},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_place(tmp_path: Path, message: str) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[0], BAD_ROWS[message]])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}.*1 of 2 rows"):
        check_rows(rows, frozenset({"<|image_pad|>"}), one_token, "error", tmp_path / "bad.jsonl")


def test_bad_rows_are_left_out_and_listed(tmp_path: Path) -> None:
    path = write_json(
        tmp_path,
        [*BAD_ROWS.values(), *GOOD_ROWS, {"image": "torn.png", "conversations": turns("<image>\nWhat?", "A dog.")}],
    )
    whole = (tmp_path / "pictures" / "a.png").read_bytes()
    (tmp_path / "pictures" / "torn.png").write_bytes(whole[: len(whole) // 2])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    kept, _ = check_rows(rows, frozenset({"<|image_pad|>"}), one_token, "skip", tmp_path / "out" / "bad.jsonl")
    assert [row["source"][-1] for row in kept] == ["9", "0", "1"]
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()]
    assert len(listed) == len(BAD_ROWS) + 1
    assert listed[0]["source"] == f"{path}, row 0"
    assert "can't be read" in listed[-1]["problem"]


HOSTILE = {
    "turn 0 is not": {"conversations": [{"from": "human", "value": 7}]},
    "turn 0 is not .*: 'Hi'": {"conversations": ["Hi"]},
    "empty or not a list of turns": {"conversations": {"from": "human"}},
    "no assistant turn": {"conversations": turns("What?", "  \n ")},
    "image file .* is missing": {"image": {"path": "a.png"}, "conversations": turns("<image>", "A dog.")},
    "more than max_length 900": {"conversations": turns("What?", "very " * 10_000)},
}


@pytest.mark.parametrize("message", HOSTILE)
def test_rows_of_the_wrong_type_or_size(tmp_path: Path, message: str, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokens = control_tokens(processor.tokenizer, processor.image_token)
    tokenize = RowTokenizer(processor, processor.chat_template, max_length=900)
    rows = load_rows(str(write_json(tmp_path, [GOOD_ROWS[1], HOSTILE[message]])), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}"):
        check_rows(rows, tokens, tokenize, "error", tmp_path / "bad.jsonl")
    kept, _ = check_rows(rows, tokens, tokenize, "skip", tmp_path / "bad.jsonl")
    assert len(kept) == 1
    assert (tmp_path / "bad.jsonl").exists()


def test_the_length_column_and_the_fingerprint(tmp_path: Path, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokens = control_tokens(processor.tokenizer, processor.image_token)
    tokenize = RowTokenizer(processor, processor.chat_template)
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)), str(tmp_path / "pictures"))
    checked, fingerprint = check_rows(rows, tokens, tokenize, "error", tmp_path / "bad.jsonl")
    batch = VisionLanguageCollator(tokenize)(list(checked))
    assert checked["length"][:] == batch["attention_mask"].sum(1).tolist()
    same = check_rows(
        rows,
        control_tokens(processor.tokenizer, processor.image_token),
        tokenize,
        "error",
        tmp_path / "bad.jsonl",
        num_proc=2,
    )[1]
    assert same == fingerprint
    other = [{**GOOD_ROWS[0], "conversations": turns("<image>\nWhat?", "A cat.")}, *GOOD_ROWS[1:]]
    rows = load_rows(str(write_json(tmp_path, other)), str(tmp_path / "pictures"))
    assert check_rows(rows, tokens, tokenize, "error", tmp_path / "bad.jsonl")[1] != fingerprint


def test_checking_does_not_read_the_bytes_of_pictures(tmp_path: Path) -> None:
    column = pa.chunked_array([[[{"bytes": b"x" * 10, "path": "a"}], [], None, [{"bytes": b"y", "path": None}] * 2]])
    references = _picture_references(column, with_bytes=False)
    encoded, nameless = ({"bytes": None, "path": "a", "size": 10}, {"bytes": None, "path": None, "size": 1})
    assert references == [[encoded], [], [], [nameless] * 2]
    single = pa.chunked_array([[{"bytes": b"x", "path": "a"}, None]])
    assert _picture_references(single, with_bytes=False) == [{"bytes": None, "path": "a", "size": 1}, None]


def test_conversations_of_plain_text_are_bad_rows(tmp_path: Path) -> None:
    Dataset.from_dict({"images": [[]], "conversations": ["Hello."]}).save_to_disk(tmp_path / "stored")
    rows = load_rows(str(tmp_path / "stored"))
    with pytest.raises(BadRowError, match="row 0: `conversations` is text that is not JSON"):
        check_rows(rows, NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl")


def test_a_stream_lists_its_bad_rows_as_they_come(tmp_path: Path) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[1], BAD_ROWS["no assistant turn"], GOOD_ROWS[0]])
    stream = load_rows(str(path), str(tmp_path / "pictures"), streaming=True)
    kept = list(check_stream(stream, NO_TOKENS, one_token, "skip", tmp_path / "out" / "bad.jsonl"))
    assert [row["source"][-1] for row in kept] == ["0", "2"]
    assert [row["length"] for row in kept] == [1, 1]
    assert "no assistant turn" in (tmp_path / "out" / "bad.jsonl").read_text()
    with pytest.raises(BadRowError, match=r"data.json, row 1: no assistant turn"):
        list(check_stream(stream, NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl"))


def fingerprint(path: Path, image_folder: Path | None = None) -> str:
    rows = load_rows(str(path), str(image_folder) if image_folder else None)
    return check_rows(rows, NO_TOKENS, one_token, "error", path.parent / "bad.jsonl")[1]


def test_the_fingerprint_is_of_the_pictures_too(tmp_path: Path) -> None:
    pictures = tmp_path / "here" / "pictures"
    pictures.parent.mkdir()
    path = write_json(pictures.parent, GOOD_ROWS)
    before = fingerprint(path, pictures)
    whole = (pictures / "a.png").read_bytes()
    (pictures / "a.png").write_bytes(whole + b" ")
    assert fingerprint(path, pictures) != before
    (pictures / "a.png").write_bytes(whole)
    (pictures / "b.png").write_bytes(whole)
    of_twins = fingerprint(path, pictures)
    other = [{**GOOD_ROWS[0], "image": "b.png"}, *GOOD_ROWS[1:]]
    assert fingerprint(write_json(tmp_path, other), pictures) != of_twins

    (tmp_path / "here").rename(tmp_path / "there")
    assert fingerprint(tmp_path / "there" / "data.json", tmp_path / "there" / "pictures") == of_twins


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_the_fingerprint_is_of_encoded_pictures_too(tmp_path: Path, bad_rows: Literal["error", "skip"]) -> None:
    write_json(tmp_path, [])
    picture = (tmp_path / "pictures" / "a.png").read_bytes()
    prints = []
    for number, (encoded, name) in enumerate(((picture, "a"), (picture, "a"), (picture + b" ", "a"), (picture, "b"))):
        row = {"image": [{"bytes": encoded, "path": name}], "conversations": [turns("<image>", "A dog.")]}
        Dataset.from_dict(row).cast_column("image", Image()).save_to_disk(tmp_path / str(number))
        rows = load_rows(str(tmp_path / str(number)))
        prints.append(check_rows(rows, NO_TOKENS, one_token, bad_rows, tmp_path / "bad.jsonl")[1])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("text", ["qwen2", "llama", "gemma3", "vicuna"])
def test_text_that_would_become_a_control_token_is_a_bad_row(
    tmp_path: Path, text: str, composed: Callable[..., Path]
) -> None:
    processor = AutoProcessor.from_pretrained(composed(text=text))
    tokenizer = processor.tokenizer
    tokens = control_tokens(tokenizer, processor.image_token)
    special = set(tokenizer.all_special_ids) | {processor.image_token_id}
    assert {tokenizer.convert_tokens_to_ids(token) for token in tokens} >= special - {
        tokenizer.convert_tokens_to_ids("<image>")
    }
    tokenize = RowTokenizer(processor, processor.chat_template)
    for token in tokens:
        for number, row in enumerate((turns(f"Say {token}.", "No."), turns("Say it.", f"It is{token}"))):
            rows = load_rows(str(write_json(tmp_path, [{"conversations": row}, GOOD_ROWS[1]])))
            said = rf"row 0: turn {number} contains {re.escape(token)}, which this model's tokenizer reads as a"
            with pytest.raises(BadRowError, match=said):
                check_rows(rows, tokens, tokenize, "error", tmp_path / "bad.jsonl")
            assert len(check_rows(rows, tokens, tokenize, "skip", tmp_path / "bad.jsonl")[0]) == 1
    harmless = "if a < b: print('<b>|end|</b>', im_end, '</ s>', '<|im_end>', '< image_pad>')"
    rows = load_rows(str(write_json(tmp_path, [{"conversations": turns(harmless, harmless)}])))
    (row,) = check_rows(rows, tokens, tokenize, "error", tmp_path / "bad.jsonl")[0]
    _, labels = tokenize(row)
    assert not special - {tokenizer.eos_token_id} & set(labels)


LONG = "x" * 5000
HOSTILE_ROWS: dict[str, dict[str, Any]] = {
    r"turn 0 is not .*'from': \['human'\]": {"conversations": [{"from": ["human"], "value": "Hi."}]},
    r"turn 0 is not .*'from': \{\}": {"conversations": [{"from": {}, "value": "Hi."}]},
    "turn 0 is not .*'from': None": {"conversations": [{"from": None, "value": "Hi."}]},
    "turn 1 is not .*'value': None": {"conversations": [*turns("Hi."), {"from": "gpt", "value": None}]},
    "turn 0 is not .*: nan": {"conversations": [{"from": "human", "value": float("nan")}]},
    r"turn 0 is not .*: \[\]": {"conversations": [[]]},
    r"turn 0 is not .{1,2000}1 of 2 rows": {"conversations": [{"from": "human", "value": [LONG] * 50, LONG: 1}]},
    "empty or not a list of turns": {"conversations": 7},
    "empty or not a list of turns.": {"conversations": "null"},
    r"turn 1 contains '\\ud800', which is an unpaired surrogate": {"conversations": turns("Hi.", "A \ud800 dog.")},
    r"turn 0 contains '\\udc80'": {"conversations": turns("\udc80", "A dog.")},
    r"image file .*xxx\.\.\.xxx.* can't be read \(File name too long\)": {"image": LONG},
    r'image file .*/"\\+ud800.png" \(not a path\) is missing': {"image": "\ud800.png"},
    r'image file .*"" \(not a path\) is missing': {"image": ""},
    r"image file .*a\.png\\x00.* can't be read \(null byte in its name\)": {"image": "a.png\0.jpg"},
    r"image file .*folder\\x00/a\.png.* can't be read \(null byte in its name\)": {"image": "folder\0/a.png"},
    r"image file .*/7 \(not a path\) is missing": {"image": 7},
    r"image file .*/true \(not a path\)": {"image": True},
    r"image file .*/NaN \(not a path\)": {"image": float("nan")},
    r'image file .*\{"path": "a.png"\} \(not a path\) is missing': {"image": {"path": "a.png"}},
    r'image file .*\["a.png"\] \(not a path\) is missing': {"image": [["a.png"]]},
    r"image file .*/null \(not a path\) is missing": {"images": [None]},
    "image file .*pictures is not a regular file": {"image": "."},
    "image file .*a.png/b.png is missing": {"image": "a.png/b.png"},
    "image file .*loop.png can't be read .Too many levels of symbolic links": {"image": "loop.png"},
    "image https://example.com/a.png is a web address; download it": {"image": "https://example.com/a.png"},
    "image file .*pipe is not a regular file": {"image": "pipe"},
}


@pytest.mark.parametrize("message", HOSTILE_ROWS)
def test_rows_that_are_made_to_break_things_are_bad_rows(tmp_path: Path, message: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "7").write_bytes(b"")
    (tmp_path / "pictures" / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pictures" / "pipe")
    row = {"conversations": turns("<image>", "A dog."), **HOSTILE_ROWS[message]}
    rows = load_rows(str(write_json(tmp_path, [GOOD_ROWS[1], row])), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}"):
        check_rows(rows, NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl")
    assert len(check_rows(rows, NO_TOKENS, one_token, "skip", tmp_path / "bad.jsonl")[0]) == 1
    stream = check_stream(rows, NO_TOKENS, one_token, "skip", tmp_path / "out" / "bad.jsonl")
    assert len(list(stream)) == 1
    assert (tmp_path / "out" / "bad.jsonl").read_text() == (tmp_path / "bad.jsonl").read_text()


def test_a_picture_without_bytes_or_path_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "stored").mkdir()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": None}], struct)
    table = pa.table({"image": images, "conversations": [turns("<image>", "A dog.")]})
    pq.write_table(table, tmp_path / "stored" / "train.parquet")
    with pytest.raises(BadRowError, match="row 0: an image has neither bytes nor a path"):
        check_rows(load_rows(str(tmp_path / "stored")), NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl")


def test_that_no_row_is_left_is_said(tmp_path: Path) -> None:
    bad = [BAD_ROWS["no assistant turn"], BAD_ROWS["turn 0 is not"]]
    rows = load_rows(str(write_json(tmp_path, bad)), str(tmp_path / "pictures"))
    for bad_rows in ("error", "skip"):
        said = "row 0: no assistant turn.* 2 of 2 rows are bad; fix the data, no row is left to train on"
        with pytest.raises(BadRowError, match=said) as error:
            check_rows(rows, NO_TOKENS, one_token, bad_rows, tmp_path / "bad.jsonl")
        assert "--bad_rows skip" not in str(error.value)
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 2


def test_a_stream_of_bad_rows_ends(tmp_path: Path) -> None:
    bad = [BAD_ROWS["no assistant turn"], BAD_ROWS["turn 0 is not"]]
    stream = load_rows(str(write_json(tmp_path, bad)), str(tmp_path / "pictures"), streaming=True)
    said = "row 0: no assistant turn.* All 2 rows are bad that one process or worker reads of the stream; fix them"
    with pytest.raises(BadRowError, match=said):
        list(check_stream(stream, NO_TOKENS, one_token, "skip", tmp_path / "bad.jsonl", epochs=2))
    stream = load_rows(str(write_json(tmp_path, [*bad, GOOD_ROWS[1]])), streaming=True)
    assert len(list(check_stream(stream, NO_TOKENS, one_token, "skip", tmp_path / "bad.jsonl", epochs=3))) == 3


def test_a_stream_lists_each_bad_row_once(tmp_path: Path) -> None:
    """Whichever of several readers, in this process or another, and in whichever epoch."""
    path = write_json(tmp_path, [*BAD_ROWS.values(), GOOD_ROWS[1]] * 20)
    stream = load_rows(str(path), str(tmp_path / "pictures"), streaming=True)
    tokens = frozenset({"<|image_pad|>"})
    report = tmp_path / "out" / "bad.jsonl"
    report.parent.mkdir()
    known = {"source": f"{path}, row 1", "problem": "found before the run was killed"}
    report.write_text(json.dumps(known) + '\n{"source": "torn by the ki')

    def read() -> None:
        assert len(list(check_stream(stream, tokens, one_token, "skip", report, epochs=2))) == 40

    readers = [multiprocessing.get_context("fork").Process(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    read()
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    listed = [json.loads(line) for line in report.read_text().splitlines()]
    bad = [number for number in range(200) if number % 10 != 9]
    assert sorted(row["source"] for row in listed) == sorted(f"{path}, row {number}" for number in bad)
    assert {"source": f"{path}, row 4", "problem": "`conversations` is empty or not a list of turns"} in listed
    assert known in listed
