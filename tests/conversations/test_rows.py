"""Reading rows as the field ships them, and telling people which row is bad and why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Image, load_dataset
from PIL import Image as PILImage
from PIL.PngImagePlugin import PngInfo
from transformers import AutoProcessor

from conversations.checks import _picture_references, check_stream, keep_good_rows, measure_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, load_rows, row_images, to_messages
from training.collator import VisionLanguageCollator
from training.tokenization import RowTokenizer


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


def check_rows(
    rows: Dataset,
    image_token: str,
    tokenize: Any,
    bad_rows: Literal["error", "skip"],
    report_file: Path,
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    measured = measure_rows(rows, image_token, tokenize, bad_rows == "skip", num_proc)
    return keep_good_rows(rows, measured, bad_rows, report_file)


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


def open_one(path: Path) -> PILImage.Image:
    return open_images({"images": [str(path)], "source": "data.json, row 0"})[0]


def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("../secret.png", "/etc/passwd", "a/../../secret.png")):
        rows = [{"image": name, "conversations": turns("<image>\nWhat?", "A dog.")}]
        path = write_json(tmp_path, rows, f"{number}.json")
        with pytest.raises(BadRowError, match=r"row 0: image .* lies outside the image folder .*pictures"):
            load_rows(str(path), str(tmp_path / "pictures"))
    inside = [{"image": "b/../a.png", "conversations": turns("<image>\nWhat?", "A dog.")}]
    assert load_rows(str(write_json(tmp_path, inside)), str(tmp_path / "pictures"))[0]["images"][0].endswith("/a.png")


def test_pictures_of_every_kind_come_out_as_people_see_them(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    PILImage.fromarray(ramp).save(tmp_path / "16bit.png")
    assert np.array_equal(np.asarray(open_one(tmp_path / "16bit.png"))[..., 0], (ramp >> 8).astype(np.uint8))

    red = PILImage.new("RGB", (6, 4), (255, 0, 0))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg")
    red.convert("P").save(tmp_path / "palette.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.save(tmp_path / "really_png.jpg", format="png")
    frames = [PILImage.new("RGB", (6, 4), (0, 0, 255))]
    red.save(tmp_path / "animated.gif", save_all=True, append_images=frames)
    for name in ("cmyk.jpg", "palette.png", "alpha.png", "really_png.jpg", "animated.gif"):
        picture = open_one(tmp_path / name)
        assert picture.mode == "RGB", name
        assert np.abs(np.array(picture.getpixel((3, 2))) - (255, 0, 0)).max() < 8, name

    turned = PILImage.Exif()
    turned[0x0112] = 6  # held upright by the photographer, stored on its side
    red.save(tmp_path / "turned.jpg", exif=turned)
    assert open_one(tmp_path / "turned.jpg").size == (4, 6)


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PILImage.new("F", (4, 4)).save(tmp_path / "float.tiff")
    PILImage.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    PILImage.new("L", (100, 100)).save(tmp_path / "bomb.png")
    text = PngInfo()
    text.add_text("comment", "x" * 5_000_000, zip=True)
    PILImage.new("L", (4, 4)).save(tmp_path / "text_bomb.png", pnginfo=text)
    for name in ("float.tiff", "torn.jpg", "text.png", "empty.png", "text_bomb.png"):
        with pytest.raises(BadRowError, match=f"data.json, row 0: image .*{name} can't be read"):
            open_one(tmp_path / name)
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4000)  # Pillow refuses twice this
    with pytest.raises(BadRowError, match=r"bomb.png can't be read .*decompression bomb"):
        open_one(tmp_path / "bomb.png")


HOSTILE = {
    "turn 0 is not": {"conversations": [{"from": "human", "value": 7}]},
    "turn 0 is not .*: 'Hi'": {"conversations": ["Hi"]},
    "empty or not a list of turns": {"conversations": {"from": "human"}},
    "no assistant turn": {"conversations": turns("What?", "  \n ")},
    "image file .* is missing": {"image": {"path": "a.png"}, "conversations": turns("<image>", "A dog.")},
    "more than max_length 900": {"conversations": turns("What?", "very " * 10_000)},
}


@pytest.mark.parametrize("message", HOSTILE)
def test_rows_of_the_wrong_type_or_size(tmp_path: Path, message: str, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template, max_length=900)
    rows = load_rows(str(write_json(tmp_path, [GOOD_ROWS[1], HOSTILE[message]])), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match=f"data.json, row 1: .*{message}"):
        check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")
    kept, _ = check_rows(rows, processor.image_token, tokenize, "skip", tmp_path / "bad.jsonl")
    assert len(kept) == 1
    assert (tmp_path / "bad.jsonl").exists()


def test_the_length_column_and_the_fingerprint(tmp_path: Path, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)), str(tmp_path / "pictures"))
    checked, fingerprint = check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")
    batch = VisionLanguageCollator(tokenize)(list(checked))
    assert checked["length"][:] == batch["attention_mask"].sum(1).tolist()
    same = check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl", num_proc=2)[1]
    assert same == fingerprint
    other = [{**GOOD_ROWS[0], "conversations": turns("<image>\nWhat?", "A cat.")}, *GOOD_ROWS[1:]]
    rows = load_rows(str(write_json(tmp_path, other)), str(tmp_path / "pictures"))
    assert check_rows(rows, processor.image_token, tokenize, "error", tmp_path / "bad.jsonl")[1] != fingerprint


def test_checking_does_not_read_the_bytes_of_pictures(tmp_path: Path) -> None:
    column = pa.chunked_array([[[{"bytes": b"x" * 10, "path": "a"}], [], None, [{"bytes": b"y", "path": None}] * 2]])
    references = _picture_references(column, with_bytes=False)
    assert references == [[{"bytes": None, "path": "a"}], [], [], [{"bytes": None, "path": None}] * 2]
    single = pa.chunked_array([[{"bytes": b"x", "path": "a"}, None]])
    assert _picture_references(single, with_bytes=False) == [{"bytes": None, "path": "a"}, None]


def test_conversations_of_plain_text_are_bad_rows(tmp_path: Path) -> None:
    Dataset.from_dict({"images": [[]], "conversations": ["Hello."]}).save_to_disk(tmp_path / "stored")
    rows = load_rows(str(tmp_path / "stored"))
    with pytest.raises(BadRowError, match="row 0: `conversations` is text that is not JSON"):
        check_rows(rows, "<image>", one_token, "error", tmp_path / "bad.jsonl")


def test_a_stream_lists_its_bad_rows_as_they_come(tmp_path: Path) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[1], BAD_ROWS["no assistant turn"], GOOD_ROWS[0]])
    stream = load_rows(str(path), str(tmp_path / "pictures"), streaming=True)
    kept = list(check_stream(stream, "<image>", one_token, "skip", tmp_path / "out" / "bad.jsonl"))
    assert [row["source"][-1] for row in kept] == ["0", "2"]
    assert [row["length"] for row in kept] == [1, 1]
    assert "no assistant turn" in (tmp_path / "out" / "bad.jsonl").read_text()
    with pytest.raises(BadRowError, match=r"data.json, row 1: no assistant turn"):
        list(check_stream(stream, "<image>", one_token, "error", tmp_path / "bad.jsonl"))


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
