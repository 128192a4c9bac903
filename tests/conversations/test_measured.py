"""Every row is checked and tokenized once: bad rows are found, results are kept, and what has changed is read anew."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
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
from row_files import GOOD_ROWS, check_rows, tokenizer_of, turns, write_json, write_pictures


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty cache of `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenize(composed: Callable[..., Path]) -> RowTokenizer:
    return tokenizer_of(composed(), max_length=200)


@dataclass
class Calls:
    """The numbers of the rows that were tokenized, and of those whose pictures were opened, since the last `clear`."""

    tokenized: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.tokenized.clear()
        self.opened.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    tokenize_row = RowTokenizer.__call__
    open_images = measured.open_images

    def note_and_tokenize(tokenize: RowTokenizer, row: Row, image_sizes: list[tuple[int, int]] | None) -> Row:
        calls.tokenized.append(row_number(row))
        return tokenize_row(tokenize, row, image_sizes)

    def note_and_open(row: Row) -> Any:
        calls.opened.append(row_number(row))
        return open_images(row)

    monkeypatch.setattr(RowTokenizer, "__call__", note_and_tokenize)
    monkeypatch.setattr(measured, "open_images", note_and_open)
    return calls


def row_number(row: Row) -> str:
    """The number that ends a row's source."""
    return row["source"].rpartition(" ")[2]


def write_rows(folder: Path, *answers: str) -> Path:
    """Write a row for each answer, with a picture of its own that is named by the row's number."""
    rows = []
    for number, answer in enumerate(answers):
        rows.append({"image": f"{number}.png", "conversations": turns("<image>\nWhat?", answer)})
    path = write_json(folder, rows)

    for number in range(len(answers)):
        shutil.copy(folder / "pictures" / "a.png", folder / "pictures" / f"{number}.png")
    return path


def read_rows(path: Path) -> Any:
    return load_rows(str(path), str(path.parent / "pictures"))


def read_and_tokenize(path: Path, check: RowCheck) -> Dataset:
    return tokenize_rows(read_rows(path), check)


def problems(tokens: Dataset) -> dict[int, str]:
    """The bad rows' problems, by the row's number."""
    return {number: problem for number, problem in enumerate(tokens["problem"]) if problem}


def test_good_rows_get_their_tokens_and_bad_ones_are_listed(tmp_path: Path, tokenize: RowTokenizer) -> None:
    answers = [f"answer {number}" for number in range(10)]
    answers[3] = "   "
    answers[6] = "half of a surrogate pair: \ud800"
    answers[7] = "long " * 100
    path = write_rows(tmp_path, *answers)
    broken = tmp_path / "pictures" / "5.png"
    broken.write_bytes(broken.read_bytes()[:40])

    report = tmp_path / "out" / "bad.jsonl"
    good, _ = check_rows(read_rows(path), RowCheck(tokenize), report, "skip")
    assert [row_number(row) for row in good] == ["0", "1", "2", "4", "8", "9"]
    for row in good:
        assert row["num_tiles"] == 1
        assert row["input_ids"].count(tokenize.processor.image_token_id) == 1
        assert row["length"] == len(tokenize.repeat_at_pictures(row["input_ids"], row))
        assert len(row["labels"]) == len(row["input_ids"])
        assert json.loads(row["conversations"])[1]["value"].startswith("answer")
    assert row_lengths(good).tolist() == [row["length"] for row in good]

    bad_rows = [json.loads(line) for line in report.read_text().splitlines()]
    reported = {row_number(row): row["problem"] for row in bad_rows}
    assert list(reported) == ["3", "5", "6", "7"]
    assert "no assistant turn" in reported["3"]
    assert "5.png can't be read" in reported["5"]
    assert "the text can't be tokenized" in reported["6"]
    assert "more than max_length 200" in reported["7"]

    with pytest.raises(BadRowError, match=r"row 3: no assistant turn.* 4 of 10 rows are bad; fix the data, or leave"):
        check_rows(read_rows(path), RowCheck(tokenize), report)


