"""Reading rows as the field ships them."""

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
from conversations.rows import BadRowError, row_images, to_messages
from row_files import GOOD_ROWS, NO_TOKENS, check_rows, check_stream, one_token, turns, write_json


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_llava_json(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, GOOD_ROWS, name)
    rows = check_rows(
        load_rows(str(path), str(tmp_path / "pictures")), NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl"
    )[0]
    assert [len(row_images(row)) for row in rows] == [1, 0, 2]
    assert [image.mode for image in open_images(rows[2])] == ["RGB", "RGB"]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)
    assert not (tmp_path / "bad.jsonl").exists()


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
    rows = check_rows(rows, NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl")[0]
    assert [len(row_images(row)) for row in rows] == [1, 0]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)
    assert to_messages(rows[1]) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hello to you."},
    ]


def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("../secret.png", "/etc/passwd", "a/../../secret.png")):
        rows = [{"image": name, "conversations": turns("<image>\nWhat?", "A dog.")}]
        path = write_json(tmp_path, rows, f"{number}.json")
        with pytest.raises(BadRowError, match=r"row 0: image .* is outside the image folder .*pictures"):
            load_rows(str(path), str(tmp_path / "pictures"))
    inside = [{"image": "b/../a.png", "conversations": turns("<image>\nWhat?", "A dog.")}]
    assert load_rows(str(write_json(tmp_path, inside)), str(tmp_path / "pictures"))[0]["images"][0].endswith("/a.png")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"data.json is not a list of rows"):
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


def read_whole(rows: Any, folder: Path) -> list[PILImage.Image]:
    """The pictures of rows that are checked first, as training does."""
    if isinstance(rows, Dataset):
        rows = check_rows(rows, NO_TOKENS, one_token, "skip", folder / "bad.jsonl")[0]
    else:
        rows = check_stream(rows, NO_TOKENS, one_token, "skip", folder / "bad.jsonl")
    return [image for row in rows for image in open_images(row)]


def test_a_relative_image_folder_takes_absolute_paths_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"image": str(tmp_path / "pictures" / "a.png"), "conversations": ASKED}]
    write_json(tmp_path, rows)
    monkeypatch.chdir(tmp_path)
    assert len(read_whole(load_rows("data.json", "pictures"), tmp_path)) == 1
    assert len(read_whole(load_rows("data.json"), tmp_path)) == 1


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


WAYS_OUT = [
    *(("json", way, False) for way in ("absolute", "up", "link", "linked folder", "link into a twin")),
    *((kind, way, False) for kind in KINDS[1:] for way in ("absolute", "link")),
    *((kind, "link", True) for kind in ("json", "structs", "lists")),
]


