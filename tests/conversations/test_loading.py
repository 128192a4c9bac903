"""Reading rows as the field ships them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Image, List
from datasets.exceptions import DatasetGenerationError
from PIL import Image as PILImage

from common.errors import UserError
from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, row_images
from row_files import GOOD_ROWS, turns, write_json


ASKED, SAID = turns("<image>\nWhat?", "A dog."), turns("Hello.", "Hello to you.")


def read_whole(rows: Any) -> list[PILImage.Image]:
    """The pictures of rows that are checked first, as training does."""
    images = []
    for row in rows:
        check_row(row)
        images += open_images(row)
    return images


def write_parquet(folder: Path, shard: int = 0, **columns: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"train-{shard:05d}.parquet")
    return folder


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_llava_json(tmp_path: Path, name: str) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS, name)), str(tmp_path / "pictures"))
    assert [len(row_images(row)) for row in rows] == [1, 0, 2]
    assert [image.mode for image in open_images(rows[2])] == ["RGB", "RGB"]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)
    assert not has_splits(str(tmp_path / name))


def test_a_stored_dataset_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    stored = tmp_path / "stored"
    columns = {"images": [[str(tmp_path / "pictures" / "a.png")], []], "conversations": [ASKED, SAID]}
    Dataset.from_dict(columns).cast_column("images", List(Image())).save_to_disk(stored)

    before = sorted(stored.iterdir())
    rows = load_rows(str(stored), str(tmp_path))
    assert sorted(stored.iterdir()) == before  # pictures can take 100 GB
    assert [len(row_images(row)) for row in rows] == [1, 0]
    assert read_whole(rows)[0].getpixel((0, 0)) == (1, 2, 3)
    assert not has_splits(str(stored))


def test_a_relative_image_folder_takes_absolute_paths_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path, [{"image": str(tmp_path / "pictures" / "a.png"), "images": None, "conversations": ASKED}])
    monkeypatch.chdir(tmp_path)
    assert len(read_whole(load_rows("data.json", "pictures"))) == 1
    assert len(read_whole(load_rows("data.json"))) == 1


def store(folder: Path, kind: str, name: str) -> Path:
    """A row with a picture, given by name, in a dataset of a kind."""
    write_json(folder, [])
    image: Any = {"structs": {"bytes": None, "path": name}, "lists": [name]}.get(kind, name)
    stored = {"image": [image], "conversations": [ASKED]}
    if kind != "saved":
        return write_parquet(folder / "stored", **stored)
    Dataset.from_dict(stored).save_to_disk(folder / "stored")
    return folder / "stored"


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [("saved", False), ("strings", False), ("structs", False), ("lists", False), ("structs", True)],
)
def test_pictures_are_found_by_name_in_columns_of_any_kind(tmp_path: Path, kind: str, streaming: bool) -> None:
    data = store(tmp_path, kind, "a.png")
    (tmp_path / "door").symlink_to("pictures")
    (read,) = read_whole(load_rows(str(data), str(tmp_path / "door"), streaming=streaming))
    assert read.getpixel((0, 0)) == (1, 2, 3)


def test_pictures_of_a_dataset_are_found_in_its_folder_alone(tmp_path: Path) -> None:
    data = store(tmp_path, "saved", "a.png")
    (tmp_path / "pictures" / "a.png").rename(data / "a.png")
    assert len(read_whole(load_rows(str(data)))) == 1
    data = store(tmp_path / "pictures", "saved", str(data / "a.png"))
    with pytest.raises(BadRowError, match=r"stored, row 0: image .*a.png is outside the image folder .*set one"):
        read_whole(load_rows(str(data)))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("encoded", ["binary", "list", "struct", "list of structs"])
def test_encoded_pictures_of_any_column_are_read(tmp_path: Path, encoded: str, streaming: bool) -> None:
    write_json(tmp_path, [])
    picture = (tmp_path / "pictures" / "a.png").read_bytes()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = {
        "binary": pa.array([picture, None], pa.binary()),
        "list": pa.array([[picture], None], pa.list_(pa.binary())),
        "struct": pa.array([{"bytes": picture, "path": "/etc/passwd"}, None], struct),
        "list of structs": pa.array([[{"bytes": picture, "path": None}], []], pa.list_(struct)),
    }[encoded]
    stored = write_parquet(tmp_path / "stored", image=column, conversations=[ASKED, SAID])
    (read,) = read_whole(load_rows(str(stored), streaming=streaming))
    assert read.getpixel((0, 0)) == (1, 2, 3)


ROW = json.dumps({"conversations": turns("Hello.", "Grüße.")}, ensure_ascii=False)
FILES = {
    "bom.json": b"\xef\xbb\xbf" + f"[{ROW}]".encode(),
    "rows.JsonL": f"\n{ROW}\r\n\n".encode(),
    "breaks.jsonl": json.dumps({"conversations": turns("a\u2028b", "c")}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_json_of_many_spellings_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    rows = load_rows(str(tmp_path / name))
    assert len(rows) == FILES[name].count(b"conversations")
    check_row(rows[0])


WRONG_FILES = {
    "latin-1": (f"[{ROW}]".encode("latin-1"), r"'utf-8' codec can't decode byte .* Save it as UTF-8"),
    "a row that is no row": (f"[{ROW}, 7]".encode(), "row 1 is not a row.*: 7"),
    "a torn list": (f"[{ROW}, ".encode(), "Expecting value"),
    "a torn line": (ROW.encode() + b'\n{"conv', "line 2: Unterminated string"),
    "an empty list": (b"[]", "there are no rows"),
    "an empty file": (b"", "there are no rows"),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_files_that_hold_no_rows_are_named_with_the_cause(tmp_path: Path, wrong: str) -> None:
    content, message = WRONG_FILES[wrong]
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/x.json: .*{message}"):
        load_rows(str(tmp_path / "x.json"))


@pytest.mark.parametrize("kind", ["json", "parquet", "stream"])
def test_a_bug_of_ours_is_no_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Reading fails in our code, as an unpacking would: it isn't told as a fault of the rows."""
    path = write_json(tmp_path, GOOD_ROWS[1:2])
    if kind != "json":
        path = write_parquet(tmp_path / "stored", messages=[[{"role": "user", "content": "Hi."}]])

    def fail(fields: Row) -> Row:
        raise ValueError("too many values to unpack")

    for module in ("columns", "json_files", "loading"):
        monkeypatch.setattr(f"conversations.{module}.read_row", fail)
    with pytest.raises((ValueError, DatasetGenerationError)) as error:
        list(load_rows(str(path), streaming=kind == "stream"))
    assert not isinstance(error.value, UserError)


