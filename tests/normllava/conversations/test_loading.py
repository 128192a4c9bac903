"""`load_rows` reads JSON files, parquet files and saved datasets, and names what it can't read."""

import json
import shutil
import subprocess
import sys
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

from normllava.conversations.loading import has_splits, load_rows, stream_fingerprint
from normllava.conversations.pictures import open_images
from normllava.conversations.rows import BadRowError, Row, check_row, row_images
from normllava.errors import UserError
from row_files import COLOUR, GOOD_ROWS, turns, write_json, write_pictures


# Two conversations.
ABOUT_A_PICTURE = turns("<image>\nWhat?", "A dog.")
WITHOUT_PICTURE = turns("Hello.", "Hello to you.")


def check_and_open(rows: Any) -> list[PILImage.Image]:
    """Check each row with `check_row`, and return the pictures of all rows."""
    images = []
    for row in rows:
        check_row(row)
        images += open_images(row)
    return images


def write_parquet(folder: Path, shard: int = 0, **columns: Any) -> Path:
    """Write a parquet file with these columns, as one shard of the dataset in `folder`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"train-{shard:05d}.parquet")
    return folder


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_rows_and_pictures_of_a_json_file_are_read(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, GOOD_ROWS, name)
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    assert [len(row_images(row)) for row in rows] == [1, 0, 2]
    assert [image.mode for image in open_images(rows[2])] == ["RGB", "RGB"]
    (image,) = open_images(rows[0])
    assert image.getpixel((0, 0)) == COLOUR
    assert not has_splits(str(path))


# The turns of the rows of a saved dataset, by the column's name. Those of `messages` are read into LLaVA's layout.
SAVED_TURNS = {
    "conversations": [ABOUT_A_PICTURE, WITHOUT_PICTURE],
    "messages": [
        [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "A dog."}],
        [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}],
    ],
}


@pytest.mark.parametrize("column", SAVED_TURNS)
def test_a_saved_dataset_is_read_and_nothing_is_written_into_its_folder(column: str, tmp_path: Path) -> None:
    picture = write_pictures(tmp_path) / "a.png"
    saved = tmp_path / "saved"
    columns = {"images": [[str(picture)], []], column: SAVED_TURNS[column]}
    Dataset.from_dict(columns).cast_column("images", List(Image())).save_to_disk(saved)

    files_before = sorted(saved.iterdir())
    rows = load_rows(str(saved), str(tmp_path))
    assert [len(row_images(row)) for row in rows] == [1, 0]
    (image,) = check_and_open(rows)
    assert image.getpixel((0, 0)) == COLOUR
    assert sorted(saved.iterdir()) == files_before  # a copy of the pictures could take 100 GB
    assert not has_splits(str(saved))


def test_an_absolute_path_inside_a_relative_image_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute_path = str(tmp_path / "pictures" / "a.png")
    write_json(tmp_path, [{"image": absolute_path, "images": None, "conversations": ABOUT_A_PICTURE}])
    monkeypatch.chdir(tmp_path)
    assert len(check_and_open(load_rows("data.json", image_folder="pictures"))) == 1
    # Without an image folder, paths are relative to the folder that holds data.json.
    assert len(check_and_open(load_rows("data.json"))) == 1


def write_dataset(folder: Path, kind: str, picture_name: str) -> Path:
    """Write a dataset of one row that names a picture.

    Args:
        folder: Where the dataset's folder "stored" is made.
        kind: "saved" for a dataset that `save_to_disk` writes, otherwise the type of the column `image` in a parquet
            file.
        picture_name: The picture's path in the row.

    Returns:
        The dataset's folder.
    """
    image_columns: dict[str, Any] = {
        "saved": [picture_name],
        "strings": [picture_name],
        "structs": [{"bytes": None, "path": picture_name}],
        "lists": [[picture_name]],
    }
    columns = {"image": image_columns[kind], "conversations": [ABOUT_A_PICTURE]}
    stored = folder / "stored"
    if kind == "saved":
        Dataset.from_dict(columns).save_to_disk(stored)
    else:
        write_parquet(stored, **columns)
    return stored


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [("saved", False), ("strings", False), ("structs", False), ("lists", False), ("structs", True)],
    ids=["saved", "strings", "structs", "lists", "stream of structs"],
)
def test_pictures_are_found_by_name_in_columns_of_any_kind(tmp_path: Path, kind: str, streaming: bool) -> None:
    write_pictures(tmp_path)
    dataset = write_dataset(tmp_path, kind, "a.png")
    link = tmp_path / "link"  # the image folder may be a link
    link.symlink_to("pictures")
    (image,) = check_and_open(load_rows(str(dataset), str(link), streaming=streaming))
    assert image.getpixel((0, 0)) == COLOUR


def test_without_an_image_folder_pictures_must_be_in_the_datasets_folder(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, "saved", "a.png")
    picture = dataset / "a.png"
    (write_pictures(tmp_path) / "a.png").rename(picture)
    assert len(check_and_open(load_rows(str(dataset)))) == 1

    # Another dataset names the same picture, which is outside its own folder.
    other_dataset = write_dataset(tmp_path / "other", "saved", str(picture))
    with pytest.raises(BadRowError, match=r"stored, row 0: image .*a.png is outside the image folder .*set one"):
        check_and_open(load_rows(str(other_dataset)))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("column_type", ["binary", "list", "struct", "list of structs"])
def test_pictures_inside_columns_of_any_type_are_read(tmp_path: Path, column_type: str, streaming: bool) -> None:
    pictures = write_pictures(tmp_path)
    picture = (pictures / "a.png").read_bytes()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    # The first row has a picture, the second has none. A path beside a picture's bytes is not opened.
    columns = {
        "binary": pa.array([picture, None], pa.binary()),
        "list": pa.array([[picture], None], pa.list_(pa.binary())),
        "struct": pa.array([{"bytes": picture, "path": "/etc/passwd"}, None], struct),
        "list of structs": pa.array([[{"bytes": picture, "path": None}], []], pa.list_(struct)),
    }
    stored = write_parquet(
        tmp_path / "stored", image=columns[column_type], conversations=[ABOUT_A_PICTURE, WITHOUT_PICTURE]
    )
    (image,) = check_and_open(load_rows(str(stored), streaming=streaming))
    assert image.getpixel((0, 0)) == COLOUR


# Rows as JSON text.
ROW = json.dumps({"conversations": turns("Hello.", "Grüße.")}, ensure_ascii=False)
ROW_WITH_LINE_SEPARATOR = json.dumps({"conversations": turns("a\u2028b", "c")}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.json", b"\xef\xbb\xbf" + f"[{ROW}]".encode()),
        ("rows.JsonL", f"\n{ROW}\r\n\n".encode()),
        ("separator.jsonl", ROW_WITH_LINE_SEPARATOR.encode()),
    ],
    ids=["byte-order mark", "capitals and blank lines", "Unicode's line separator, which ends no JSON line"],
)
def test_a_row_is_read_from_json_of_unusual_form(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (row,) = load_rows(str(path))
    check_row(row)


# The content of a file that can't be read, and a pattern of the message about it.
UNREADABLE_FILES = {
    "latin-1": (f"[{ROW}]".encode("latin-1"), r"'utf-8' codec can't decode byte .* Save it as UTF-8"),
    "a row that is no row": (f"[{ROW}, 7]".encode(), "row 1 is not a row.*: 7"),
    "a torn list": (f"[{ROW}, ".encode(), "Expecting value"),
    "a torn line": (ROW.encode() + b'\n{"conv', "line 2: Unterminated string"),
    "an empty list": (b"[]", "there are no rows"),
    "an empty file": (b"", "there are no rows"),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE_FILES.values(), ids=UNREADABLE_FILES)
def test_an_unreadable_file_is_named_with_the_cause(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}"):
        load_rows(str(path))


@pytest.mark.parametrize("kind", ["json", "parquet", "stream"])
def test_a_bug_in_this_repository_is_no_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A ValueError of `read_row` isn't reported as a fault of the rows."""
    # No other test has these rows. Otherwise they could come from the cache, without being read.
    path = write_json(tmp_path, [{"conversations": turns("Is this row cached?", "No.")}])
    if kind != "json":
        path = write_parquet(tmp_path / "stored", messages=[[{"role": "user", "content": "Is this message cached?"}]])

    def fail(fields: Row, *media_columns: Any) -> Row:
        raise ValueError("too many values to unpack")

    for module in ("columns", "json_files", "loading"):
        monkeypatch.setattr(f"normllava.conversations.{module}.read_row", fail)
    is_stream = kind == "stream"
    # If reading JSON rows fails, `datasets` raises a DatasetGenerationError from the error.
    with pytest.raises((ValueError, DatasetGenerationError)) as error:
        list(load_rows(str(path), streaming=is_stream))
    assert not isinstance(error.value, UserError)


