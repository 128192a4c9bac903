"""Reading rows as the field ships them, and telling people which row is bad and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Image, load_dataset
from PIL import Image as PILImage

from training.data import BadRowError, check_rows, load_rows, open_images, row_images, to_messages


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]


def write_json(folder: Path, rows: list[dict[str, Any]], name: str = "data.json") -> Path:
    (folder / "pictures").mkdir(exist_ok=True)
    PILImage.new("RGB", (8, 6), (1, 2, 3)).save(folder / "pictures" / "a.png")
    PILImage.new("L", (5, 5)).save(folder / "pictures" / "b.png")
    text = "\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows)
    (folder / name).write_text(text)
    return folder / name


def one_token(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return [0], [0]


GOOD_ROWS = [
    {"id": 1, "image": "a.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    {"id": "two", "conversations": turns("Hello.", "Hello to you.")},
    {"id": 3, "image": ["a.png", "b.png"], "conversations": turns("<image> and\n<image>", "Two.", "Sure?", "Yes.")},
]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_llava_json(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, GOOD_ROWS, name)
    rows = check_rows(
        load_rows(str(path), str(tmp_path / "pictures")), "<image>", one_token, "error", tmp_path / "bad.jsonl"
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
    rows = check_rows(load_rows(str(tmp_path / "stored")), "<image>", one_token, "error", tmp_path / "bad.jsonl")[0]
    assert [len(row_images(row)) for row in rows] == [1, 0]
    assert open_images(rows[0])[0].getpixel((0, 0)) == (1, 2, 3)
    assert to_messages(rows[1]) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hello to you."},
    ]


BAD_ROWS = {
    "image file .* is missing": {"image": "gone.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    "1 <image> marks but 0 images": {"conversations": turns("<image>\nWhat?", "A dog.")},
    "0 <image> marks but 1 images": {"image": "a.png", "conversations": turns("What?", "A dog.")},
    "no assistant turn": {"image": "a.png", "conversations": turns("<image>\nWhat?")},
    "empty or not a list": {"image": "a.png", "conversations": []},
    "empty or not a list of": {"image": "a.png"},
    "turn 0 is not": {"conversations": [{"from": "robot", "value": "Hi."}]},
    "an assistant turn holds <image>": {"image": "a.png", "conversations": turns("What?", "<image>")},
    r"turn 1 holds <\|image_pad\|>": {"conversations": turns("What?", "I say <|image_pad|>.")},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_place(tmp_path: Path, message: str) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[0], BAD_ROWS[message]])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}.*1 of 2 rows"):
        check_rows(rows, "<|image_pad|>", one_token, "error", tmp_path / "bad.jsonl")


def test_bad_rows_are_left_out_and_listed(tmp_path: Path) -> None:
    path = write_json(
        tmp_path,
        [*BAD_ROWS.values(), *GOOD_ROWS, {"image": "torn.png", "conversations": turns("<image>\nWhat?", "A dog.")}],
    )
    whole = (tmp_path / "pictures" / "a.png").read_bytes()
    (tmp_path / "pictures" / "torn.png").write_bytes(whole[: len(whole) // 2])
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    kept, _ = check_rows(rows, "<|image_pad|>", one_token, "skip", tmp_path / "out" / "bad.jsonl")
    assert [row["source"][-1] for row in kept] == ["9", "0", "1"]
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()]
    assert len(listed) == len(BAD_ROWS) + 1
    assert listed[0]["source"] == f"{path}, row 0"
    assert "can't be read" in listed[-1]["problem"]


def test_pictures_are_opened_when_needed(tmp_path: Path) -> None:
    path = write_json(tmp_path, [{"image": "torn.png", "conversations": turns("<image>\nWhat?", "A dog.")}])
    (tmp_path / "pictures" / "torn.png").write_bytes(b"no picture")
    rows = check_rows(
        load_rows(str(path), str(tmp_path / "pictures")), "<image>", one_token, "error", tmp_path / "bad.jsonl"
    )[0]
    with pytest.raises(BadRowError, match=r"data.json, row 0: image .*torn.png can't be read"):
        open_images(rows[0])
    with pytest.raises(BadRowError, match="1 of 1 rows are bad"):
        check_rows(rows, "<image>", one_token, "skip", tmp_path / "bad.jsonl")


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


def test_marks_become_parts_in_their_place(tmp_path: Path) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)))
    image = {"type": "image"}
    assert to_messages(rows[0])[0]["content"] == [image, {"type": "text", "text": "What?"}]
    assert to_messages(rows[2])[0]["content"] == [image, {"type": "text", "text": " and"}, image]


def test_hub_loading_is_the_libraries_own(tmp_path: Path) -> None:
    # What is not a file or a saved dataset goes to load_dataset, which knows folders and the Hub alike.
    write_json(tmp_path, [])
    expected = load_dataset(str(tmp_path / "pictures"), split="train")
    assert "image" in expected.column_names
    with pytest.raises(ValueError, match="no column 'conversations'"):
        load_rows(str(tmp_path / "pictures"))
