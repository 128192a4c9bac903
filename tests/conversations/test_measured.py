"""Every row is checked and tokenized once: what is found, what is kept of it, and what is looked at anew."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, Image

from conversations import measured
from conversations.loading import load_rows
from conversations.measured import FEATURES, RowCheck, row_lengths, tokenize_rows
from conversations.rows import BadRowError, Row
from conversations.tokens import IGNORED, RowTokenizer
from row_files import GOOD_ROWS, check_rows, tokenizer_of, turns, write_json


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenize(composed: Callable[..., Path]) -> RowTokenizer:
    return tokenizer_of(composed(), max_length=200)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numbers of the rows that are tokenized, and with a "p" those whose pictures are opened."""
    numbers: list[str] = []
    tokenize_row = RowTokenizer.__call__
    open_images = measured.open_images

    def tokenized(tokenize: RowTokenizer, row: Row) -> Row:
        numbers.append(row["source"].rpartition(" ")[2])
        return tokenize_row(tokenize, row)

    def opened(row: Row) -> Any:
        numbers.append("p" + row["source"].rpartition(" ")[2])
        return open_images(row)

    monkeypatch.setattr(RowTokenizer, "__call__", tokenized)
    monkeypatch.setattr(measured, "open_images", opened)
    return numbers


def write(folder: Path, *answers: str) -> Path:
    """A row for each answer, with a picture of its own."""
    rows = []
    for number, answer in enumerate(answers):
        rows.append({"image": f"{number}.png", "conversations": turns("<image>\nWhat?", answer)})
    path = write_json(folder, rows)

    for number in range(len(answers)):
        shutil.copy(folder / "pictures" / "a.png", folder / "pictures" / f"{number}.png")
    return path


def read(path: Path) -> Any:
    return load_rows(str(path), str(path.parent / "pictures"))


def look(path: Path, check: RowCheck) -> Dataset:
    return tokenize_rows(read(path), check)


def problems(tokens: Dataset) -> dict[int, str]:
    """The bad rows' problems by number."""
    return {number: problem for number, problem in enumerate(tokens["problem"]) if problem}


def test_good_rows_get_their_tokens_and_bad_ones_are_listed(tmp_path: Path, tokenize: RowTokenizer) -> None:
    answers = [f"answer {number}" for number in range(10)]
    answers[3] = "   "
    answers[6] = "half a \ud800 pair"
    answers[7] = "long " * 100
    path = write(tmp_path, *answers)
    broken = tmp_path / "pictures" / "5.png"
    broken.write_bytes(broken.read_bytes()[:40])

    report = tmp_path / "out" / "bad.jsonl"
    good, fingerprint = check_rows(read(path), RowCheck(tokenize), report, "skip")
    assert [row["source"][-1] for row in good] == list("012489")
    for row in good:
        assert row["input_ids"].count(tokenize.processor.image_token_id) == row["num_images"] == 1
        assert row["length"] == len(tokenize.expand_pictures(row["input_ids"]))
        assert len(row["labels"]) == len(row["input_ids"])
        assert json.loads(row["conversations"])[1]["value"].startswith("answer")
    assert row_lengths(good).tolist() == [row["length"] for row in good]

    lines = [json.loads(line) for line in report.read_text().splitlines()]
    listed = {line["source"][-1]: line["problem"] for line in lines}
    assert list(listed) == ["3", "5", "6", "7"]
    assert "no assistant turn" in listed["3"]
    assert "5.png can't be read" in listed["5"]  # before training, not in the middle of an epoch
    assert "more than max_length 200" in listed["7"]

    with pytest.raises(BadRowError, match=r"row 3: no assistant turn.* 4 of 10 rows are bad; fix the data, or leave"):
        check_rows(read(path), RowCheck(tokenize), report)
    _, in_two_processes = check_rows(read(path), RowCheck(tokenize), tmp_path / "again.jsonl", "skip", num_proc=2)
    assert in_two_processes == fingerprint


def test_where_all_rows_are_bad_none_is_left_out(tmp_path: Path, tokenize: RowTokenizer) -> None:
    path = write(tmp_path, "   ", "   ")
    with pytest.raises(BadRowError, match=r"row 0: no assistant turn.* 2 of 2 rows are bad; fix the data\.$"):
        check_rows(read(path), RowCheck(tokenize), tmp_path / "bad.jsonl", "skip")
    assert not (tmp_path / "bad.jsonl").exists()


def test_a_pictures_tokens_and_labels_are_repeated_alike(tmp_path: Path, tokenize: RowTokenizer) -> None:
    (row,) = read(write(tmp_path, "A dog."))
    row = tokenize(row)
    image_id = tokenize.processor.image_token_id
    expanded = tokenize.expand_pictures(row["input_ids"])
    labels = tokenize.repeat_at_pictures(row["labels"], row["input_ids"])

    assert expanded.count(image_id) == tokenize.tokens_per_image > 1
    assert len(labels) == len(expanded) == row["length"]
    answer = tokenize.processor.tokenizer.decode([token for token in labels if token != IGNORED])
    assert answer == "A dog.<|im_end|>"
    trained = [token for token, label in zip(expanded, labels, strict=True) if label != IGNORED]
    assert trained == [label for label in labels if label != IGNORED]