def test_a_column_of_numbers_in_place_of_pictures_is_refused(tmp_path: Path) -> None:
    stored = write_parquet(tmp_path / "stored", image=[1], conversations=[ABOUT_A_PICTURE])
    for streaming in (False, True):
        with pytest.raises(UserError, match=rf"^{stored}: Unsupported cast from int64"):
            load_rows(str(stored), streaming=streaming)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.json: there is no such file"):
        load_rows(str(tmp_path / "gone.json"))
    # A name without a suffix may be a Hub id, so here `datasets` raises the error.
    with pytest.raises((UserError, FileNotFoundError, ConnectionError), match="gone"):
        load_rows(str(tmp_path / "gone"))

    path = write_json(tmp_path, GOOD_ROWS)
    with pytest.raises(UserError, match=r"image folder .*gone does not exist"):
        load_rows(str(path), str(tmp_path / "gone"))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ["folder", "pattern"])
@pytest.mark.parametrize("has_group", [True, False], ids=["an empty group", "no group"])
def test_an_empty_parquet_file_beside_others_is_passed_over(
    tmp_path: Path, has_group: bool, name: str, streaming: bool
) -> None:
    """A filter may leave nothing in a file. pandas writes a group of no rows then, and a closed writer no group."""
    folder = write_parquet(tmp_path / "shards", conversations=[turns("Hi.", "Hello.")])
    table = pq.read_table(folder / "train-00000.parquet")
    if has_group:
        pq.write_table(table.slice(0, 0), folder / "train-00001.parquet")
    else:
        pq.ParquetWriter(folder / "train-00001.parquet", table.schema).close()
    rows = load_rows(str(folder) if name == "folder" else f"{folder}/*.parquet", streaming=streaming)
    assert len(list(rows)) == 1


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_parquet_file_without_turns_or_rows_is_named(tmp_path: Path, streaming: bool) -> None:
    without_turns = write_parquet(tmp_path / "turns", text=["a"])
    problem = "no turns: the columns are text, and turns are read from conversations"
    with pytest.raises(UserError, match=rf"^{without_turns}: {problem}"):
        load_rows(str(without_turns), streaming=streaming)

    without_rows = write_parquet(tmp_path / "rows", conversations=pa.array([], pa.string()))
    with pytest.raises(UserError, match=rf"^{without_rows}: "):
        load_rows(str(without_rows), streaming=streaming)