def test_columns_that_hold_no_pictures_are_named(tmp_path: Path) -> None:
    stored = write_parquet(tmp_path / "stored", image=[1], conversations=[ASKED])
    for streaming in (False, True):
        with pytest.raises(UserError, match=rf"^{stored}: Unsupported cast from int64"):
            load_rows(str(stored), streaming=streaming)


def test_what_holds_no_rows_is_named(tmp_path: Path) -> None:
    for name in ("gone.json", "gone"):
        with pytest.raises((ValueError, FileNotFoundError, ConnectionError), match=name):
            load_rows(str(tmp_path / name))
    path = write_json(tmp_path, GOOD_ROWS)
    with pytest.raises(ValueError, match=r"image folder .*gone does not exist"):
        load_rows(str(path), str(tmp_path / "gone"))

    without_turns = write_parquet(tmp_path / "turns", text=["a"])
    empty = write_parquet(tmp_path / "empty", conversations=pa.array([], pa.string()))
    for streaming in (False, True):
        problem = "no turns: the columns are text, and turns are read from conversations"
        with pytest.raises(UserError, match=rf"^{without_turns}: {problem}"):
            load_rows(str(without_turns), streaming=streaming)
        with pytest.raises(UserError, match=rf"^{empty}: "):
            load_rows(str(empty), streaming=streaming)


def test_an_unknown_split_or_configuration_is_an_error_with_those_there_are(tmp_path: Path) -> None:
    path = str(write_json(tmp_path, GOOD_ROWS))
    rows = Dataset.from_dict({"images": [[]], "conversations": [json.dumps(SAID)]})
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train.parquet")

    for name, message in (
        (path, "data.json: it has the splits train and no configurations, so no 'dev'"),
        (str(tmp_path / "two"), "two: it has the splits train, test and no configurations, so no 'dev'"),
        (str(tmp_path / "parquet"), r"parquet: .*split.*dev.*\['train'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(name, split="dev")
    assert len(load_rows(str(tmp_path / "two"), split="test")) == 1
    assert has_splits(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="no configurations, so no 'other'"):
        load_rows(path, config="other")


def test_a_row_of_a_stream_is_named_by_its_text(tmp_path: Path) -> None:
    images = pa.array([[]], pa.list_(pa.string()))
    folder = write_parquet(tmp_path / "rows", images=images, conversations=[turns("Say.")])
    (row,) = load_rows(str(folder), streaming=True)
    with pytest.raises(BadRowError, match=rf"{folder}, row \[.*Say\..*no assistant turn"):
        check_row(row)


def test_the_fingerprint_of_a_stream_is_of_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write_parquet(tmp_path / "here" / "stored", conversations=["One."])
    first = stream_fingerprint(str(stored), None, "train")
    stored = Path(shutil.move(stored, tmp_path / "there"))
    assert stream_fingerprint(str(stored), None, "train") == first
    prints = {first, stream_fingerprint(str(stored), None, "test"), stream_fingerprint(str(stored), "other", "train")}
    write_parquet(stored, 1, conversations=["Three."])
    assert len({*prints, stream_fingerprint(str(stored), None, "train")}) == 4

    path = write_json(tmp_path, GOOD_ROWS)
    before = stream_fingerprint(str(path), None, "train")
    assert stream_fingerprint(str(shutil.move(path, tmp_path / "moved.json")), None, "train") == before
    swapped = [{**GOOD_ROWS[0], "image": "b.png"}, *GOOD_ROWS[1:]]  # of the same length
    assert stream_fingerprint(str(write_json(tmp_path, swapped)), None, "train") != before

    commits = iter("ab")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: SimpleNamespace(hash=next(commits)))
    assert stream_fingerprint("me/data", None, "train") != stream_fingerprint("me/data", None, "train")