def test_rows_are_tokenized_once(tmp_path: Path, tokenize: RowTokenizer, seen: list[str]) -> None:
    path = write(tmp_path, *"abcdef")
    first = look(path, RowCheck(tokenize))
    assert sorted(seen) == [*"012345", *(f"p{number}" for number in range(6))]
    assert first.features == FEATURES

    seen.clear()
    assert look(path, RowCheck(tokenize)).to_list() == first.to_list()
    assert seen == []

    # What the result depends on: the tokenizer, the template, whether pictures are opened, and the file.
    tokenize.max_length = 150
    look(path, RowCheck(tokenize))
    look(path, RowCheck(tokenize, open_pictures=False))
    assert len(seen) == 12 + 6
    tokenize.processor.tokenizer.add_tokens(["dog"])
    look(path, RowCheck(tokenize))
    tokenize.chat_template += " "
    look(path, RowCheck(tokenize))
    tokenize.tokens_per_image += 1  # of another encoder
    look(path, RowCheck(tokenize))
    assert len(seen) == 12 + 6 + 12 + 12 + 12
    seen.clear()
    look(write(tmp_path, *"abcdeX"), RowCheck(tokenize))
    assert len(seen) == 12


def test_pictures_are_looked_at_again_where_their_file_has_changed(
    tmp_path: Path, tokenize: RowTokenizer, seen: list[str]
) -> None:
    path = write(tmp_path, *"abcdef")
    check = RowCheck(tokenize)
    pictures = tmp_path / "pictures"
    whole = (pictures / "a.png").read_bytes()
    (pictures / "5.png").write_bytes(whole[:40])
    for _ in range(2):
        assert list(problems(look(path, check))) == [5]
    assert len(seen) == 6 + 5

    (pictures / "1.png").write_bytes(whole[:40] + b"\0" * (len(whole) - 40))  # of the same size
    os.utime(pictures / "1.png", (1, 1))
    assert list(problems(look(path, check))) == [1, 5]

    (pictures / "1.png").unlink()
    assert "1.png is missing" in problems(look(path, check))[1]

    (pictures / "1.png").symlink_to("a.png")
    assert list(problems(look(path, check))) == [5]


def test_the_disks_fault_is_not_kept_as_the_rows(
    tmp_path: Path, tokenize: RowTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, *"ab")
    check = RowCheck(tokenize)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("conversations.pictures.to_rgb", fail)
        with pytest.raises(BadRowError, match=r"data.json, row 0: image .*0.png can't be read .*Input/output error"):
            look(path, check)
    assert not problems(look(path, check))


def test_the_fingerprint_is_of_text_and_pictures(tmp_path: Path, tokenize: RowTokenizer) -> None:
    def fingerprint(folder: Path) -> str:
        return check_rows(read(folder / "data.json"), RowCheck(tokenize), tmp_path / "bad.jsonl")[1]

    here = tmp_path / "here"
    here.mkdir()
    write_json(here, GOOD_ROWS)
    prints = [fingerprint(here)]
    shutil.copytree(here, tmp_path / "there")
    assert fingerprint(tmp_path / "there") == prints[0]

    whole = (here / "pictures" / "a.png").read_bytes()
    (here / "pictures" / "a.png").write_bytes(whole + b" ")
    prints.append(fingerprint(here))
    write_json(here, [{**GOOD_ROWS[0], "image": "b.png"}, *GOOD_ROWS[1:]])
    prints.append(fingerprint(here))
    write_json(here, [{**GOOD_ROWS[0], "conversations": turns("<image>\nWhat?", "A cat.")}, *GOOD_ROWS[1:]])
    prints.append(fingerprint(here))
    assert len(set(prints)) == 4


def test_pictures_inside_a_dataset_are_measured_too(tmp_path: Path, tokenize: RowTokenizer) -> None:
    write_json(tmp_path, [])
    picture = (tmp_path / "pictures" / "a.png").read_bytes()
    prints = []
    for number, encoded in enumerate((picture, picture, picture + b" ")):
        columns = {
            "image": [{"bytes": encoded, "path": "a"}, None],
            "conversations": [turns("<image>", "A dog."), turns("Hello.", "Hi.")],
        }
        Dataset.from_dict(columns).cast_column("image", Image()).save_to_disk(tmp_path / str(number))
        rows = load_rows(str(tmp_path / str(number)))
        good, fingerprint = check_rows(rows, RowCheck(tokenize), tmp_path / "bad.jsonl")
        assert good["num_images"][:] == [1, 0]
        prints.append(fingerprint)
    assert prints[0] == prints[1] != prints[2]
