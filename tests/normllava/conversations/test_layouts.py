"""Rows of many layouts are read into the same row from JSON, parquet and streams, and bad rows are reported."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies
from PIL import Image as PILImage

from normllava.conversations.layouts import read_row
from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from normllava.conversations.rows import BadRowError, check_row, row_turns
from normllava.errors import UserError
from row_files import COLOUR, turns, write_json, write_pictures


# A conversation about one picture, as turns in LLaVA's layout.
CONVERSATION = turns("<image>\nWhat?", "A dog.")
# Its question and answer as parts of chat messages. The picture itself is in a column of the row.
PICTURE_PART = {"type": "image"}
TEXT_PART = {"type": "text", "text": "What?"}
ANSWER_PART = {"type": "text", "text": "A dog."}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ANSWER = message("assistant", "A dog.")
# The row with `CONVERSATION` and the picture a.png, in many layouts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "LLaVA": {"image": "a.png", "conversations": CONVERSATION},
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
            message("assistant", [ANSWER_PART]),
        ],
    },
    "prompt and completion": {"image": "a.png", "prompt": "What?", "completion": "A dog."},
    "prompt and completion of messages": {
        "images": ["a.png"],
        "prompt": [message("user", [PICTURE_PART, TEXT_PART])],
        "completion": [message("assistant", [ANSWER_PART])],
    },
    "the_cauldron": {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A dog.", "source": "vqa"}]},
    "UltraChat's repeated prompt": {
        "images": ["a.png"],
        "prompt": "What?",
        "messages": [message("user", "What?"), ANSWER | {"weight": 1}],  # 1 is the usual weight
    },
    "turns as JSON text": {"image": "a.png", "conversations": json.dumps(CONVERSATION)},
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


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a parquet file that holds the bytes of a.png in place of each picture's name.

    `write_pictures` must have written a.png in this folder. A column that a row lacks is null in this row.
    """
    picture = embedded_picture(folder)
    embedded_rows = []
    for row in rows:
        embedded_row = dict(row)
        if "image" in row:
            embedded_row["image"] = picture
        if "images" in row:
            embedded_row["images"] = [picture] * len(row["images"])
        embedded_rows.append(embedded_row)

    names: list[str] = []
    for row in embedded_rows:
        for name in row:
            if name not in names:
                names.append(name)
    columns = {name: [row.get(name) for row in embedded_rows] for name in names}
    path = folder / "train.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def embedded_picture(folder: Path) -> dict[str, Any]:
    """The bytes of the folder's pictures/a.png, in the form in which datasets embeds pictures."""
    return {"bytes": (folder / "pictures" / "a.png").read_bytes(), "path": None}


def is_plain(text: str) -> bool:
    """Whether a text has content, and nothing that a layout gives a meaning or leaves out."""
    return bool(text.strip()) and "<image>" not in text and text.strip("\n") == text


PLAIN_TEXT = strategies.text(min_size=1, max_size=30).filter(is_plain)


@given(rounds=strategies.lists(strategies.tuples(PLAIN_TEXT, PLAIN_TEXT), min_size=1, max_size=3))
def test_any_conversation_is_the_same_in_every_layout(rounds: list[tuple[str, str]]) -> None:
    expected = turns(*[text for question_and_answer in rounds for text in question_and_answer])
    expected[0]["value"] = f"<image>\n{expected[0]['value']}"

    messages = []
    for question, answer in rounds:
        messages += [message("user", question), message("assistant", answer)]
    as_parts = [message(turn["role"], [{"type": "text", "text": turn["content"]}]) for turn in messages]
    with_picture = [{**as_parts[0], "content": [PICTURE_PART, *as_parts[0]["content"]]}, *as_parts[1:]]
    rows: list[dict[str, Any]] = [
        {"conversations": expected},
        {"messages": messages},
        {"messages": with_picture},
        {"texts": [{"user": question, "assistant": answer} for question, answer in rounds]},
    ]
    if len(rounds) == 1:
        (question, answer), *_ = rounds
        rows.append({"prompt": question, "completion": answer})
        rows.append({"prompt": messages[:1], "completion": messages[1:]})
    for row in rows:
        read = read_row({"image": "a.png", **row})
        assert read["problem"] is None
        assert read["conversations"] == expected


