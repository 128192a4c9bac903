"""Reading rows from the kinds of files and datasets that people have."""

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
from row_files import COLOUR, GOOD_ROWS, turns, write_json, write_pictures


ABOUT_A_PICTURE = turns("<image>\nWhat?", "A dog.")
WITHOUT_PICTURE = turns("Hello.", "Hello to you.")


def check_and_open(rows: Any) -> list[PILImage.Image]:
    """The pictures of rows, each of which is checked before its pictures are opened."""
    images = []
    for row in rows:
        check_row(row)
        images += open_images(row)
    return images


def write_parquet(folder: Path, shard: int = 0, **columns: Any) -> Path:
    """Write a shard of a parquet dataset, and return the dataset's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"train-{shard:05d}.parquet")
    return folder


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_llava_json(tmp_path: Path, name: str) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS, name)), str(tmp_path / "pictures"))
    assert [len(row_images(row)) for row in rows] == [1, 0, 2]
    assert [image.mode for image in open_images(rows[2])] == ["RGB", "RGB"]
    assert open_images(rows[0])[0].getpixel((0, 0)) == COLOUR
    assert not has_splits(str(tmp_path / name))


def test_a_stored_dataset_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    picture = write_pictures(tmp_path) / "a.png"
    stored = tmp_path / "stored"
    columns = {"images": [[str(picture)], []], "conversations": [ABOUT_A_PICTURE, WITHOUT_PICTURE]}
    Dataset.from_dict(columns).cast_column("images", List(Image())).save_to_disk(stored)

    before = sorted(stored.iterdir())
    rows = load_rows(str(stored), str(tmp_path))
    assert sorted(stored.iterdir()) == before  # no copy is written into the folder, since pictures can take 100 GB
    assert [len(row_images(row)) for row in rows] == [1, 0]
    assert check_and_open(rows)[0].getpixel((0, 0)) == COLOUR
    assert not has_splits(str(stored))


def test_a_relative_image_folder_takes_absolute_paths_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute_path = str(tmp_path / "pictures" / "a.png")
    write_json(tmp_path, [{"image": absolute_path, "images": None, "conversations": ABOUT_A_PICTURE}])
    monkeypatch.chdir(tmp_path)
    assert len(check_and_open(load_rows("data.json", "pictures"))) == 1
    assert len(check_and_open(load_rows("data.json"))) == 1


def store(folder: Path, kind: str, name: str) -> Path:
    """Store a row that names a picture, in a saved dataset or a parquet file.

    Args:
        folder: The dataset goes into its folder "stored".
        kind: "saved" for a saved dataset, or the type of the column `image` in a parquet file.
        name: The picture's path in the row.
    """
    images: dict[str, Any] = {
        "saved": [name],
        "strings": [name],
        "structs": [{"bytes": None, "path": name}],
        "lists": [[name]],
    }
    columns = {"image": images[kind], "conversations": [ABOUT_A_PICTURE]}
    if kind != "saved":
        return write_parquet(folder / "stored", **columns)
    Dataset.from_dict(columns).save_to_disk(folder / "stored")
    return folder / "stored"


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [("saved", False), ("strings", False), ("structs", False), ("lists", False), ("structs", True)],
)
def test_pictures_are_found_by_name_in_columns_of_any_kind(tmp_path: Path, kind: str, streaming: bool) -> None:
    write_pictures(tmp_path)
    data = store(tmp_path, kind, "a.png")
    link = tmp_path / "link"
    link.symlink_to("pictures")
    (image,) = check_and_open(load_rows(str(data), str(link), streaming=streaming))
    assert image.getpixel((0, 0)) == COLOUR


def test_pictures_of_a_dataset_are_found_in_its_folder_alone(tmp_path: Path) -> None:
    data = store(tmp_path, "saved", "a.png")
    picture = data / "a.png"
    (write_pictures(tmp_path) / "a.png").rename(picture)
    assert len(check_and_open(load_rows(str(data)))) == 1

    # Another dataset names the same picture, which is outside its folder.
    other_data = store(tmp_path / "other", "saved", str(picture))
    with pytest.raises(BadRowError, match=r"stored, row 0: image .*a.png is outside the image folder .*set one"):
        check_and_open(load_rows(str(other_data)))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("encoded", ["binary", "list", "struct", "list of structs"])
def test_encoded_pictures_of_any_column_are_read(tmp_path: Path, encoded: str, streaming: bool) -> None:
    pictures = write_pictures(tmp_path)
    picture = (pictures / "a.png").read_bytes()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = {
        "binary": pa.array([picture, None], pa.binary()),
        "list": pa.array([[picture], None], pa.list_(pa.binary())),
        "struct": pa.array([{"bytes": picture, "path": "/etc/passwd"}, None], struct),
        "list of structs": pa.array([[{"bytes": picture, "path": None}], []], pa.list_(struct)),
    }[encoded]
    stored = write_parquet(tmp_path / "stored", image=column, conversations=[ABOUT_A_PICTURE, WITHOUT_PICTURE])
    (image,) = check_and_open(load_rows(str(stored), streaming=streaming))
    assert image.getpixel((0, 0)) == COLOUR


ROW = json.dumps({"conversations": turns("Hello.", "Grüße.")}, ensure_ascii=False)
# Files of one row: with a byte-order mark; with blank lines and a suffix in capitals; with Unicode's line separator,
# at which a JSON line doesn't end.
FILES = {
    "bom.json": b"\xef\xbb\xbf" + f"[{ROW}]".encode(),
    "rows.JsonL": f"\n{ROW}\r\n\n".encode(),
    "separator.jsonl": json.dumps({"conversations": turns("a\u2028b", "c")}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_json_of_many_spellings_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    (row,) = load_rows(str(tmp_path / name))
    check_row(row)


# The content of a file, and the message about it.
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
    """A ValueError in our own code, such as one of unpacking, isn't reported as a fault of the rows."""
    # A row of no other test: it would come from the cache, without being read again.
    path = write_json(tmp_path, [{"conversations": turns("Is this row cached?", "No.")}])
    if kind != "json":
        path = write_parquet(tmp_path / "stored", messages=[[{"role": "user", "content": "Hi."}]])

    def fail(fields: Row) -> Row:
        raise ValueError("too many values to unpack")

    for module in ("columns", "json_files", "loading"):
        monkeypatch.setattr(f"conversations.{module}.read_row", fail)
    with pytest.raises((ValueError, DatasetGenerationError)) as error:
        list(load_rows(str(path), streaming=kind == "stream"))
    assert not isinstance(error.value, UserError)


