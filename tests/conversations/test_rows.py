"""Reading rows as the field ships them."""

from pathlib import Path

import pytest
from datasets import Dataset, Image, load_dataset

from conversations.pictures import open_images
from conversations.rows import BadRowError, load_rows, row_images, to_messages
from row_files import GOOD_ROWS, check_rows, one_token, turns, write_json


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


def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("../secret.png", "/etc/passwd", "a/../../secret.png")):
        rows = [{"image": name, "conversations": turns("<image>\nWhat?", "A dog.")}]
        path = write_json(tmp_path, rows, f"{number}.json")
        with pytest.raises(BadRowError, match=r"row 0: image .* lies outside the image folder .*pictures"):
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
