"""Rows in the layouts that people have them in: read alike from JSON, parquet and streams, and nothing lost unsaid."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as PILImage

from common.errors import UserError
from conversations.layouts import read_row
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, check_row, row_turns
from row_files import turns, write_json


ASKED = turns("<image>\nWhat?", "A dog.")
PICTURE_PART = {"type": "image"}
TEXT_PART = {"type": "text", "text": "What?"}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ANSWER = message("assistant", "A dog.")
# Each asks "What?" about a picture, and is answered "A dog.".
LAYOUTS: dict[str, dict[str, Any]] = {
    "LLaVA": {"image": "a.png", "conversations": ASKED},
    "ShareGPT's roles": {
        "image": "a.png",
        "conversations": [{"from": "user", "value": "<image>\nWhat?"}, {"from": "assistant", "value": "A dog."}],
    },
    "roles in conversations": {"image": "a.png", "conversations": [message("user", "<image>\nWhat?"), ANSWER]},
    "messages with a mark": {"images": ["a.png"], "messages": [message("user", "<image>\nWhat?"), ANSWER]},
    "messages without a mark": {"images": ["a.png"], "messages": [message("user", "What?"), ANSWER]},
    "messages of parts": {
        "images": ["a.png"],
        "messages": [
            message("user", [PICTURE_PART, TEXT_PART]),
            message("assistant", [{"type": "text", "text": "A dog."}]),
        ],
    },
    "prompt and completion": {"image": "a.png", "prompt": "What?", "completion": "A dog."},
    "prompt and completion of messages": {
        "images": ["a.png"],
        "prompt": [message("user", [PICTURE_PART, TEXT_PART])],
        "completion": [message("assistant", [{"type": "text", "text": "A dog."}])],
    },
    "the_cauldron": {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A dog.", "source": "vqa"}]},
    "UltraChat's repeated prompt": {
        "images": ["a.png"],
        "prompt": "What?",
        "messages": [message("user", "What?"), {**ANSWER, "weight": 1}],
    },
    "turns as JSON text": {"image": "a.png", "conversations": json.dumps(ASKED)},
    "parts as a dict of lists": {
        "images": ["a.png"],
        "messages": [
            message("user", {"type": ["image", "text"], "text": [None, "What?"]}),
            message("assistant", {"type": ["text"], "text": ["A dog."]}),
        ],
    },
    "turns as a dict of lists": {
        "image": "a.png",
        "conversations": {"from": ["human", "gpt"], "value": ["<image>\nWhat?", "A dog."]},
    },
}


def write_columns(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a parquet file, their pictures as bytes."""
    picture = {"bytes": (folder / "pictures" / "a.png").read_bytes(), "path": None}
    columns: dict[str, list[Any]] = {name: [] for row in rows for name in row}
    for row in rows:
        embedded = dict(row)
        if "image" in row:
            embedded["image"] = picture
        if "images" in row:
            embedded["images"] = [picture for _ in row["images"]]
        for name, column in columns.items():
            column.append(embedded.get(name))
    pq.write_table(pa.table(columns), folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.parametrize("stored", ["JSON", "parquet", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_row(tmp_path: Path, layout: str, stored: str) -> None:
    path = write_json(tmp_path, [LAYOUTS[layout]] * 2)
    if stored != "JSON":
        path = write_columns(tmp_path, [LAYOUTS[layout]] * 2)
    rows = list(load_rows(str(path), str(tmp_path / "pictures"), streaming=stored == "stream"))

    assert len(rows) == 2
    for row in rows:
        check_row(row)
        assert row_turns(row) == ASKED
        (image,) = open_images(row)
        assert image.getpixel((0, 0)) == (1, 2, 3)


def test_pictures_inside_messages_are_read(tmp_path: Path) -> None:
    linked = {"type": "image_url", "image_url": {"url": "b.png"}}
    content = [{"type": "image", "image": "a.png"}, linked, TEXT_PART]
    path = write_json(tmp_path, [{"messages": [message("user", content), ANSWER]}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    assert row_turns(row)[0]["value"] == "<image>\n<image>\nWhat?"
    assert [image.size for image in open_images(row)] == [(8, 6), (5, 5)]

    picture = {"bytes": (tmp_path / "pictures" / "a.png").read_bytes(), "path": None}
    inside = [{"type": "image", "image": picture, "text": None}, {**TEXT_PART, "image": None}]
    asked = [message("user", inside), message("assistant", [{"type": "text", "text": "A dog.", "image": None}])]
    pq.write_table(pa.table({"messages": [asked]}), tmp_path / "inside.parquet")
    for streaming in (False, True):
        (row,) = load_rows(str(tmp_path / "inside.parquet"), streaming=streaming)
        check_row(row)
        assert row_turns(row) == ASKED
        assert open_images(row)[0].getpixel((0, 0)) == (1, 2, 3)


def test_a_system_field_is_the_first_turn(tmp_path: Path) -> None:
    rows = [
        {"image": "a.png", "system": "Be brief.", "conversations": ASKED},
        {"image": "a.png", "system": "", "conversations": ASKED},
        {"image": "a.png", "system": "Be brief.", "messages": [message("user", "What?"), ANSWER]},
    ]
    write_json(tmp_path, rows)
    for path in (tmp_path / "data.json", write_columns(tmp_path, rows)):
        first, second, third = load_rows(str(path), str(tmp_path / "pictures"))
        assert row_turns(first) == row_turns(third) == [{"from": "system", "value": "Be brief."}, *ASKED]
        assert row_turns(second) == ASKED


def test_image_and_images_are_read_by_row(tmp_path: Path) -> None:
    two = turns("<image><image>\nWhat?", "Two.")
    rows = [{"image": "a.png", "conversations": ASKED}, {"images": ["a.png", "a.png"], "conversations": two}]
    write_json(tmp_path, [{**row, "image": row.get("image", "")} for row in rows])
    for path in (tmp_path / "data.json", write_columns(tmp_path, rows)):
        assert [len(open_images(row)) for row in load_rows(str(path), str(tmp_path / "pictures"))] == [1, 2]


# A row's fields, and what is wrong with it.
BAD: dict[str, dict[str, Any]] = {
    "turn 0 is not": {"images": ["a.png"], "messages": [message("user", None), ANSWER]},
    "turn 0 is not {": {"image": "a.png", "texts": [{"user": None, "assistant": "A dog."}]},
    "there is a `completion` without a `prompt`": {
        "messages": [message("user", "Hi."), ANSWER],
        "completion": "Lost.",
    },
    "a turn has both `value` and `content`": {
        "conversations": [{"from": "human", "value": "Hi.", "content": "Lost."}]
    },
    "an answer has `weight`: 0.5": {"messages": [message("user", "Hi."), {**ANSWER, "weight": 0.5}]},
    "a part of text holds a picture": {"messages": [message("user", [{**TEXT_PART, "image": "a.png"}]), ANSWER]},
    "a picture's part holds text": {
        "images": ["a.png"],
        "messages": [message("user", [{"type": "image", "text": "Lost."}]), ANSWER],
    },
    "a part names its picture twice": {
        "messages": [message("user", [{"type": "image", "image": "a.png", "path": "b.png"}]), ANSWER],
    },
    "both `image` and `images` hold pictures": {"image": "a.png", "images": ["a.png"], "conversations": ASKED},
    "`conversations` and `messages` both have content": {"conversations": ASKED, "messages": [ANSWER]},
    "both a field `system` and a system turn": {
        "system": "Be brief.",
        "messages": [message("system", "Be long."), message("user", "Hi."), ANSWER],
    },
    "lists of different lengths": {"conversations": {"from": ["human", "gpt"], "value": ["Hi."]}},
    "neither text nor picture": {"messages": [message("user", [{"type": "video", "video": "a.mp4"}]), ANSWER]},
    "an assistant's message holds a picture": {
        "messages": [message("user", "Draw."), message("assistant", [PICTURE_PART])]
    },
    "stands for picture 1 where picture 0": {
        "images": ["a.png", "b.png"],
        "messages": [message("user", [{"type": "image", "index": 1}, {"type": "image", "index": 0}]), ANSWER],
    },
    "both in the messages and beside them": {
        "images": ["a.png"],
        "messages": [message("user", [{"type": "image", "image": "b.png"}]), ANSWER],
    },
    "`prompt` holds an answer": {
        "prompt": [message("user", "Hi."), message("assistant", "Hello."), message("user", "What?")],
        "completion": [ANSWER],
    },
    "an answer has `weight`: 0": {"messages": [message("user", "Hi."), {**ANSWER, "weight": 0}]},
    "a turn has `tool_calls`": {"messages": [message("user", "Hi."), {**ANSWER, "tool_calls": [{"name": "f"}]}]},
    "`texts` is not": {"texts": [{"question": "Hi.", "answer": "Hello."}]},
    "turn 1 is not": {"messages": [message("user", "Hi."), message("tool", "42")]},
    "a part of text contains <image>": {
        "images": ["a.png", "b.png"],
        "messages": [message("user", [PICTURE_PART, {"type": "text", "text": "What is <image>?"}]), ANSWER],
    },
}


@pytest.mark.parametrize("problem", BAD)
def test_what_would_train_something_else_is_a_bad_row(tmp_path: Path, problem: str) -> None:
    path = write_json(tmp_path, [BAD[problem], {"conversations": turns("Hi.", "Hello.")}])
    bad, good = load_rows(str(path), str(tmp_path / "pictures"))
    check_row(good)
    with pytest.raises(BadRowError, match=r"row 0: .*") as error:
        check_row(bad)
    assert problem in error.value.problem


def test_what_nothing_reads_is_named_with_its_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"id": 1, "source": "web", "image": "a.png", "caption": "", "boxes": [], "conversations": ASKED}
    rows = [row | {"caption": "a dog"}, row | {"caption": "two dogs"}, row]
    path = write_json(tmp_path, rows)
    for stored in (path, write_columns(tmp_path, rows)):
        caplog.clear()
        for _ in range(2):  # the second time, from the cache
            load_rows(str(stored), str(tmp_path / "pictures"))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [f"{stored}: nothing reads `caption`, which has content in 2 of 3 rows"] * 2

    caplog.clear()
    list(load_rows(str(tmp_path / "train.parquet"), streaming=True))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'train.parquet'}: nothing reads `caption`, which has content"
    ]


def test_what_nothing_reads_inside_turns_is_named() -> None:
    thinking = {**ANSWER, "reasoning_content": "It barks.", "name": None}
    row = read_row({"messages": [message("user", [{**TEXT_PART, "cache_control": {"type": "ephemeral"}}]), thinking]})
    assert row["unread"] == ["messages[].cache_control", "messages[].reasoning_content"]


def test_texts_of_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "a dog."}]
    assert read_row({"messages": [message("user", "Hi."), message("assistant", parts)]})["conversations"][1] == {
        "from": "gpt",
        "value": "It is a dog.",
    }