def test_a_column_of_numbers_in_place_of_pictures_is_refused(tmp_path: Path) -> None:
    stored = write_parquet(tmp_path / "stored", image=[1], conversations=[ABOUT_A_PICTURE])
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
    json_file = str(write_json(tmp_path, GOOD_ROWS))
    rows = Dataset.from_dict({"images": [[]], "conversations": [json.dumps(WITHOUT_PICTURE)]})
    two_splits = str(tmp_path / "two")
    DatasetDict({"train": rows, "test": rows}).save_to_disk(two_splits)
    parquet_folder = tmp_path / "parquet"
    parquet_folder.mkdir()
    rows.to_parquet(parquet_folder / "train.parquet")

    for name, message in (
        (json_file, "data.json: it has the splits train and no configurations, so no 'dev'"),
        (two_splits, "two: it has the splits train, test and no configurations, so no 'dev'"),
        (str(parquet_folder), r"parquet: .*split.*dev.*\['train'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(name, split="dev")
    with pytest.raises(ValueError, match="no configurations, so no 'other'"):
        load_rows(json_file, config="other")

    assert has_splits(two_splits)
    assert len(load_rows(two_splits, split="test")) == 1


def test_a_row_of_a_stream_is_named_by_its_text(tmp_path: Path) -> None:
    images = pa.array([[]], pa.list_(pa.string()))
    folder = write_parquet(tmp_path / "rows", images=images, conversations=[turns("Say.")])
    (row,) = load_rows(str(folder), streaming=True)
    with pytest.raises(BadRowError, match=rf"{folder}, row \[.*Say\..*no assistant turn"):
        check_row(row)


def test_the_fingerprint_of_a_stream_changes_with_its_data_split_and_configuration(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "here" / "stored", conversations=["One."])
    first = stream_fingerprint(str(folder), None, "train")
    moved = shutil.move(folder, tmp_path / "there")
    assert stream_fingerprint(str(moved), None, "train") == first

    other_split = stream_fingerprint(str(moved), None, "test")
    other_configuration = stream_fingerprint(str(moved), "other", "train")
    write_parquet(Path(moved), shard=1, conversations=["Two."])
    one_more_shard = stream_fingerprint(str(moved), None, "train")
    assert len({first, other_split, other_configuration, one_more_shard}) == 4


def test_the_fingerprint_of_a_json_file_changes_with_its_content_alone(tmp_path: Path) -> None:
    path = write_json(tmp_path, GOOD_ROWS)
    first = stream_fingerprint(str(path), None, "train")
    moved = shutil.move(path, tmp_path / "moved.json")
    assert stream_fingerprint(str(moved), None, "train") == first

    changed_row = GOOD_ROWS[0] | {"image": "b.png"}  # the file's size stays the same
    path = write_json(tmp_path, [changed_row, *GOOD_ROWS[1:]])
    assert stream_fingerprint(str(path), None, "train") != first


def test_the_fingerprint_of_a_dataset_on_the_hub_changes_with_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = []
    for commit in ("a", "b"):
        builder = SimpleNamespace(hash=commit)
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, builder=builder: builder)
        prints.append(stream_fingerprint("me/data", None, "train"))
    assert prints[0] != prints[1]
