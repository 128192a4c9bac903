"""Reading rows as the field ships them."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Image, List, load_dataset
from PIL import Image as PILImage

from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.pictures import open_images
from conversations.rows import BadRowError, check_row, row_images, row_turns, to_messages
from row_files import GOOD_ROWS, turns, write_json, write_tar


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_llava_json(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, GOOD_ROWS, name)
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    assert [len(row_images(row)) for row in rows] == [1, 0, 2]
    assert [image.mode for image in open_images(rows[2])] == ["RGB", "RGB"]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("layout", ["image", "images", "parquet"])
def test_dataset_with_pictures_inside(tmp_path: Path, layout: str) -> None:
    write_json(tmp_path, [])
    picture = str(tmp_path / "pictures" / "a.png")
    column = "images" if layout == "images" else "image"
    dataset = Dataset.from_dict(
        {
            "id": ["x", "y"],
            column: [[picture], []] if layout == "images" else [picture, None],
            "conversations": [turns("<image>\nWhat?", "A dog."), turns("Hello.", "Hello to you.")],
        }
    )
    if layout == "parquet":
        (tmp_path / "stored").mkdir()
        dataset.cast_column(column, Image()).to_parquet(tmp_path / "stored" / "train-00000-of-00001.parquet")
    else:
        feature = dataset.cast_column(column, Image()) if layout == "image" else dataset
        feature.save_to_disk(tmp_path / "stored")
    if layout == "parquet":
        assert has_splits(str(tmp_path / "stored"))
        assert not has_splits(str(tmp_path / "stored" / "*.parquet"))  # a glob names the files of one
    rows = load_rows(str(tmp_path / "stored"), image_folder=str(tmp_path))
    assert [len(row_images(row)) for row in rows] == [1, 0]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)
    assert to_messages(rows[1]) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hello to you."},
    ]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"data.json is not valid JSON: it is not a list of rows"):
        load_rows(str(tmp_path / "data.json"))
    (tmp_path / "torn.jsonl").write_text('{"conversations": []}\n{"conversations": [')
    with pytest.raises(ValueError, match=r"torn.jsonl is not valid JSONL"):
        load_rows(str(tmp_path / "torn.jsonl"))
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "stored")
    with pytest.raises(ValueError, match="no column 'conversations'"):
        load_rows(str(tmp_path / "stored"))


def test_hub_loading_is_the_libraries_own(tmp_path: Path) -> None:
    # What is not a file or a saved dataset goes to load_dataset, which knows folders and the Hub alike.
    write_json(tmp_path, [])
    expected = load_dataset(str(tmp_path / "pictures"), split="train")
    assert "image" in expected.column_names
    with pytest.raises(ValueError, match="no column 'conversations'"):
        load_rows(str(tmp_path / "pictures"))


ASKED = turns("<image>\nWhat?", "A dog.")


def read_whole(rows: Any) -> list[PILImage.Image]:
    """The pictures of rows that are checked first, as training does."""
    images = []
    for row in rows:
        check_row(row)
        images += open_images(row)
    return images


def test_a_relative_image_folder_takes_absolute_paths_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"image": str(tmp_path / "pictures" / "a.png"), "conversations": ASKED}]
    write_json(tmp_path, rows)
    monkeypatch.chdir(tmp_path)
    assert len(read_whole(load_rows("data.json", "pictures"))) == 1
    assert len(read_whole(load_rows("data.json"))) == 1


def store(folder: Path, kind: str, names: list[str | None]) -> Path:
    """Rows with a picture each, given by name, in a file or dataset of a kind."""
    marks = [{"image": name, "conversations": ASKED if name else turns("Hello.", "Hi.")} for name in names]
    if kind == "json":
        return write_json(folder, marks)
    write_json(folder, [])
    (folder / "stored").mkdir(exist_ok=True)
    column: list[Any] = list(names)
    if kind == "structs":
        column = [{"bytes": None, "path": name} for name in names]
    elif kind == "lists":
        column = [[name] for name in names]
    dataset = Dataset.from_dict({"image": column, "conversations": [row["conversations"] for row in marks]})
    if kind == "saved":
        dataset.save_to_disk(folder / "stored")
    else:
        pq.write_table(dataset.data.table, folder / "stored" / "train-00000.parquet")
    return folder / "stored"


KINDS = ["json", "saved", "strings", "structs", "lists"]


@pytest.mark.parametrize(
    ("kind", "streaming"), [*((kind, False) for kind in KINDS), ("json", True), ("structs", True)]
)
def test_links_inside_the_folder_and_to_it_are_followed(tmp_path: Path, kind: str, streaming: bool) -> None:
    write_json(tmp_path, [])
    (tmp_path / "pictures" / "link.png").symlink_to("a.png")
    (tmp_path / "door").symlink_to("pictures")
    data = store(tmp_path, kind, ["link.png", "a.png"])
    for folder in ("pictures", "door"):
        rows = load_rows(str(data), str(tmp_path / folder), streaming=streaming)
        assert len(read_whole(rows)) == 2, folder


def test_pictures_of_a_dataset_are_found_in_its_folder(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    data = store(tmp_path, "saved", ["pictures/a.png", "pictures/b.png"])
    (tmp_path / "pictures").rename(data / "pictures")
    (tmp_path / "door").symlink_to(data)
    for folder in (data, tmp_path / "door"):
        assert len(read_whole(load_rows(str(folder)))) == 2


def test_a_saved_dataset_holds_its_pictures(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    picture = str(tmp_path / "pictures" / "a.png")
    dataset = Dataset.from_dict({"image": [picture], "conversations": [ASKED]})
    dataset.cast_column("image", Image()).save_to_disk(tmp_path / "stored")
    assert len(read_whole(load_rows(str(tmp_path / "stored")))) == 1
    dataset.save_to_disk(tmp_path / "paths")
    with pytest.raises(BadRowError, match=r"paths, row 0: image .*a.png is outside the image folder .*set one"):
        read_whole(load_rows(str(tmp_path / "paths")))


ENCODED = ["binary", "large_binary", "list", "struct", "struct with an address", "struct of bytes", "list of structs"]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("encoded", ENCODED)
def test_encoded_pictures_of_any_column_are_read(tmp_path: Path, encoded: str, streaming: bool) -> None:
    write_json(tmp_path, [])
    picture = (tmp_path / "pictures" / "a.png").read_bytes()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = {
        "binary": pa.array([picture, None], pa.binary()),
        "large_binary": pa.array([picture, None], pa.large_binary()),
        "list": pa.array([[picture], None], pa.list_(pa.binary())),
        "struct": pa.array([{"bytes": picture, "path": "/etc/passwd"}, None], struct),
        "struct with an address": pa.array([{"bytes": picture, "path": "https://a.b/c.png"}, None], struct),
        "struct of bytes": pa.array([{"bytes": picture}, None], pa.struct({"bytes": pa.binary()})),
        "list of structs": pa.array([[{"bytes": picture, "path": None}], []], pa.list_(struct)),
    }[encoded]
    conversations = [ASKED, turns("Hello.", "Hi.")]
    (tmp_path / "stored").mkdir()
    table = pa.table({"image": column, "conversations": conversations})
    pq.write_table(table, tmp_path / "stored" / "train-00000.parquet")
    (read,) = read_whole(load_rows(str(tmp_path / "stored"), streaming=streaming))
    assert read.getpixel((0, 0)) == (1, 2, 3)


def test_a_column_of_no_pictures_is_named(tmp_path: Path) -> None:
    for number, (image, kind) in enumerate(((7, r"Value\('int64'\)"), ([["a.png"]], r"List\(List\(.*"))):
        stored = tmp_path / str(number)
        Dataset.from_dict({"image": [image], "conversations": [ASKED]}).save_to_disk(stored)
        with pytest.raises(ValueError, match=rf"{stored}: the column of pictures holds {kind}, not pictures"):
            load_rows(str(stored))


def test_loading_lists_of_pictures_writes_nothing(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    dataset = Dataset.from_dict({"images": [[str(tmp_path / "pictures" / "a.png")]], "conversations": [ASKED]})
    dataset.cast_column("images", List(Image())).save_to_disk(tmp_path / "stored")
    before = sorted((tmp_path / "stored").iterdir())
    rows = load_rows(str(tmp_path / "stored"))
    assert sorted((tmp_path / "stored").iterdir()) == before
    assert len(read_whole(rows)) == 1


ROW = json.dumps({"conversations": turns("Hello.", "Grüße.")}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.json", b"\xef\xbb\xbf" + f"[{ROW}]".encode()),
        ("bom.jsonl", b"\xef\xbb\xbf" + ROW.encode()),
        ("LOUD.JSON", f"[{ROW}]".encode()),
        ("rows.ndjson", f"{ROW}\n{ROW}\n".encode()),
        ("rows.JsonL", f"\n{ROW}\r\n\n".encode()),
        ("breaks.jsonl", json.dumps({"conversations": turns("a\u2028b", "c")}, ensure_ascii=False).encode()),
    ],
)
def test_json_of_many_spellings_is_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    rows = load_rows(str(tmp_path / name))
    assert len(rows) == content.count(b"conversations")
    check_row(rows[0])


WRONG_FILES = {
    "latin-1": ("x.json", f"[{ROW}]".encode("latin-1"), r"is not UTF-8, see byte \d+; save it as UTF-8"),
    "UTF-16": ("x.jsonl", f"[{ROW}]".encode("utf-16"), "is not UTF-8, see byte 0; save it as UTF-8"),
    "empty": ("x.json", b"", "is not valid JSON: Expecting value"),
    "blank": ("x.jsonl", b"\n \n", "has no rows"),
    "no rows": ("x.json", b"[]", "has no rows"),
    "null": ("x.json", b"null", "is not a list of rows"),
    "a line that is no row": ("x.jsonl", ROW.encode() + b"\n\n[1]\n", r"x.jsonl, line 3 is not a row.*: \[1\]"),
    "a row that is no row": ("x.json", f"[{ROW}, 7]".encode(), "x.json, row 1 is not a row.*: 7"),
    "a torn line": ("x.jsonl", ROW.encode() + b'\n{"conv', r"is not valid JSONL: line 2: "),
    "lines in a list": ("x.json", f"{ROW}\n{ROW}".encode(), r"not valid JSON: .*line 2.*name the file .jsonl"),
    "a deep nest": ("x.json", b"[" * 100_000, "x.json is not valid JSON: .*recursion"),
    "text": ("x.txt", b"Hello.", r"x.txt is not a file of rows: give .json, .jsonl or .ndjson"),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_files_that_hold_no_rows_are_named_with_the_cause(tmp_path: Path, wrong: str) -> None:
    name, content, message = WRONG_FILES[wrong]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


def test_folders_that_hold_no_rows_are_named(tmp_path: Path) -> None:
    for name in ("gone.json", "gone"):
        with pytest.raises((FileNotFoundError, ConnectionError), match=name):
            load_rows(str(tmp_path / name))
    path = write_json(tmp_path, GOOD_ROWS)
    with pytest.raises(ValueError, match=r"image folder .*gone does not exist"):
        load_rows(str(path), str(tmp_path / "gone"))
    Dataset.from_dict({"images": [["a"]], "conversations": ["[]"]}).select([]).save_to_disk(tmp_path / "stored")
    with pytest.raises(ValueError, match="stored has no rows"):
        load_rows(str(tmp_path / "stored"))
    (tmp_path / "parquet").mkdir()
    table = pa.table({"images": pa.array([], pa.list_(pa.string())), "conversations": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "parquet" / "train.parquet")
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"parquet (has no rows|can't be read: .* got 0)"):
            load_rows(str(tmp_path / "parquet"), streaming=streaming)
    (tmp_path / "parquet" / "train.parquet").write_bytes(b"PAR1")
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"parquet(:| can't be read:) .*"):
            load_rows(str(tmp_path / "parquet"), streaming=streaming)


def test_an_unknown_split_or_configuration_is_an_error_with_those_there_are(tmp_path: Path) -> None:
    path = str(write_json(tmp_path, GOOD_ROWS))
    one = Dataset.from_dict({"images": [[]], "conversations": [json.dumps(turns("Hello.", "Hi."))]})
    one.save_to_disk(tmp_path / "one")
    DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    (tmp_path / "parquet").mkdir()
    one.to_parquet(tmp_path / "parquet" / "train.parquet")
    for name, message in (
        (path, "data.json has one split, train, so there is no 'dev'"),
        (str(tmp_path / "one"), "one is a dataset without splits, so there is no 'dev'"),
        (str(tmp_path / "two"), "two has no split 'dev'; give one of train, test"),
        (str(tmp_path / "parquet"), r"parquet: .*split.*dev.*\['train'\]"),
    ):
        for streaming in (False, True):
            with pytest.raises(ValueError, match=message):
                load_rows(name, split="dev", streaming=streaming)
    assert len(load_rows(str(tmp_path / "two"), split="test")) == 1
    for name in (path, str(tmp_path / "one")):
        with pytest.raises(ValueError, match=r"has no configurations, so there is no 'other'"):
            load_rows(name, config="other")
    with pytest.raises(ValueError, match=r"parquet: .*'other' not found. Available: \['default'\]"):
        load_rows(str(tmp_path / "parquet"), config="other")


def test_a_picture_is_not_lost_to_an_empty_list_of_pictures(tmp_path: Path) -> None:
    path = write_json(tmp_path, [{"image": "a.png", "images": None, "conversations": ASKED}])
    assert len(read_whole(load_rows(str(path), str(tmp_path / "pictures")))) == 1


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    PILImage.new("L", (4, 4), shade).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", ["tars", "tars/*.tar"])
def test_tars_are_read_as_a_stream(tmp_path: Path, name: str) -> None:
    asked = [turns("<image>" * count + "What?", "Yes.") for count in range(3)]
    write_tar(tmp_path / "tars" / "train-0.tar", {
        "a.png": picture(10), "a.json": {"id": 1, "image": "/etc/passwd", "conversations": asked[1]},
        "b.json": {"id": "text", "conversations": asked[0]},
        "c.10.png": picture(30), "c.2.png": picture(20), "c.json": asked[2],
    })  # fmt: skip
    write_tar(tmp_path / "tars" / "train-1.tar", {"part/d.json": asked[1], "part/d.png": picture(40)})
    stream = load_rows(str(tmp_path / name), streaming=True)
    assert stream.num_shards == 2
    rows = list(stream)
    # By their numbers, which the tar holds in another order; and of the members alone.
    assert [[image.getpixel((0, 0))[0] for image in open_images(row)] for row in rows] == [[10], [], [20, 30], [40]]
    for row, count in zip(rows, (1, 0, 2, 1), strict=True):
        assert row_turns(row) == asked[count]
        check_row(row)
    sources = [f"{tmp_path}/tars/train-{tar}.tar, {key}" for tar, key in ((0, "a"), (0, "b"), (0, "c"), (1, "part/d"))]
    assert [row["source"] for row in rows] == sources
    with pytest.raises(ValueError, match="TAR archives"):
        load_rows(str(tmp_path / "tars"))


def test_rows_of_a_parquet_stream_are_named_by_their_id_or_text(tmp_path: Path) -> None:
    for columns, place in (({"id": ["x"]}, "x"), ({}, r"\[.*Say\.")):
        folder = tmp_path / str(len(columns))
        folder.mkdir()
        images = pa.array([[]], pa.list_(pa.string()))
        pq.write_table(pa.table({**columns, "images": images, "conversations": [turns("Say.")]}), folder / "a.parquet")
        (row,) = load_rows(str(folder), streaming=True)
        with pytest.raises(BadRowError, match=f"{folder}, row {place}.*no assistant turn"):
            check_row(row)


def write_shards(folder: Path, answers: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard, answer in enumerate(answers):
        conversations = [json.dumps(turns("Say.", answer))]
        table = pa.table({"images": pa.array([[]], pa.list_(pa.string())), "conversations": conversations})
        pq.write_table(table, folder / f"train-{shard:05d}.parquet")
    return folder


def test_the_fingerprint_of_a_stream_is_of_the_files_it_reads(tmp_path: Path) -> None:
    stored = write_shards(tmp_path / "here" / "stored", ["One.", "Two."])
    first = stream_fingerprint(str(stored), None, "train")
    assert stream_fingerprint(str(shutil.move(stored, tmp_path / "there")), None, "train") == first
    stored = tmp_path / "there"
    assert stream_fingerprint(str(stored), "default", "train") != first
    write_shards(stored, ["One.", "A longer answer."])
    longer = stream_fingerprint(str(stored), None, "train")
    write_shards(stored, ["One.", "A longer answer.", "Three."])
    assert len({first, longer, stream_fingerprint(str(stored), None, "train")}) == 3

    path = write_json(tmp_path, GOOD_ROWS)
    before = stream_fingerprint(str(path), None, "train")
    assert stream_fingerprint(str(shutil.move(path, tmp_path / "moved.json")), None, "train") == before
    swapped = [{**GOOD_ROWS[0], "image": "b.png"}, *GOOD_ROWS[1:]]  # of the same length
    assert stream_fingerprint(str(write_json(tmp_path, swapped)), None, "train") != before

    one, two = (Dataset.from_dict({"images": [[]] * n, "conversations": ["[]"] * n}) for n in (1, 999))
    DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    before = stream_fingerprint(saved, None, "train")
    assert before != stream_fingerprint(saved, None, "test")
    list(load_rows(saved, streaming=True))
    assert stream_fingerprint(saved, None, "train") == before
    DatasetDict({"train": two}).save_to_disk(tmp_path / "other")
    assert before != stream_fingerprint(str(tmp_path / "other"), None, "train")


def test_the_fingerprint_of_a_stream_from_the_hub_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = set()
    for commit in ("a" * 40, "b" * 40):
        builder = SimpleNamespace(hash=commit)
        monkeypatch.setattr("conversations.loading.load_dataset_builder", lambda *_, builder=builder: builder)
        prints |= {stream_fingerprint("me/data", None, split) for split in ("train", "test")}
        prints |= {stream_fingerprint("me/data", "large", "train")}
    assert len(prints) == 6
