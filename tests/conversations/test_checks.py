"""Telling people which row is bad and why, and what the good ones hold."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset
from transformers import AutoProcessor

from conversations.checks import _picture_references, check_stream
from conversations.rows import BadRowError, load_rows
from row_files import GOOD_ROWS, check_rows, one_token, turns, write_json
from training.collator import VisionLanguageCollator
from training.tokenization import RowTokenizer


BAD_ROWS = {
    "image file .* is missing": {"image": "gone.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    "1 <image> marks but 0 images": {"conversations": turns("<image>\nWhat?", "A dog.")},
    "0 <image> marks but 1 images": {"image": "a.png", "conversations": turns("What?", "A dog.")},
    "no assistant turn": {"image": "a.png", "conversations": turns("<image>\nWhat?")},
    "empty or not a list": {"image": "a.png", "conversations": []},
    "empty or not a list of": {"image": "a.png"},
    "turn 0 is not": {"conversations": [{"from": "robot", "value": "Hi."}]},
    "an assistant turn holds <image>": {"image": "a.png", "conversations": turns("What?", "<image>")},
    r"turn 1 holds <\|image_pad\|>": {"conversations": turns("What?", "I say <|image_pad|>.")},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_place(tmp_path: Path, message: str) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[0], BAD_ROWS[message]])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}.*1 of 2 rows"):
        check_rows(rows, "<|image_pad|>", one_token, "error", tmp_path / "bad.jsonl")


def test_bad_rows_are_left_out_and_listed(tmp_path: Path) -> None:
    path = write_json(
        tmp_path,
        [*BAD_ROWS.values(), *GOOD_ROWS, {"image": "torn.png", "conversations": turns("<image>\nWhat?", "A dog.")}],
    )
    whole = (tmp_path / "pictures" / "a.png").read_bytes()
    (tmp_path / "pictures" / "torn.png").write_bytes(whole[: len(whole) // 2])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    kept, _ = check_rows(rows, "<|image_pad|>", one_token, "skip", tmp_path / "out" / "bad.jsonl")
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
    tokenize = RowTokenizer(processor, processor.chat_template, max_length=900)
    rows = load_rows(str(write_json(tmp_path, [GOOD_ROWS[1], HOSTILE[message]])), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}"):
        check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")
    kept, _ = check_rows(rows, processor.image_token, tokenize, "skip", tmp_path / "bad.jsonl")
    assert len(kept) == 1
    assert (tmp_path / "bad.jsonl").exists()


def test_the_length_column_and_the_fingerprint(tmp_path: Path, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)), str(tmp_path / "pictures"))
    checked, fingerprint = check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")
    batch = VisionLanguageCollator(tokenize)(list(checked))
    assert checked["length"][:] == batch["attention_mask"].sum(1).tolist()
    same = check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl", num_proc=2)[1]
    assert same == fingerprint
    other = [{**GOOD_ROWS[0], "conversations": turns("<image>\nWhat?", "A cat.")}, *GOOD_ROWS[1:]]
    rows = load_rows(str(write_json(tmp_path, other)), str(tmp_path / "pictures"))
    assert check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")[1] != fingerprint


def test_checking_does_not_read_the_bytes_of_pictures(tmp_path: Path) -> None:
    column = pa.chunked_array([[[{"bytes": b"x" * 10, "path": "a"}], [], None, [{"bytes": b"y", "path": None}] * 2]])
    references = _picture_references(column, with_bytes=False)
    assert references == [[{"bytes": None, "path": "a"}], [], [], [{"bytes": None, "path": None}] * 2]
    single = pa.chunked_array([[{"bytes": b"x", "path": "a"}, None]])
    assert _picture_references(single, with_bytes=False) == [{"bytes": None, "path": "a"}, None]


def test_conversations_of_plain_text_are_bad_rows(tmp_path: Path) -> None:
    Dataset.from_dict({"images": [[]], "conversations": ["Hello."]}).save_to_disk(tmp_path / "stored")
    rows = load_rows(str(tmp_path / "stored"))
    with pytest.raises(BadRowError, match="row 0: `conversations` is text that is not JSON"):
        check_rows(rows, "<image>", one_token, "error", tmp_path / "bad.jsonl")


def test_a_stream_lists_its_bad_rows_as_they_come(tmp_path: Path) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[1], BAD_ROWS["no assistant turn"], GOOD_ROWS[0]])
    stream = load_rows(str(path), str(tmp_path / "pictures"), streaming=True)
    kept = list(check_stream(stream, "<image>", one_token, "skip", tmp_path / "out" / "bad.jsonl"))
    assert [row["source"][-1] for row in kept] == ["0", "2"]
    assert [row["length"] for row in kept] == [1, 1]
    assert "no assistant turn" in (tmp_path / "out" / "bad.jsonl").read_text()
    with pytest.raises(BadRowError, match=r"data.json, row 1: no assistant turn"):
        list(check_stream(stream, "<image>", one_token, "error", tmp_path / "bad.jsonl"))
