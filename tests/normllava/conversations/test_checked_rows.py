"""Every row is checked and tokenized once: bad rows are found, and a result is kept until something has changed."""

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

from normllava.conversations import checked_rows
from normllava.conversations.checked_rows import FEATURES, RowCheck, row_lengths, tokenize_rows
from normllava.conversations.loading import load_rows
from normllava.conversations.row_tokenizer import IGNORED, RowTokenizer
from normllava.conversations.rows import BadRowError, Row
from row_files import GOOD_ROWS, check_rows, row_tokenizer, turns, write_json, write_pictures


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty cache of `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenize(make_model_folder: Callable[..., Path]) -> RowTokenizer:
    """A `RowTokenizer` that refuses rows of more than 200 tokens."""
    return row_tokenizer(make_model_folder(), max_length=200)


@dataclass
class Calls:
    """Which rows were tokenized and opened since the last `clear`.

    Attributes:
        tokenized: The numbers of the rows that were tokenized.
        opened: The numbers of the rows whose pictures were opened.
    """

    tokenized: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.tokenized.clear()
        self.opened.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Notes which rows are tokenized, and which rows' pictures are opened, during a test."""
    noted = Calls()
    original_call = RowTokenizer.__call__
    original_open_images = checked_rows.open_images

    def note_and_tokenize(tokenize: RowTokenizer, row: Row, image_sizes: list[tuple[int, int]] | None) -> Row:
        noted.tokenized.append(row_number(row))
        return original_call(tokenize, row, image_sizes)

    def note_and_open(row: Row) -> Any:
        noted.opened.append(row_number(row))
        return original_open_images(row)

    monkeypatch.setattr(RowTokenizer, "__call__", note_and_tokenize)
    monkeypatch.setattr(checked_rows, "open_images", note_and_open)
    return noted


def row_number(row: Row) -> str:
    """The number at the end of a row's source: "3" of "data.json, row 3"."""
    return row["source"].rpartition(" ")[2]


def write_rows(folder: Path, *answers: str) -> Path:
    """Write data.json with a row for each answer. The pictures of the rows are 0.png, 1.png and so on."""
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


def find_problems(tokens: Dataset) -> dict[int, str]:
    """The problems of bad rows, by the row's number."""
    return {number: problem for number, problem in enumerate(tokens["problem"]) if problem}


@pytest.fixture
def mixed_rows(tmp_path: Path) -> Path:
    """A file of ten rows, of which the rows 3, 5, 6 and 7 are bad."""
    answers = [f"answer {number}" for number in range(10)]
    answers[3] = "   "  # blank
    answers[6] = "half of a surrogate pair: \ud800"
    answers[7] = "long " * 100  # more than 200 tokens
    path = write_rows(tmp_path, *answers)
    picture = tmp_path / "pictures" / "5.png"
    picture.write_bytes(picture.read_bytes()[:40])  # a torn file
    return path


def test_good_rows_get_their_tokens(tmp_path: Path, mixed_rows: Path, tokenize: RowTokenizer) -> None:
    good, _ = check_rows(read_rows(mixed_rows), RowCheck(tokenize), tmp_path / "bad.jsonl", "skip")
    assert [row_number(row) for row in good] == ["0", "1", "2", "4", "8", "9"]
    for row in good:
        assert row["num_tiles"] == 1
        assert row["input_ids"].count(tokenize.processor.image_token_id) == 1
        assert row["length"] == len(tokenize.repeat_at_pictures(row["input_ids"], row))
        assert len(row["labels"]) == len(row["input_ids"])
        trained = [label for label in row["labels"] if label != IGNORED]
        assert tokenize.processor.tokenizer.decode(trained).startswith("answer")
    assert "conversations" not in good.column_names  # training needs the tokens alone
    assert row_lengths(good).tolist() == [row["length"] for row in good]


def test_bad_rows_that_are_left_out_are_listed(tmp_path: Path, mixed_rows: Path, tokenize: RowTokenizer) -> None:
    report_file = tmp_path / "out" / "bad.jsonl"
    check_rows(read_rows(mixed_rows), RowCheck(tokenize), report_file, "skip")
    bad_rows = [json.loads(line) for line in report_file.read_text().splitlines()]
    problems = {row_number(row): row["problem"] for row in bad_rows}
    assert list(problems) == ["3", "5", "6", "7"]
    assert "no assistant turn" in problems["3"]
    assert "5.png can't be read" in problems["5"]
    assert "the text can't be tokenized" in problems["6"]
    assert "more than max_length 200" in problems["7"]


def test_without_skip_the_first_bad_row_is_named(tmp_path: Path, mixed_rows: Path, tokenize: RowTokenizer) -> None:
    with pytest.raises(BadRowError, match=r"row 3: no assistant turn.* 4 of 10 rows are bad; fix the data, or leave"):
        check_rows(read_rows(mixed_rows), RowCheck(tokenize), tmp_path / "bad.jsonl", "error")


def test_two_processes_give_the_fingerprint_of_one(tmp_path: Path, tokenize: RowTokenizer) -> None:
    blank_answer = "   "  # makes its row a bad row
    path = write_rows(tmp_path, "a", "b", blank_answer, "d")
    check = RowCheck(tokenize)
    _, with_one_process = check_rows(read_rows(path), check, tmp_path / "bad.jsonl", "skip")
    shutil.rmtree(tmp_path / "cache")  # so that the rows are tokenized again
    _, with_two_processes = check_rows(read_rows(path), check, tmp_path / "bad.jsonl", "skip", num_proc=2)
    assert with_two_processes == with_one_process


def test_a_dataset_of_bad_rows_alone_is_refused_with_skip_too(tmp_path: Path, tokenize: RowTokenizer) -> None:
    path = write_rows(tmp_path, "   ", "   ")
    with pytest.raises(BadRowError, match=r"row 0: no assistant turn.* 2 of 2 rows are bad; fix the data\.$"):
        check_rows(read_rows(path), RowCheck(tokenize), tmp_path / "bad.jsonl", "skip")
    assert not (tmp_path / "bad.jsonl").exists()


def test_image_tokens_and_their_labels_are_repeated_alike(tmp_path: Path, tokenize: RowTokenizer) -> None:
    (row,) = read_rows(write_rows(tmp_path, "A dog."))
    tokenized = tokenize(row)
    input_ids = tokenize.repeat_at_pictures(tokenized["input_ids"], tokenized)
    labels = tokenize.repeat_at_pictures(tokenized["labels"], tokenized)

    assert tokenize.tokens_per_tile > 1
    assert input_ids.count(tokenize.processor.image_token_id) == tokenize.tokens_per_tile
    assert len(input_ids) == tokenized["length"]
    assert len(labels) == tokenized["length"]

    # The label of a trained token is the token itself, and the trained tokens are the answer.
    trained_tokens = []
    for token, label in zip(input_ids, labels, strict=True):
        if label != IGNORED:
            assert label == token
            trained_tokens.append(token)
    assert tokenize.processor.tokenizer.decode(trained_tokens) == "A dog.<|im_end|>"


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
    tokenize.tokens_per_tile += 1  # an encoder with other patches makes another number of image tokens


@pytest.mark.parametrize("change", [change_max_length, change_vocabulary, change_template, change_vision_encoder])
def test_rows_are_tokenized_again_after_a_change_of_the_tokenizer(
    tmp_path: Path, tokenize: RowTokenizer, calls: Calls, change: Callable[[RowTokenizer], None]
) -> None:
    path = write_rows(tmp_path, "a", "b", "c")
    read_and_tokenize(path, RowCheck(tokenize))
    calls.clear()
    change(tokenize)
    read_and_tokenize(path, RowCheck(tokenize))
    assert sorted(calls.tokenized) == ["0", "1", "2"]


def test_rows_are_tokenized_again_after_a_change_of_their_file(
    tmp_path: Path, tokenize: RowTokenizer, calls: Calls
) -> None:
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

    def bad_row_numbers() -> list[int]:
        return list(find_problems(read_and_tokenize(path, check)))

    # The file 2.png is torn, which changes its size.
    pictures = tmp_path / "pictures"
    encoded = (pictures / "a.png").read_bytes()
    torn = encoded[:40]
    (pictures / "2.png").write_bytes(torn)
    assert bad_row_numbers() == [2]
    assert bad_row_numbers() == [2]  # from the cache

    # The file 1.png is torn too, but keeps its size. Only its modification time is another.
    torn_of_same_size = torn + b"\0" * (len(encoded) - len(torn))
    (pictures / "1.png").write_bytes(torn_of_same_size)
    os.utime(pictures / "1.png", (1, 1))  # 1970, since a coarse clock may give both writes the same time
    assert bad_row_numbers() == [1, 2]

    (pictures / "1.png").unlink()
    assert "1.png is missing" in find_problems(read_and_tokenize(path, check))[1]

    # Now 1.png is a picture again.
    (pictures / "1.png").symlink_to("a.png")
    assert bad_row_numbers() == [2]


def test_a_fault_of_the_disk_is_not_kept_as_a_problem_of_the_row(
    tmp_path: Path, tokenize: RowTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, "a", "b")
    check = RowCheck(tokenize)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("normllava.conversations.pictures.to_rgb", fail)
        with pytest.raises(BadRowError, match=r"data.json, row 0: image .*0.png can't be read .*Input/output error"):
            read_and_tokenize(path, check)
    # Without the fault, the same rows are good.
    assert not find_problems(read_and_tokenize(path, check))


def test_the_fingerprint_changes_with_texts_and_pictures(tmp_path: Path, tokenize: RowTokenizer) -> None:
    def fingerprint_in(folder: Path) -> str:
        _, fingerprint = check_rows(read_rows(folder / "data.json"), RowCheck(tokenize), tmp_path / "bad.jsonl")
        return fingerprint

    folder = tmp_path / "here"
    folder.mkdir()
    write_json(folder, GOOD_ROWS)
    first = fingerprint_in(folder)
    shutil.copytree(folder, tmp_path / "there")
    assert fingerprint_in(tmp_path / "there") == first

    picture = folder / "pictures" / "a.png"
    picture.write_bytes(picture.read_bytes() + b" ")
    with_longer_file = fingerprint_in(folder)

    # `write_json` also writes a.png as it was at first.
    first_row, *other_rows = GOOD_ROWS
    write_json(folder, [first_row | {"image": "b.png"}, *other_rows])
    with_other_picture = fingerprint_in(folder)
    write_json(folder, [first_row | {"conversations": turns("<image>\nWhat?", "A cat.")}, *other_rows])
    with_other_answer = fingerprint_in(folder)
    assert len({first, with_longer_file, with_other_picture, with_other_answer}) == 4  # all differ


def test_the_fingerprint_changes_with_pictures_inside_a_dataset(tmp_path: Path, tokenize: RowTokenizer) -> None:
    """The datasets hold a row with a picture and a row without."""

    def fingerprint_with(encoded_picture: bytes, name: str) -> str:
        columns = {
            "image": [{"bytes": encoded_picture, "path": "a"}, None],
            "conversations": [turns("<image>", "A dog."), turns("Hello.", "Hi.")],
        }
        Dataset.from_dict(columns).cast_column("image", Image()).save_to_disk(tmp_path / name)
        rows = load_rows(str(tmp_path / name))
        good, fingerprint = check_rows(rows, RowCheck(tokenize), tmp_path / "bad.jsonl")
        assert good["num_tiles"][:] == [1, 0]
        return fingerprint

    picture = (write_pictures(tmp_path) / "a.png").read_bytes()
    first = fingerprint_with(picture, name="first")
    assert fingerprint_with(picture, name="copy") == first
    assert fingerprint_with(picture + b" ", name="changed") != first