@pytest.mark.parametrize("stored", ["JSON", "parquet", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_row(tmp_path: Path, layout: str, stored: str) -> None:
    two_rows = [LAYOUTS[layout]] * 2
    path = write_json(tmp_path, two_rows)  # also writes a.png
    if stored != "JSON":
        path = write_parquet(tmp_path, two_rows)
    is_stream = stored == "stream"
    rows = list(load_rows(str(path), str(tmp_path / "pictures"), streaming=is_stream))

    assert len(rows) == 2
    for row in rows:
        check_row(row)
        assert row_turns(row) == CONVERSATION
        (image,) = open_images(row)
        assert image.getpixel((0, 0)) == COLOUR


def test_pictures_that_messages_name_are_read(tmp_path: Path) -> None:
    part_with_path = {"type": "image", "image": "a.png"}
    part_with_url = {"type": "image_url", "image_url": {"url": "b.png"}}
    content = [part_with_path, part_with_url, TEXT_PART]
    path = write_json(tmp_path, [{"messages": [message("user", content), ANSWER]}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    assert row_turns(row)[0]["value"] == "<image>\n<image>\nWhat?"
    assert [image.size for image in open_images(row)] == [(8, 6), (5, 5)]  # a.png, then b.png


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_pictures_embedded_in_messages_are_read(tmp_path: Path, streaming: bool) -> None:
    write_pictures(tmp_path)
    # In a parquet file all parts have the same fields.
    picture_part = {"type": "image", "text": None, "image": embedded_picture(tmp_path)}
    text_part = {"type": "text", "text": "What?", "image": None}
    answer_part = {"type": "text", "text": "A dog.", "image": None}
    messages = [message("user", [picture_part, text_part]), message("assistant", [answer_part])]
    path = tmp_path / "inside.parquet"
    pq.write_table(pa.table({"messages": [messages]}), path)

    (row,) = load_rows(str(path), streaming=streaming)
    check_row(row)
    assert row_turns(row) == CONVERSATION
    (image,) = open_images(row)
    assert image.getpixel((0, 0)) == COLOUR


def test_a_system_field_is_the_first_turn(tmp_path: Path) -> None:
    rows = [
        {"image": "a.png", "system": "Be brief.", "conversations": CONVERSATION},
        {"image": "a.png", "system": "", "conversations": CONVERSATION},
        {"image": "a.png", "system": "Be brief.", "messages": [message("user", "What?"), ANSWER]},
    ]
    json_file = write_json(tmp_path, rows)
    parquet_file = write_parquet(tmp_path, rows)
    with_system_turn = [{"from": "system", "value": "Be brief."}, *CONVERSATION]
    for path in (json_file, parquet_file):
        llava_row, row_with_empty_system, messages_row = load_rows(str(path), str(tmp_path / "pictures"))
        assert row_turns(llava_row) == with_system_turn
        assert row_turns(row_with_empty_system) == CONVERSATION
        assert row_turns(messages_row) == with_system_turn


def test_one_row_may_have_image_and_the_next_images(tmp_path: Path) -> None:
    about_two_pictures = turns("<image><image>\nWhat?", "Two.")
    json_rows = [
        {"image": "a.png", "conversations": CONVERSATION},
        {"image": "", "images": ["a.png", "a.png"], "conversations": about_two_pictures},
    ]
    parquet_rows = [
        {"image": "a.png", "conversations": CONVERSATION},
        {"images": ["a.png", "a.png"], "conversations": about_two_pictures},
    ]
    json_file = write_json(tmp_path, json_rows)
    parquet_file = write_parquet(tmp_path, parquet_rows)
    for path in (json_file, parquet_file):
        rows = load_rows(str(path), str(tmp_path / "pictures"))
        assert [len(open_images(row)) for row in rows] == [1, 2]


# The fields of a bad row, by a part of the message about it.
BAD_ROWS: dict[str, dict[str, Any]] = {
    "there is a `completion` without a `prompt`": {
        "messages": [message("user", "Hi."), ANSWER],
        "completion": "Lost.",
    },
    "a turn has both `value` and `content`": {
        "conversations": [{"from": "human", "value": "Hi.", "content": "Lost."}],
    },
    "an answer has `weight`: 0.5": {
        "messages": [message("user", "Hi."), ANSWER | {"weight": 0.5}],
    },
    "an answer has `weight`: 0,": {  # with the comma, or 0.5 would match too
        "messages": [message("user", "Hi."), ANSWER | {"weight": 0}],
    },
    "a part of text holds a picture": {
        "messages": [message("user", [TEXT_PART | {"image": "a.png"}]), ANSWER],
    },
    "a picture's part holds text": {
        "images": ["a.png"],
        "messages": [message("user", [PICTURE_PART | {"text": "Lost."}]), ANSWER],
    },
    "a part names its picture twice": {
        "messages": [message("user", [PICTURE_PART | {"image": "a.png", "path": "b.png"}]), ANSWER],
    },
    "both `image` and `images` hold pictures": {
        "image": "a.png",
        "images": ["a.png"],
        "conversations": CONVERSATION,
    },
    "`conversations` and `messages` both have content": {
        "conversations": CONVERSATION,
        "messages": [ANSWER],
    },
    "both a field `system` and a system turn": {
        "system": "Be brief.",
        "messages": [message("system", "Be long."), message("user", "Hi."), ANSWER],
    },
    "lists of different lengths": {
        "conversations": {"from": ["human", "gpt"], "value": ["Hi."]},
    },
    "neither text nor picture": {
        "messages": [message("user", [{"type": "video", "video": "a.mp4"}]), ANSWER],
    },
    "an assistant's message holds a picture": {
        "messages": [message("user", "Draw."), message("assistant", [PICTURE_PART])],
    },
    "stands for picture 1 where picture 0": {
        "images": ["a.png", "b.png"],
        "messages": [message("user", [PICTURE_PART | {"index": 1}, PICTURE_PART | {"index": 0}]), ANSWER],
    },
    "both in the messages and beside them": {
        "images": ["a.png"],
        "messages": [message("user", [PICTURE_PART | {"image": "b.png"}]), ANSWER],
    },
    "`prompt` holds an answer": {
        "prompt": [message("user", "Hi."), message("assistant", "Hello."), message("user", "What?")],
        "completion": [ANSWER],
    },
    "a turn has `tool_calls`": {
        "messages": [message("user", "Hi."), ANSWER | {"tool_calls": [{"name": "f"}]}],
    },
    "`texts` is not": {
        "texts": [{"question": "Hi.", "answer": "Hello."}],
    },
    "turn 1 is not": {
        "messages": [message("user", "Hi."), message("tool", "42")],
    },
    "a part of text contains <image>": {
        "images": ["a.png", "b.png"],
        "messages": [message("user", [PICTURE_PART, {"type": "text", "text": "What is <image>?"}]), ANSWER],
    },
}


@pytest.mark.parametrize("problem", BAD_ROWS)
def test_a_bad_row_is_refused_and_the_next_row_is_read(tmp_path: Path, problem: str) -> None:
    good_row = {"conversations": turns("Hi.", "Hello.")}
    path = write_json(tmp_path, [BAD_ROWS[problem], good_row])
    bad, good = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError) as error:
        check_row(bad)
    assert error.value.source == f"{path}, row 0"
    assert problem in error.value.problem
    check_row(good)


@pytest.mark.parametrize("column", ["messages", "texts"])
def test_a_question_without_a_text_is_a_bad_row(tmp_path: Path, column: str) -> None:
    turns_by_column = {
        "messages": [message("user", None), ANSWER],
        "texts": [{"user": None, "assistant": "A dog."}],
    }
    path = write_json(tmp_path, [{"image": "a.png", column: turns_by_column[column]}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match="turn 0 is not"):
        check_row(row)


# The columns of rows that hold a video, a sound or an unread picture beside LLaVA's turns, or beside messages.
MEDIA_ROWS = {
    "video": {"video": "a.mp4", "conversations": turns("What happens?", "A dog runs.")},
    "audios": {"audios": ["a.wav"], "messages": [message("user", "What is said?"), ANSWER]},
    "image_path": {"image_path": "a.png", "messages": [message("user", "What is this?"), ANSWER]},
}


@pytest.mark.parametrize("stored", ["JSON", "parquet", "stream"])
@pytest.mark.parametrize("column", MEDIA_ROWS)
def test_a_row_with_a_video_a_sound_or_an_unread_picture_is_refused(tmp_path: Path, column: str, stored: str) -> None:
    media_row = MEDIA_ROWS[column]
    empty = [] if isinstance(media_row[column], list) else None
    frame = {"conversations": CONVERSATION} if "conversations" in media_row else {}
    rows_to_write = [media_row, {**media_row, column: empty}, {**media_row, **frame, "image": "a.png"}]
    pictures = write_pictures(tmp_path)
    path = write_json(tmp_path, rows_to_write) if stored == "JSON" else write_parquet(tmp_path, rows_to_write)
    with_media, without, with_frame = load_rows(str(path), str(pictures), streaming=stored == "stream")
    check_row(without)
    check_row(with_frame)
    with pytest.raises(BadRowError, match=f"`{column}` isn't read, and the row has no picture"):
        check_row(with_media)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("feature", [datasets.Audio(), datasets.Image()], ids=["sounds", "pictures"])
def test_a_column_of_sounds_or_pictures_is_known_by_its_type(tmp_path: Path, feature: Any, streaming: bool) -> None:
    text = datasets.Value("string")
    conversations = datasets.List({"from": text, "value": text})
    # The schema's metadata says what a column has.
    schema = datasets.Features({"it": feature, "conversations": conversations}).arrow_schema
    row = {"it": {"bytes": b"RIFF", "path": None}, "conversations": turns("What?", "A dog.")}
    pq.write_table(pa.Table.from_pylist([row, row | {"it": None}], schema=schema), tmp_path / "rows.parquet")
    with_media, without = load_rows(str(tmp_path / "rows.parquet"), streaming=streaming)
    check_row(without)
    with pytest.raises(BadRowError, match="`it` isn't read, and the row has no picture"):
        check_row(with_media)


def test_an_unread_field_is_named_with_its_number_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # `id` and `source` hold nothing to learn, and empty fields hold nothing at all. So only `caption` is named,
    # with a count of two rows.
    row = {"id": 1, "source": "web", "image": "a.png", "caption": "", "boxes": [], "conversations": CONVERSATION}
    rows = [row | {"caption": "a dog"}, row | {"caption": "two dogs"}, row]
    json_file = write_json(tmp_path, rows)
    parquet_file = write_parquet(tmp_path, rows)
    for path in (json_file, parquet_file):
        caplog.clear()
        load_rows(str(path), str(tmp_path / "pictures"))
        load_rows(str(path), str(tmp_path / "pictures"))  # from the cache, but with the same warning
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [f"{path}: nothing reads `caption`, which has content in 2 of 3 rows"] * 2

    caplog.clear()
    list(load_rows(str(parquet_file), streaming=True))
    (record,) = caplog.records
    assert record.getMessage() == f"{parquet_file}: nothing reads `caption`, which has content"


def test_unread_fields_inside_turns_are_named() -> None:
    part_with_extra_field = TEXT_PART | {"cache_control": {"type": "ephemeral"}}
    answer_with_extra_field = ANSWER | {"reasoning_content": "It barks.", "name": None}
    row = read_row({"messages": [message("user", [part_with_extra_field]), answer_with_extra_field]})
    assert row["unread"] == ["messages[].cache_control", "messages[].reasoning_content"]


@pytest.mark.parametrize("text", ['[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]', "[]"], ids=["boxes", "empty"])
def test_a_json_list_without_roles_is_a_text(text: str) -> None:
    """A model that is asked for boxes answers with such a list."""
    row = read_row({"prompt": text, "completion": text})
    assert row["conversations"] == turns(text, text)

    row = read_row({"messages": [message("user", text), message("assistant", text)]})
    assert row["conversations"] == turns(text, text)


def test_messages_as_json_text_are_messages() -> None:
    messages = [message("user", "What?"), ANSWER]
    expected = turns("What?", "A dog.")
    row = read_row({"prompt": json.dumps(messages[:1]), "completion": json.dumps(messages[1:])})
    assert row["conversations"] == expected

    # In UltraChat, `prompt` repeats the first message.
    row = read_row({"prompt": "What?", "messages": json.dumps(messages)})
    assert row["problem"] is None
    assert row["conversations"] == expected


def test_of_two_names_for_a_field_the_name_with_content_is_read() -> None:
    question = {"from": "", "role": "user", "value": "", "content": "What?"}
    answer = {"from": "gpt", "role": "", "value": "A dog.", "content": ""}
    row = read_row({"conversations": [question, answer]})
    assert row["conversations"] == turns("What?", "A dog.")


def test_each_part_of_a_message_is_a_line_of_its_own() -> None:
    question = [
        {"type": "text", "text": "\nIs it "},
        {"type": "text", "text": ""},
        {"type": "text", "text": "a dog?\n"},
    ]
    answer = [{"type": "text", "text": "  It is\n"}, {"type": "text", "text": "a dog."}]
    row = read_row({"messages": [message("user", question), message("assistant", answer)]})
    # An answer stays as it is written.
    assert row["conversations"] == turns("Is it \na dog?", "  It is\n\na dog.")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_empty_pictures_are_no_pictures(tmp_path: Path, streaming: bool) -> None:
    write_pictures(tmp_path)
    picture = embedded_picture(tmp_path)
    empty = {"bytes": None, "path": None}
    # For each row, the value of its column `images`, and its number of pictures.
    column = [[picture, None], [None], [empty], [], None, [picture, picture]]
    num_pictures = [1, 0, 0, 0, 0, 2]
    picture_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {
        "images": pa.array(column, pa.list_(picture_type)),
        "messages": [[message("user", "What?"), ANSWER]] * len(column),
    }
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns), path)

    rows = list(load_rows(str(path), streaming=streaming))
    for row in rows:
        check_row(row)
    assert [len(open_images(row)) for row in rows] == num_pictures


def messages_with_picture(folder: Path) -> list[dict[str, Any]]:
    """Messages of a question that holds the bytes of the folder's a.png, and of an answer."""
    picture_part = {"type": "image", "text": None, "image": embedded_picture(folder)}
    return [message("user", [picture_part]), message("assistant", [ANSWER_PART])]


def test_pictures_inside_messages_are_read_beside_an_empty_column(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    empty_column = pa.array([[]], pa.list_(pa.binary()))
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"images": empty_column, "messages": [messages_with_picture(tmp_path)]}), path)
    (row,) = load_rows(str(path))
    check_row(row)
    assert len(open_images(row)) == 1


