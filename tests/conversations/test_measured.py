"""What is kept of the check of rows, and what is looked at anew."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset, Image
from PIL import Image as PILImage
from transformers import AutoProcessor

from conversations import measured
from conversations.loading import load_rows
from conversations.measured import MeasuredRows, keep_good_rows, measure_rows, row_lengths
from conversations.rows import BadRowError, Row
from conversations.tokens import RowTokenizer
from row_files import NO_TOKENS, one_token, turns, write_json


class Counting:
    """A tokenizer with a token a character, which notes the conversations that it is asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, row: Row) -> tuple[list[int], list[int]]:
        self.seen.append(row["conversations"])
        if "long" in row["conversations"]:
            raise BadRowError(f"{row['source']}: too long.")
        return [0] * len(row["conversations"]), []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(measured, "PIECE", 4)
    return tmp_path / "cache"


def write(folder: Path, *answers: str) -> Path:
    rows = [{"image": "a.png", "conversations": turns("<image>\nWhat?", answer)} for answer in answers]
    return write_json(folder, rows)


def look(path: Path, tokenize: Any, open_pictures: bool = False, **options: Any) -> MeasuredRows:
    rows = load_rows(str(path), str(path.parent / "pictures"))
    return measure_rows(rows, options.pop("tokens", NO_TOKENS), tokenize, open_pictures, **options)


def as_before(path: Path, found: MeasuredRows) -> str:
    """The fingerprint of rows whose picture is "a.png", written out."""
    size = (path.parent / "pictures" / "a.png").stat().st_size
    content = []
    for number, row in enumerate(load_rows(str(path), str(path.parent / "pictures"))):
        if number not in found.problems:
            checksum = zlib.crc32(json.dumps([row["conversations"], [("/a.png", size)]]).encode())
            content.append((len(row["conversations"]), checksum))
    return hashlib.sha256(np.array(content, dtype=np.int64).tobytes()).hexdigest()


def test_text_is_read_once_and_what_is_found_stays_the_same(tmp_path: Path) -> None:
    answers = [f"answer {number}" for number in range(10)]
    answers[3], answers[7] = "   ", "long"
    path, tokenize = write(tmp_path, *answers), Counting()
    found = look(path, tokenize, identity="x")
    assert len(tokenize.seen) == 9
    assert found.problems == {3: "no assistant turn (`gpt`) with text, so there is nothing to learn", 7: "too long"}
    assert found.lengths[[3, 7]].tolist() == found.checksums[[3, 7]].tolist() == [0, 0]
    again, kept = look(path, tokenize, identity="x"), len(tokenize.seen)
    assert kept == 9
    fresh = look(path, Counting(), num_proc=2)
    for other in (again, fresh):
        assert other.problems == found.problems
        assert (other.lengths == found.lengths).all()
        assert (other.checksums == found.checksums).all()
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    good, fingerprint = keep_good_rows(rows, found, "skip", None)
    assert fingerprint == as_before(path, found)
    assert row_lengths(good).tolist() == [len(row["conversations"]) for row in good]
    assert [row["source"][-1] for row in good] == list("01245689")


def test_what_a_result_depends_on_is_not_taken_for_another(tmp_path: Path) -> None:
    path, tokenize = write(tmp_path, "One.", "Two."), Counting()
    look(path, tokenize, identity="x")
    for options in ({"identity": "y"}, {"identity": "x", "tokens": frozenset({"<s>"})}, {}):
        before = len(tokenize.seen)
        look(path, tokenize, **options)
        assert len(tokenize.seen) == before + 2
    # Of a file that has changed only the pieces that did.
    path, tokenize = write(tmp_path, *"abcdefgh"), Counting()
    look(path, tokenize, identity="x")
    write(tmp_path, *"abcdefgX")
    tokenize.seen.clear()
    found = look(path, tokenize, identity="x")
    assert len(tokenize.seen) == 4
    assert (found.checksums == look(path, Counting()).checksums).all()


def test_a_run_that_is_stopped_goes_on_and_a_torn_file_is_made_anew(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path, *"abcdefgh")

    class Stopped(Counting):
        def __call__(self, row: Row) -> tuple[list[int], list[int]]:
            if '"g"' in row["conversations"]:
                raise KeyboardInterrupt
            return super().__call__(row)

    with pytest.raises(KeyboardInterrupt):
        look(path, Stopped(), identity="x")
    tokenize = Counting()
    expected = look(path, tokenize, identity="x")
    assert [json.loads(text)[1]["value"] for text in tokenize.seen] == list("efgh")
    for file in (cache / "normllava").glob("text-*.parquet"):
        file.write_bytes(file.read_bytes()[:100])
    found = look(path, tokenize, identity="x")
    assert len(tokenize.seen) == 12
    assert (found.lengths == expected.lengths).all()