@pytest.mark.parametrize(("kind", "leads_out", "streaming"), WAYS_OUT)
def test_no_data_opens_a_file_outside_its_folder(tmp_path: Path, kind: str, leads_out: str, streaming: bool) -> None:
    folder = tmp_path / "pictures"
    write_json(tmp_path, [])
    (tmp_path / "pictures2").mkdir()
    for outside in (tmp_path / "secret.png", tmp_path / "pictures2" / "secret.png"):
        PILImage.new("RGB", (4, 4), (9, 9, 9)).save(outside)
    (folder / "link.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    (folder / "twin.png").symlink_to("../pictures2/secret.png")
    name = {
        "absolute": str(tmp_path / "secret.png"),
        "up": "../secret.png",
        "link": "link.png",
        "linked folder": "up/secret.png",
        "link into a twin": "twin.png",
    }[leads_out]
    data = store(tmp_path, kind, ["a.png", name])
    with pytest.raises(BadRowError, match=r", row 1: image .* is outside the image folder .*set --image_folder"):
        read_whole(load_rows(str(data), str(folder), streaming=streaming), tmp_path)
    # What is opened unchecked is no way out either.
    if kind != "json":
        (_, row) = load_rows(str(data), str(folder))
        with pytest.raises(BadRowError, match="is outside the image folder"):
            open_images(row)


@pytest.mark.parametrize(
    ("kind", "streaming"), [*((kind, False) for kind in KINDS), ("json", True), ("structs", True)]
)
def test_links_inside_the_folder_and_to_it_are_followed(tmp_path: Path, kind: str, streaming: bool) -> None:
    write_json(tmp_path, [])
    (tmp_path / "pictures" / "link.png").symlink_to("a.png")
    (tmp_path / "door").symlink_to("pictures")
    data = store(tmp_path, kind, ["link.png", str(tmp_path / "pictures" / "a.png"), None])
    for folder in ("pictures", "door"):
        rows = load_rows(str(data), str(tmp_path / folder), streaming=streaming)
        assert len(read_whole(rows, tmp_path)) == 2, folder


def test_pictures_of_a_dataset_are_found_in_its_folder(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    data = store(tmp_path, "saved", ["pictures/a.png", "pictures/b.png"])
    (tmp_path / "pictures").rename(data / "pictures")
    (tmp_path / "door").symlink_to(data)
    for folder in (data, tmp_path / "door"):
        assert len(read_whole(load_rows(str(folder)), tmp_path)) == 2


def test_a_saved_dataset_holds_its_pictures(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    picture = str(tmp_path / "pictures" / "a.png")
    dataset = Dataset.from_dict({"image": [picture], "conversations": [ASKED]})
    dataset.cast_column("image", Image()).save_to_disk(tmp_path / "stored")
    assert len(read_whole(load_rows(str(tmp_path / "stored")), tmp_path)) == 1
    dataset.save_to_disk(tmp_path / "paths")
    with pytest.raises(BadRowError, match=r"paths, row 0: image .*a.png is outside .*set --image_folder"):
        read_whole(load_rows(str(tmp_path / "paths")), tmp_path)


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
    (read,) = read_whole(load_rows(str(tmp_path / "stored"), streaming=streaming), tmp_path)
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
    assert len(read_whole(rows, tmp_path)) == 1


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
    check_rows(rows, NO_TOKENS, one_token, "error", tmp_path / "bad.jsonl")


WRONG_FILES = {
    "latin-1": ("x.json", f"[{ROW}]".encode("latin-1"), r"is not UTF-8, see byte \d+; save it as UTF-8"),
    "latin-1 lines": ("x.jsonl", ROW.encode("latin-1"), "is not UTF-8, see byte"),
    "UTF-16": ("x.json", f"[{ROW}]".encode("utf-16"), "is not UTF-8, see byte 0; save it as UTF-8"),
    "UTF-16 without a mark": ("x.json", json.dumps(GOOD_ROWS).encode("utf-16-le"), "is not UTF-8, see the null bytes"),
    "UTF-32": ("x.jsonl", json.dumps(GOOD_ROWS[0]).encode("utf-32-be"), "is not UTF-8, see the null bytes"),
    "empty": ("x.json", b"", "is empty"),
    "blank": ("x.jsonl", b"\n \n", "is empty"),
    "no rows": ("x.json", b"[]", "has no rows"),
    "null": ("x.json", b"null", "is not a list of rows"),
    "a line that is no row": ("x.jsonl", ROW.encode() + b"\n\n[1]\n", r"x.jsonl, line 3 is not a row.*: \[1\]"),
    "a list in lines": ("x.jsonl", f"[{ROW}]".encode(), "x.jsonl, line 1 is not a row"),
    "a row that is no row": ("x.json", f"[{ROW}, 7]".encode(), "x.json, row 1 is not a row.*: 7"),
    "a row of null": ("x.json", b"[null]", "x.json, row 0 is not a row.*: null"),
    "a torn line": ("x.jsonl", ROW.encode() + b'\n{"conv', r"is not valid JSONL: line 2: .* near"),
    "lines in a list": ("x.json", f"{ROW}\n{ROW}".encode(), r"not valid JSON: .*name the file .jsonl"),
    "single quotes": ("x.json", b"[{'conversations': []}]", r"not valid JSON: .* near \"\[\{'conv"),
    "a deep nest": ("x.json", b"[" * 100_000, "x.json is not valid JSON: .*recursion"),
    "an endless number": ("x.json", b'[{"id": ' + b"1" * 5000 + b"}]", "x.json is not valid JSON: .*digits"),
    "text": ("x.txt", b"Hello.", r"x.txt is not a file of rows: give .json, .jsonl or .ndjson"),
    "packed": ("x.json.gz", b"\x1f\x8b", "x.json.gz is not a file of rows"),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_files_that_hold_no_rows_are_named_with_the_cause(tmp_path: Path, wrong: str) -> None:
    name, content, message = WRONG_FILES[wrong]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


def test_folders_that_hold_no_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").mkdir()
    with pytest.raises(ValueError, match=r"rows.json is a folder; give a file in it"):
        load_rows(str(tmp_path / "rows.json"))
    for name in ("gone.json", "gone"):
        with pytest.raises((FileNotFoundError, ConnectionError), match=name):
            load_rows(str(tmp_path / name))
    path = write_json(tmp_path, GOOD_ROWS)
    with pytest.raises(ValueError, match=r"image folder .*gone does not exist; fix --image_folder"):
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
    assert len(read_whole(load_rows(str(path), str(tmp_path / "pictures")), tmp_path)) == 1


def test_rows_of_a_stream_are_named_by_shard_whoever_reads_it(tmp_path: Path) -> None:
    (tmp_path / "stored").mkdir()
    for shard in range(3):
        conversations = [json.dumps(turns("Say.", f"{shard}.{number}")) for number in range(2 + shard)]
        table = pa.table(
            {"images": pa.array([[]] * (2 + shard), pa.list_(pa.string())), "conversations": conversations}
        )
        pq.write_table(table, tmp_path / "stored" / f"train-{shard:05d}.parquet")
    stream = load_rows(str(tmp_path / "stored"), streaming=True)
    assert stream.num_shards == 3
    parts = [list(stream.read(shard)) for shard in range(3)]
    assert list(stream) == [row for part in parts for row in part]
    assert [len(part) for part in parts] == [2, 3, 4]
    for shard, part in enumerate(parts):
        for start in range(len(part) + 1):
            assert list(stream.read(shard, start)) == part[start:]
    for row in stream:
        shard, number = json.loads(row["conversations"])[1]["value"].split(".")
        assert row["source"] == f"{tmp_path / 'stored'}, shard {shard}, row {number}"


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
        files = {"train": [f"hf://datasets/me/data@{commit}/train.parquet"]}
        builder = SimpleNamespace(config=SimpleNamespace(data_files=files), hash="x")
        monkeypatch.setattr("conversations.loading.load_dataset_builder", lambda builder=builder, **_: builder)
        prints |= {stream_fingerprint("me/data", None, split) for split in ("train", "test")}
        prints |= {stream_fingerprint("me/data", "large", "train")}
    assert len(prints) == 6