def test_two_processes_give_the_fingerprint_of_one(tmp_path: Path, tokenize: RowTokenizer) -> None:
    path = write_rows(tmp_path, "a", "b", "   ", "d")
    check = RowCheck(tokenize)
    _, fingerprint = check_rows(read_rows(path), check, tmp_path / "bad.jsonl", "skip")
    shutil.rmtree(tmp_path / "cache")  # so that the rows are tokenized again
    _, in_two_processes = check_rows(read_rows(path), check, tmp_path / "bad.jsonl", "skip", num_proc=2)
    assert in_two_processes == fingerprint


def test_where_all_rows_are_bad_none_is_left_out(tmp_path: Path, tokenize: RowTokenizer) -> None:
    path = write_rows(tmp_path, "   ", "   ")
    with pytest.raises(BadRowError, match=r"row 0: no assistant turn.* 2 of 2 rows are bad; fix the data\.$"):
        check_rows(read_rows(path), RowCheck(tokenize), tmp_path / "bad.jsonl", "skip")
    assert not (tmp_path / "bad.jsonl").exists()


def test_a_pictures_tokens_and_labels_are_repeated_alike(tmp_path: Path, tokenize: RowTokenizer) -> None:
    (row,) = read_rows(write_rows(tmp_path, "A dog."))
    row = tokenize(row)
    image_id = tokenize.processor.image_token_id
    expanded = tokenize.repeat_at_pictures(row["input_ids"], row)
    labels = tokenize.repeat_at_pictures(row["labels"], row)

    assert tokenize.tokens_per_tile > 1
    assert expanded.count(image_id) == tokenize.tokens_per_tile
    assert len(expanded) == row["length"]
    assert len(labels) == row["length"]
    answer = tokenize.processor.tokenizer.decode([token for token in labels if token != IGNORED])
    assert answer == "A dog.<|im_end|>"
    trained = [token for token, label in zip(expanded, labels, strict=True) if label != IGNORED]
    assert trained == [label for label in labels if label != IGNORED]


def test_rows_are_tokenized_once(tmp_path: Path, tokenize: RowTokenizer, calls: Calls) -> None:
    path = write_rows(tmp_path, "a", "b", "c")
    first = read_and_tokenize(path, RowCheck(tokenize))
    assert first.features == FEATURES
    assert sorted(calls.tokenized) == ["0", "1", "2"]
    assert sorted(calls.opened) == ["0", "1", "2"]

    calls.clear()
    again = read_and_tokenize(path, RowCheck(tokenize))
    assert again.to_list() == first.to_list()
    assert calls.tokenized == []
    assert calls.opened == []


def change_max_length(tokenize: RowTokenizer) -> None:
    tokenize.max_length = 150


def change_vocabulary(tokenize: RowTokenizer) -> None:
    tokenize.processor.tokenizer.add_tokens(["dog"])


def change_template(tokenize: RowTokenizer) -> None:
    tokenize.chat_template += " "


def change_vision_encoder(tokenize: RowTokenizer) -> None:
    tokenize.tokens_per_tile += 1


@pytest.mark.parametrize("change", [change_max_length, change_vocabulary, change_template, change_vision_encoder])
def test_rows_are_tokenized_anew_after_a_change(
    tmp_path: Path, tokenize: RowTokenizer, calls: Calls, change: Callable[[RowTokenizer], None]
) -> None:
    path = write_rows(tmp_path, "a", "b", "c")
    read_and_tokenize(path, RowCheck(tokenize))
    calls.clear()
    change(tokenize)
    read_and_tokenize(path, RowCheck(tokenize))
    assert sorted(calls.tokenized) == ["0", "1", "2"]


def test_rows_are_tokenized_anew_if_the_file_has_changed(tmp_path: Path, tokenize: RowTokenizer, calls: Calls) -> None:
    read_and_tokenize(write_rows(tmp_path, "a", "b", "c"), RowCheck(tokenize))
    calls.clear()
    read_and_tokenize(write_rows(tmp_path, "a", "b", "X"), RowCheck(tokenize))
    assert sorted(calls.tokenized) == ["0", "1", "2"]