def test_pictures_both_in_a_column_and_inside_messages_are_refused(tmp_path: Path) -> None:
    """The error names the column that holds pictures, and not `image`, which is empty in all rows."""
    picture = (write_pictures(tmp_path) / "b.png").read_bytes()
    messages_without_picture = [message("user", [TEXT_PART]), message("assistant", [ANSWER_PART])]
    columns = {
        "image": pa.array([None, None], pa.binary()),
        "images": pa.array([[picture], []], pa.list_(pa.binary())),
        "messages": [messages_without_picture, messages_with_picture(tmp_path)],
    }
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns), path)
    good, bad = load_rows(str(path))
    check_row(good)
    with pytest.raises(BadRowError, match=r"a message holds a picture, though pictures have a column \(images\)"):
        check_row(bad)


def test_a_malformed_turn_that_json_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    """The turn with the unknown role "tool" is kept as it is, though JSON can't hold the bytes in it."""
    bytes_part = {"type": "image", "text": None, "image": {"bytes": b"?", "path": None}}
    text_part = {"type": "text", "text": "Hi.", "image": None}
    messages = [[message("tool", [bytes_part])], [message("user", [text_part])]]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "tool.parquet")
    bad, good = load_rows(str(tmp_path / "tool.parquet"))
    with pytest.raises(BadRowError, match="turn 0 is not"):
        check_row(bad)
    check_row(good, needs_answer=False)  # the row is only a question


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", ["images", "messages"])
def test_a_first_shard_without_pictures_does_not_set_the_types(tmp_path: Path, place: str, streaming: bool) -> None:
    """The second shard has a picture in the column `images`, or inside its messages."""
    write_pictures(tmp_path)
    picture = embedded_picture(tmp_path)
    answer = message("assistant", [ANSWER_PART])
    without_picture = [message("user", [{"type": "text", "text": "Hi."}]), answer]
    with_picture = [message("user", [{"type": "image", "image": picture}]), answer]
    if place == "images":
        first: dict[str, Any] = {"images": [[]], "messages": [without_picture]}
        second: dict[str, Any] = {"images": [[picture]], "messages": [without_picture]}
    else:
        first = {"messages": [without_picture]}
        second = {"messages": [with_picture]}

    shards = tmp_path / "shards"
    shards.mkdir()
    pq.write_table(pa.table(first), shards / "train-0.parquet")
    pq.write_table(pa.table(second), shards / "train-1.parquet")
    rows = list(load_rows(str(shards), streaming=streaming))
    for row in rows:
        check_row(row)
    assert [len(open_images(row)) for row in rows] == [0, 1]