def one_row_dataset() -> Dataset:
    return Dataset.from_dict({"images": [[]], "conversations": [json.dumps(WITHOUT_PICTURE)]})


def test_splits_of_a_saved_dataset_are_read(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    DatasetDict({"train": one_row_dataset(), "test": one_row_dataset()}).save_to_disk(saved)
    assert has_splits(saved)
    assert len(load_rows(saved, split="test")) == 1
    with pytest.raises(UserError, match="saved: it has the splits train, test and no configurations, so no 'dev'"):
        load_rows(saved, split="dev")


def test_an_unknown_split_of_a_parquet_folder_is_refused_with_the_known_splits(tmp_path: Path) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    one_row_dataset().to_parquet(folder / "train.parquet")
    with pytest.raises(UserError, match=r"parquet: .*split.*dev.*\['train'\]"):
        load_rows(str(folder), split="dev")


def test_a_json_file_has_one_split_and_no_configurations(tmp_path: Path) -> None:
    path = str(write_json(tmp_path, GOOD_ROWS))
    with pytest.raises(UserError, match=r"data.json: it has the splits train and no configurations, so no 'dev'"):
        load_rows(path, split="dev")
    with pytest.raises(UserError, match="no configurations, so no 'other'"):
        load_rows(path, config="other")


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_have_one_split_and_no_configurations(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "rows.parquet"
    one_row_dataset().to_parquet(path)
    with pytest.raises(UserError, match=r"rows.parquet: it has the splits train and no configurations, so no 'dev'"):
        load_rows(str(path), split="dev", streaming=streaming)
    with pytest.raises(UserError, match="no configurations, so no 'other'"):
        load_rows(str(path), config="other", streaming=streaming)


def test_a_row_of_a_stream_is_named_by_its_text(tmp_path: Path) -> None:
    no_images = pa.array([[]], pa.list_(pa.string()))
    folder = write_parquet(tmp_path / "rows", images=no_images, conversations=[turns("Say.")])
    (row,) = load_rows(str(folder), streaming=True)
    with pytest.raises(BadRowError, match=rf"{folder}, row \[.*Say\..*no assistant turn"):
        check_row(row)


def test_the_fingerprint_of_a_stream_changes_with_its_data_split_and_configuration(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "here" / "stored", conversations=["One."])
    first = stream_fingerprint(str(folder), config=None, split="train")
    moved = shutil.move(folder, tmp_path / "there")
    assert stream_fingerprint(str(moved), config=None, split="train") == first

    other_split = stream_fingerprint(str(moved), config=None, split="test")
    other_configuration = stream_fingerprint(str(moved), config="other", split="train")
    write_parquet(Path(moved), shard=1, conversations=["Two."])
    one_more_shard = stream_fingerprint(str(moved), config=None, split="train")
    assert len({first, other_split, other_configuration, one_more_shard}) == 4  # all differ


def test_the_fingerprint_of_a_json_file_changes_with_its_content_alone(tmp_path: Path) -> None:
    path = write_json(tmp_path, GOOD_ROWS)
    first = stream_fingerprint(str(path), config=None, split="train")
    moved = shutil.move(path, tmp_path / "moved.json")
    assert stream_fingerprint(str(moved), config=None, split="train") == first

    changed_row = GOOD_ROWS[0] | {"image": "b.png"}  # the file's size stays the same
    path = write_json(tmp_path, [changed_row, *GOOD_ROWS[1:]])
    assert stream_fingerprint(str(path), config=None, split="train") != first


def test_the_fingerprint_of_a_dataset_on_the_hub_changes_with_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint_at(commit: str) -> str:
        builder = SimpleNamespace(hash=commit)  # what `datasets` would get from the Hub
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)
        return stream_fingerprint("me/data", config=None, split="train")

    assert fingerprint_at("a") == fingerprint_at("a")
    assert fingerprint_at("a") != fingerprint_at("b")


@pytest.mark.slow
def test_a_million_short_rows_fit_into_two_gibibytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(1_000_000):
            messages = [
                {"role": "user", "content": f"What follows {number}?"},
                {"role": "assistant", "content": str(number + 1)},
            ]
            file.write(json.dumps({"id": number, "messages": messages}) + "\n")

    # A process of its own, since "VmHWM" is the highest memory that a process has ever had.
    script = (
        "import sys\n"
        "from normllava.conversations.loading import load_rows\n"
        "rows = load_rows(sys.argv[1])\n"
        "print(len(rows), rows[999_999]['source'].split(', ')[-1])\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True, check=True)
    last_row, peak_kib = done.stdout.splitlines()
    assert last_row == "1000000 row 999999"
    assert int(peak_kib) < 2 * 2**20