def test_a_check_without_pictures_has_a_result_of_its_own(
    tmp_path: Path, tokenize: RowTokenizer, calls: Calls
) -> None:
    path = write_rows(tmp_path, "a", "b", "c")
    read_and_tokenize(path, RowCheck(tokenize))
    calls.clear()
    read_and_tokenize(path, RowCheck(tokenize, open_pictures=False))
    assert sorted(calls.tokenized) == ["0", "1", "2"]
    assert calls.opened == []


def test_pictures_are_opened_again_if_their_file_has_changed(tmp_path: Path, tokenize: RowTokenizer) -> None:
    path = write_rows(tmp_path, "a", "b", "c")
    check = RowCheck(tokenize)
    pictures = tmp_path / "pictures"
    encoded = (pictures / "a.png").read_bytes()
    torn = encoded[:40]
    (pictures / "2.png").write_bytes(torn)
    assert list(problems(read_and_tokenize(path, check))) == [2]
    assert list(problems(read_and_tokenize(path, check))) == [2]  # from the cache
    torn_of_same_size = torn + b"\0" * (len(encoded) - len(torn))
    (pictures / "1.png").write_bytes(torn_of_same_size)
    os.utime(pictures / "1.png", (1, 1))  # another modification time, even where the clock is coarse
    assert list(problems(read_and_tokenize(path, check))) == [1, 2]

    (pictures / "1.png").unlink()
    assert "1.png is missing" in problems(read_and_tokenize(path, check))[1]

    (pictures / "1.png").symlink_to("a.png")
    assert list(problems(read_and_tokenize(path, check))) == [2]


def test_a_fault_of_the_disk_is_not_kept_as_a_problem_of_the_row(
    tmp_path: Path, tokenize: RowTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, "a", "b")
    check = RowCheck(tokenize)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("conversations.pictures.to_rgb", fail)
        with pytest.raises(BadRowError, match=r"data.json, row 0: image .*0.png can't be read .*Input/output error"):
            read_and_tokenize(path, check)
    assert not problems(read_and_tokenize(path, check))


def test_the_fingerprint_changes_with_texts_and_pictures(tmp_path: Path, tokenize: RowTokenizer) -> None:
    def fingerprint_of(folder: Path) -> str:
        _, fingerprint = check_rows(read_rows(folder / "data.json"), RowCheck(tokenize), tmp_path / "bad.jsonl")
        return fingerprint

    folder = tmp_path / "here"
    folder.mkdir()
    write_json(folder, GOOD_ROWS)
    first = fingerprint_of(folder)
    shutil.copytree(folder, tmp_path / "there")
    assert fingerprint_of(tmp_path / "there") == first

    picture = folder / "pictures" / "a.png"
    picture.write_bytes(picture.read_bytes() + b" ")
    with_longer_file = fingerprint_of(folder)

    # `write_json` writes a.png as it was.
    write_json(folder, [GOOD_ROWS[0] | {"image": "b.png"}, *GOOD_ROWS[1:]])
    with_other_picture = fingerprint_of(folder)
    write_json(folder, [GOOD_ROWS[0] | {"conversations": turns("<image>\nWhat?", "A cat.")}, *GOOD_ROWS[1:]])
    with_other_answer = fingerprint_of(folder)
    assert len({first, with_longer_file, with_other_picture, with_other_answer}) == 4


def test_the_fingerprint_changes_with_pictures_inside_a_dataset(tmp_path: Path, tokenize: RowTokenizer) -> None:
    picture = (write_pictures(tmp_path) / "a.png").read_bytes()

    def fingerprint_with(encoded: bytes, name: str) -> str:
        columns = {
            "image": [{"bytes": encoded, "path": "a"}, None],
            "conversations": [turns("<image>", "A dog."), turns("Hello.", "Hi.")],
        }
        Dataset.from_dict(columns).cast_column("image", Image()).save_to_disk(tmp_path / name)
        rows = load_rows(str(tmp_path / name))
        good, fingerprint = check_rows(rows, RowCheck(tokenize), tmp_path / "bad.jsonl")
        assert good["num_tiles"][:] == [1, 0]
        return fingerprint

    first = fingerprint_with(picture, "first")
    assert fingerprint_with(picture, "copy") == first
    assert fingerprint_with(picture + b" ", "changed") != first