def test_a_folder_of_several_json_files_is_refused(tmp_path: Path) -> None:
    """`load_dataset` would give b.json's messages the type of a.json's, and so turn their parts into JSON text."""
    write_json(tmp_path, [{"messages": [message("user", "Hi."), ANSWER]}], "a.json")
    write_json(tmp_path, [{"messages": [message("user", [TEXT_PART]), ANSWER]}], "b.json")
    hidden = tmp_path / ".ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "a-checkpoint.json").write_text("[]")
    problem = "holds the JSON files a.json, b.json: name the one with the rows, or a pattern"
    with pytest.raises(UserError, match=problem):
        load_rows(str(tmp_path))

    # A pattern reads both files.
    questions = [row_turns(row)[0]["value"] for row in load_rows(f"{tmp_path}/*.json")]
    assert questions == ["Hi.", "What?"]

    # A folder of one JSON file stands for this file. The hidden file doesn't count.
    (tmp_path / "b.json").unlink()
    assert len(load_rows(str(tmp_path))) == 1


def test_a_dataset_without_turns_names_its_columns(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    path = write_parquet(tmp_path, [{"image": "a.png", "ground_truth": '{"total": "9"}'}])
    problem = "no turns: the columns are image, ground_truth, and turns are read from conversations, messages"
    with pytest.raises(UserError, match=problem):
        load_rows(str(path))


def test_a_first_shard_whose_pictures_are_all_null_does_not_set_the_types(tmp_path: Path) -> None:
    """If all values of a column are null, pandas writes the column without a type."""
    write_pictures(tmp_path)
    shards = tmp_path / "shards"
    shards.mkdir()
    without_pictures = pa.table({
        "image": pa.array([None, None], pa.null()),
        "conversations": [turns("Hi.", "Hello.")] * 2,
    })  # fmt: skip
    with_picture = pa.table({"image": [embedded_picture(tmp_path)], "conversations": [CONVERSATION]})
    pq.write_table(without_pictures, shards / "train-00000-of-00002.parquet")
    pq.write_table(with_picture, shards / "train-00001-of-00002.parquet")
    folder = str(shards)
    pattern = f"{shards}/*.parquet"
    for name in (folder, pattern):
        for streaming in (False, True):
            rows = list(load_rows(name, streaming=streaming))
            assert [len(open_images(row)) for row in rows] == [0, 0, 1]

    # The first shard can also be read alone.
    for row in load_rows(str(shards / "train-00000-of-00002.parquet")):
        check_row(row)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, also the working directory. llava/data.json and parquet/train.parquet each hold one row."""
    llava = tmp_path / "llava"
    llava.mkdir()
    write_json(llava, [{"image": "pictures/a.png", "conversations": CONVERSATION}])

    parquet = tmp_path / "parquet"
    parquet.mkdir()
    write_pictures(parquet)
    write_parquet(parquet, [LAYOUTS["LLaVA"]])

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Names that mean one of the two files: a folder, a file or a pattern.
NAMES = ("llava", "llava/data.json", "llava/*.json", "~/llava", "parquet/train.parquet", "~/parquet/*.parquet")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", NAMES)
def test_files_patterns_and_folders_are_found_by_name(name: str) -> None:
    (row,) = load_rows(name)
    check_row(row)
    (image,) = open_images(row)
    assert image.getpixel((0, 0)) == COLOUR


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none/*.json", "no file matches"),
        ("gone.parquet", "there is no such file"),
        ("llava/pictures/a.png", "rows are read from files that end with"),
    ],
    ids=["pattern", "missing file", "picture"],
)
def test_a_name_that_means_no_rows_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_rows(name)


def test_a_json_mapping_may_hold_the_list_of_rows(tmp_path: Path) -> None:
    row = {"conversations": turns("Hi.", "Hello.")}
    one_line = json.dumps({"data": [row] * 3})
    several_lines = json.dumps({"version": 1, "data": [row] * 3}, indent=1)
    for text in (one_line, several_lines):
        (tmp_path / "data.json").write_text(text)
        assert len(load_rows(str(tmp_path / "data.json"))) == 3


def test_a_json_mapping_with_two_lists_of_rows_is_refused(tmp_path: Path) -> None:
    row = {"conversations": turns("Hi.", "Hello.")}
    (tmp_path / "data.json").write_text(json.dumps({"train": [row], "more": [row] * 5}))
    with pytest.raises(UserError, match=r"data\.json has rows in train, more: put each list into a file of its own"):
        load_rows(str(tmp_path / "data.json"))


@pytest.mark.parametrize(
    ("pictures", "problem"),
    [
        ({"image": {"url": "https://example.org/a.png", "width": 8}}, "image holds mappings with url, width"),
        ({"images": [{"image_path": "a.png"}]}, "images holds mappings with image_path"),
        ({"images": [["a.png"]]}, "images holds lists of lists"),
    ],
    ids=["mapping", "list of mappings", "list of lists"],
)
def test_a_column_of_pictures_that_holds_none_is_refused(
    pictures: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """As pictures they would all be empty, and the rows would be trained without pictures."""
    row = pictures | {"conversations": turns("What is it?", "A page.")}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=problem):
        load_rows(str(tmp_path / "rows.parquet"))


def test_a_json_mapping_may_be_a_row(tmp_path: Path) -> None:
    """The list `conversations` in this mapping is a list of turns, and not of rows."""
    row = {"conversations": turns("Hi.", "Hello.")}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    assert len(load_rows(str(tmp_path / "data.jsonl"))) == 1


def test_pictures_beside_turns_are_not_copied(tmp_path: Path) -> None:
    """A dataset's pictures can take 100 GB, so only its turns are written anew."""
    picture = write_pictures(tmp_path) / "a.png"
    PILImage.effect_noise((500, 500), 80).save(picture)  # noise can't be compressed, so the file is large
    num_rows = 20
    path = write_parquet(tmp_path, [LAYOUTS["messages without a mark"]] * num_rows)
    rows = load_rows(str(path))
    assert isinstance(rows, datasets.Dataset)

    # The cache holds the copy of the parquet file that datasets always makes, and the turns, which are small. A second
    # copy of the pictures would make the cache twice as large.
    pictures_size = num_rows * picture.stat().st_size
    cache_size = sum(Path(file["filename"]).stat().st_size for file in rows.cache_files)
    assert cache_size < 1.2 * pictures_size


def test_turns_are_read_again_after_a_change_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path)
    path = write_parquet(tmp_path, [LAYOUTS["messages without a mark"]])
    (old_row,) = load_rows(str(path))
    assert row_turns(old_row) == CONVERSATION

    # Now `read_row` returns other turns, and the hash of its file has changed.
    changed_turns = turns("<image>\nNew?", "Yes.")
    changed_row = {"images": [], "conversations": changed_turns, "problem": None, "unread": []}
    # Each call returns a copy, since the caller changes the row.
    monkeypatch.setattr("normllava.conversations.columns.read_row", lambda fields: dict(changed_row))
    monkeypatch.setattr(
        "normllava.conversations.columns.hash_files", lambda folder, pattern: {"layouts.py": "changed"}
    )
    (new_row,) = load_rows(str(path))
    assert row_turns(new_row) == changed_turns


def test_a_picture_as_text_gives_a_short_message(tmp_path: Path) -> None:
    data_url = "data:image/png;base64," + "A" * 1_000_000
    long_path = "x" * 9000
    path = write_json(tmp_path, [{"image": image, "conversations": CONVERSATION} for image in (data_url, long_path)])
    for row in load_rows(str(path), str(tmp_path / "pictures")):
        with pytest.raises(BadRowError) as error:
            check_row(row)
        assert len(str(error.value)) < 600  # the beginning of the text and its length, not all of it


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_completion_beside_llavas_turns_is_refused(tmp_path: Path, streaming: bool) -> None:
    write_pictures(tmp_path)
    path = write_parquet(tmp_path, [{"image": "a.png", "conversations": CONVERSATION, "completion": "Lost."}])
    (row,) = load_rows(str(path), streaming=streaming)
    with pytest.raises(BadRowError, match="there is a `completion` without a `prompt`"):
        check_row(row)