def test_rows_agree_on_empty_pictures_however_they_are_stored(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    picture = {"bytes": (tmp_path / "pictures" / "a.png").read_bytes(), "path": None}
    nothing = {"bytes": None, "path": None}
    images = [[picture, None], [None], [nothing], [], None, [picture, picture]]
    asked = [[message("user", "What?"), ANSWER]] * len(images)
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(pa.table({"images": pa.array(images, kind), "messages": asked}), tmp_path / "train.parquet")
    for streaming in (False, True):
        rows = list(load_rows(str(tmp_path / "train.parquet"), streaming=streaming))
        for row in rows:
            check_row(row)
        assert [len(open_images(row)) for row in rows] == [1, 0, 0, 0, 0, 2]


def test_pictures_inside_messages_are_read_beside_an_empty_column(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    picture = {"bytes": (tmp_path / "pictures" / "a.png").read_bytes(), "path": None}
    asked = [message("user", [{"type": "image", "image": picture, "text": None}]), message("assistant", [TEXT_PART])]
    table = pa.table({"images": pa.array([[]], pa.list_(pa.binary())), "messages": [asked]})
    pq.write_table(table, tmp_path / "train.parquet")
    (row,) = load_rows(str(tmp_path / "train.parquet"))
    check_row(row)
    assert len(open_images(row)) == 1


def test_a_row_that_json_cannot_hold_is_bad_and_stops_no_other(tmp_path: Path) -> None:
    """An unknown role keeps its turn, bytes and all."""
    part = {"type": "image", "image": {"bytes": b"?", "path": None}}
    asked = [[message("tool", [part])], [message("user", [{**part, "image": None, "type": "text", "text": "Hi."}])]]
    pq.write_table(pa.table({"messages": asked}), tmp_path / "tool.parquet")
    bad, good = load_rows(str(tmp_path / "tool.parquet"))
    with pytest.raises(BadRowError, match="turn 0 is not"):
        check_row(bad)
    check_row(good, needs_answer=False)


@pytest.mark.parametrize("name", ["images", "messages"])
def test_shards_whose_types_differ_deep_down_are_read(tmp_path: Path, name: str) -> None:
    """The first has no picture, and says nothing of what a picture is."""
    write_json(tmp_path, [])
    picture = {"bytes": (tmp_path / "pictures" / "a.png").read_bytes(), "path": None}
    texts = [message("user", [{"type": "text", "text": "Hi."}]), message("assistant", [TEXT_PART])]
    if name == "images":
        first: dict[str, Any] = {"images": [[]], "messages": [texts]}
        second: dict[str, Any] = {"images": [[picture]], "messages": [texts]}
    else:
        first = {"messages": [texts]}
        second = {"messages": [[message("user", [{"type": "image", "image": picture}]), texts[1]]]}
    (tmp_path / "shards").mkdir()
    pq.write_table(pa.table(first), tmp_path / "shards" / "train-0.parquet")
    pq.write_table(pa.table(second), tmp_path / "shards" / "train-1.parquet")
    for streaming in (False, True):
        rows = list(load_rows(str(tmp_path / "shards"), streaming=streaming))
        for row in rows:
            check_row(row)
        assert [len(open_images(row)) for row in rows] == [0, 1]


def test_a_folder_of_several_json_files_is_not_guessed_at(tmp_path: Path) -> None:
    """`load_dataset` would store the parts of one as JSON text, where the first holds texts, and train that."""
    write_json(tmp_path, [{"messages": [message("user", "Hi."), ANSWER]}], "a.json")
    write_json(tmp_path, [{"messages": [message("user", [TEXT_PART]), ANSWER]}], "b.json")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a-checkpoint.json").write_text("[]")
    problem = "holds the JSON files a.json, b.json: name the one with the rows, or a pattern"
    with pytest.raises(UserError, match=problem):
        load_rows(str(tmp_path))

    assert [row_turns(row)[0]["value"] for row in load_rows(f"{tmp_path}/*.json")] == ["Hi.", "What?"]
    (tmp_path / "b.json").unlink()
    assert len(load_rows(str(tmp_path))) == 1


def test_a_dataset_without_turns_names_its_columns(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    path = write_columns(tmp_path, [{"image": "a.png", "ground_truth": '{"total": "9"}'}])
    problem = "no turns: the columns are image, ground_truth, and turns are read from conv"
    with pytest.raises(UserError, match=problem):
        load_rows(str(path))


def test_shards_without_pictures_come_first(tmp_path: Path) -> None:
    """pandas gives a column that is all null no type."""
    picture = tmp_path / "a.png"
    PILImage.new("RGB", (4, 4), (1, 2, 3)).save(picture)
    shards = tmp_path / "shards"
    shards.mkdir()
    texts = pa.table({"image": pa.array([None, None], pa.null()), "conversations": [turns("Hi.", "Hello.")] * 2})
    pictures = pa.table({"image": [{"bytes": picture.read_bytes(), "path": None}], "conversations": [ASKED]})
    pq.write_table(texts, shards / "train-00000-of-00002.parquet")
    pq.write_table(pictures, shards / "train-00001-of-00002.parquet")
    for name in (str(shards), f"{shards}/*.parquet"):
        for streaming in (False, True):
            rows = list(load_rows(name, streaming=streaming))
            assert [len(open_images(row)) for row in rows] == [0, 0, 1]

    # A source that has no picture at all.
    (row, _) = load_rows(str(shards / "train-00000-of-00002.parquet"))
    check_row(row)


def test_names_of_files_patterns_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path, [{"image": "pictures/a.png", "conversations": ASKED}])
    write_columns(tmp_path, [LAYOUTS["LLaVA"]])
    (tmp_path / "train.parquet").rename(tmp_path / "pictures" / "train.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "llava"
    (folder / "pictures").mkdir(parents=True)
    path.rename(folder / "data.json")
    (tmp_path / "pictures" / "a.png").rename(folder / "pictures" / "a.png")

    names = ("llava", "llava/data.json", "llava/*.json", "~/llava", "pictures/train.parquet", "~/pictures/*.parquet")
    for name in names:
        (row,) = load_rows(name)
        check_row(row)
        assert open_images(row)[0].getpixel((0, 0)) == (1, 2, 3), name

    for name, problem in {
        "none/*.json": "no file matches",
        "gone.parquet": "there is no such file",
        "llava/pictures/a.png": "rows are read from files that end with",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_rows(name)


def test_a_mapping_with_one_list_is_that_list(tmp_path: Path) -> None:
    write_json(tmp_path, [])
    rows = [{"conversations": turns("Hi.", "Hello.")}] * 3
    for text in (json.dumps({"data": rows}), json.dumps({"version": 1, "data": rows}, indent=1)):
        (tmp_path / "data.json").write_text(text)
        assert len(load_rows(str(tmp_path / "data.json"))) == 3
    (tmp_path / "data.jsonl").write_text(json.dumps(rows[0]))
    assert len(load_rows(str(tmp_path / "data.jsonl"))) == 1


def test_pictures_beside_turns_are_not_copied(tmp_path: Path) -> None:
    """A dataset's pictures can take 100 GB; only its turns are written anew."""
    write_json(tmp_path, [])
    PILImage.effect_noise((500, 500), 80).save(tmp_path / "pictures" / "a.png")
    path = write_columns(tmp_path, [LAYOUTS["messages without a mark"]] * 20)
    rows = load_rows(str(path))
    assert isinstance(rows, datasets.Dataset)

    # datasets' own copy of the parquet file's content, once, and turns.
    size = max(path.stat().st_size, 20 * (tmp_path / "pictures" / "a.png").stat().st_size)
    stored = sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)
    assert stored < 1.2 * size


def test_a_picture_as_text_gives_a_short_message(tmp_path: Path) -> None:
    url = "data:image/png;base64," + "A" * 1_000_000
    images = (url, "x" * 9000)
    path = write_json(tmp_path, [{"image": image, "conversations": ASKED} for image in images])
    for row in load_rows(str(path), str(tmp_path / "pictures")):
        with pytest.raises(BadRowError) as error:
            check_row(row)
        assert len(str(error.value)) < 600


@pytest.mark.parametrize("streaming", [False, True])
def test_a_completion_beside_llavas_turns_is_not_lost(tmp_path: Path, streaming: bool) -> None:
    write_json(tmp_path, [])
    path = write_columns(tmp_path, [{"image": "a.png", "conversations": ASKED, "completion": "Lost."}])
    (row,) = load_rows(str(path), streaming=streaming)
    with pytest.raises(BadRowError, match="there is a `completion` without a `prompt`"):
        check_row(row)