def test_files_are_looked_at_in_every_run(tmp_path: Path) -> None:
    path, tokenize = write(tmp_path, "One.", "Two."), Counting()
    before = look(path, tokenize, identity="x")
    picture = tmp_path / "pictures" / "a.png"
    picture.write_bytes(picture.read_bytes() + b"more")
    assert (look(path, tokenize, identity="x").checksums != before.checksums).all()
    picture.unlink()
    found = look(path, tokenize, identity="x")
    assert found.problems == dict.fromkeys((0, 1), f"image file {picture} is missing")
    picture.symlink_to(tmp_path / "data.json")
    with pytest.raises(BadRowError, match=r"row 0: image a\.png is outside the image folder"):
        look(path, tokenize, identity="x")
    assert len(tokenize.seen) == 2


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of the rows whose pictures are opened."""
    sources: list[str] = []
    open_images = measured.open_images

    def noted(row: Row) -> Any:
        sources.append(row["source"][-1])
        return open_images(row)

    monkeypatch.setattr(measured, "open_images", noted)
    return sources


def test_a_turn_may_have_fields_that_json_lacks(tmp_path: Path) -> None:
    """A bare TypeError without file and row was the answer."""
    stored = [[{**turn, "at": datetime(2026, 11, 23)} for turn in turns("<image>What?", "A dog.")]]
    Dataset.from_dict({"images": [["a.png"]], "conversations": stored}).save_to_disk(tmp_path / "stored")
    PILImage.new("RGB", (4, 4)).save(tmp_path / "stored" / "a.png")
    rows = load_rows(str(tmp_path / "stored"))
    assert not measure_rows(rows, NO_TOKENS, one_token, False, identity="x").problems


def test_pictures_are_opened_again_where_their_file_has_changed(tmp_path: Path, opened: list[str]) -> None:
    path = write_json(
        tmp_path,
        [
            {"image": f"{n}.png", "conversations": turns("<image>\nWhat?", "long" if n == 4 else "A.")}
            for n in range(6)
        ],
    )
    pictures = tmp_path / "pictures"
    for number in range(6):
        shutil.copy(pictures / "a.png", pictures / f"{number}.png")
    whole = (pictures / "a.png").read_bytes()
    (pictures / "5.png").write_bytes(whole[:40])
    first = look(path, Counting(), open_pictures=True, identity="x")
    assert opened == list("012345")
    assert set(first.problems) == {4, 5}
    assert "can't be read" in first.problems[5]
    opened.clear()
    assert look(path, Counting(), open_pictures=True, identity="x").problems == first.problems
    assert opened == ["5"]  # which may have been the disk's fault
    opened.clear()
    (pictures / "1.png").write_bytes(whole[:40] + b"\0" * (len(whole) - 40))  # of the same size
    os.utime(pictures / "1.png", (1, 1))
    (pictures / "5.png").write_bytes(whole)
    found = look(path, Counting(), open_pictures=True, identity="x")
    assert opened == ["1", "5"]
    assert set(found.problems) == {1, 4}
    assert found.problems == look(path, Counting(), open_pictures=True).problems


def test_pictures_inside_a_dataset_are_opened_again_where_their_bytes_have_changed(
    tmp_path: Path, opened: list[str]
) -> None:
    path = write(tmp_path, "One.")
    whole = (tmp_path / "pictures" / "a.png").read_bytes()
    torn = whole[:40] + b"\0" * (len(whole) - 40)
    for pictures, bad in (([whole, whole], []), ([whole, torn], [1]), ([whole, torn], [1])):
        shutil.rmtree(tmp_path / "stored", ignore_errors=True)
        columns = {"image": [{"bytes": picture, "path": None} for picture in pictures]}
        dataset = Dataset.from_dict({**columns, "conversations": [turns("<image>", "A dog.")] * 2})
        dataset.cast_column("image", Image()).save_to_disk(tmp_path / "stored")
        rows = load_rows(str(tmp_path / "stored"))
        assert list(measure_rows(rows, NO_TOKENS, one_token, True, identity="x").problems) == bad
    assert opened == ["0", "1", "1", "1"]
    assert path.exists()


def test_the_identity_of_a_tokenizer_is_that_of_all_it_depends_on(composed: Callable[..., Path]) -> None:
    def tokenizer(**options: Any) -> RowTokenizer:
        processor = AutoProcessor.from_pretrained(composed())
        return RowTokenizer(processor, options.pop("template", processor.chat_template), **options)

    same = tokenizer()
    before = same.identity()
    same({"conversations": turns("What?", "A dog."), "images": [], "source": ""})
    assert before == same.identity() == tokenizer().identity()
    longer = tokenizer()
    longer.processor.tokenizer.add_tokens(["dog"])
    others = [longer, tokenizer(max_length=5), tokenizer(template="{{ messages }}")]
    assert len({before, *(other.identity() for other in others)}) == 4
