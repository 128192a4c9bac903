"""Tests of loading models, and of choosing pictures and questions from data."""

import io
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration

from modeling_normllava import NormLlavaConfig
from normllava.diagnostics import loading
from normllava.diagnostics.loading import MAX_UNREADABLE, Question, load_model, load_processor, load_questions
from normllava.errors import UserError
from normllava.parts import DiagnosticsError


TURNS = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a colour"}]


def write_rows(folder: Path, *pictures: str) -> str:
    """Write a row for each of these picture files, all with the same question, and return the path of `rows.json`."""
    path = folder / "rows.json"
    path.write_text(json.dumps([{"image": picture, "conversations": TURNS} for picture in pictures]))
    return str(path)


def row_numbers(questions: list[Question]) -> list[int]:
    """The number of each question's row: 3 if the question's source is "rows.json, row 3"."""
    return [int(question.source.split()[-1]) for question in questions]


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """A folder with pictures of one colour each, and with broken.png, which is no picture."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "also_red.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "blue.png")
    Image.new("RGB", (8, 8), "green").save(tmp_path / "green.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    return tmp_path


@pytest.mark.parametrize(("vision", "num_additional"), [("clip", 1), ("siglip", 0)])
def test_a_llava_without_a_patch_size_is_measured(
    vision: str, num_additional: int, make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """In older checkpoints, the processor's file doesn't say how it counts image tokens."""
    composed = make_model_folder(vision=vision, text="vicuna", projector_norm="none")
    config = NormLlavaConfig.from_pretrained(composed)
    llava_config = LlavaConfig(
        vision_config=config.vision_config,
        text_config=config.text_config,
        image_token_index=config.image_token_index,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )
    LlavaForConditionalGeneration(llava_config).save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(composed)
    processor.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "processor_config.json").read_text())
    for name in ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy"):
        del fields[name]
    (tmp_path / "processor_config.json").write_text(json.dumps(fields))

    model, completed = load_model(str(tmp_path))
    assert completed.patch_size == processor.patch_size
    assert completed.num_additional_image_tokens == num_additional
    assert completed.vision_feature_select_strategy == processor.vision_feature_select_strategy
    # As many image tokens as features, or the model would raise an error.
    inputs = completed(images=Image.new("RGB", (30, 20)), text=completed.image_token, return_tensors="pt")
    model(**inputs)


def test_each_question_is_about_another_picture(colours: Path) -> None:
    """Pictures are compared by content: the same picture in another file counts as the same."""
    data = write_rows(colours, "red.png", "red.png", "also_red.png", "red.png", "blue.png", "green.png")
    questions = load_questions(data, 3).questions
    assert row_numbers(questions) == [0, 4, 5]
    assert len({question.fingerprint for question in questions}) == 3

    # There are only three different pictures, even if more questions are asked for.
    assert len(load_questions(data, 9).questions) == 3


def test_pictures_after_the_first_answer_are_left_out(colours: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two rows that differ only in the picture after the answer give one question."""
    caplog.set_level(logging.INFO)
    turns = [
        {"from": "human", "value": "<image>\nthis, or <image>"},
        {"from": "gpt", "value": "a colour"},
        {"from": "human", "value": "<image>\nand this?"},
    ]
    rows = [
        {"image": ["red.png", "blue.png", "blue.png"], "conversations": turns},
        {"image": ["red.png", "blue.png", "green.png"], "conversations": turns},
    ]
    path = colours / "rows.json"
    path.write_text(json.dumps(rows))

    (question,) = load_questions(str(path), 2).questions
    assert "1 rows show the same pictures as a row before, and each picture is asked about once." in caplog.text
    (message,) = question.prompt
    assert [part["type"] for part in message["content"]] == ["image", "text", "image"]


def test_rows_with_a_broken_or_missing_picture_are_skipped_with_a_warning(
    colours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_rows(colours, "red.png", "broken.png", "none.png", "blue.png")
    with caplog.at_level(logging.WARNING, "normllava.diagnostics.loading"):
        chosen = load_questions(data, 2)

    assert row_numbers(chosen.questions) == [0, 3]
    broken, missing = chosen.unreadable
    assert re.search(r"row 1: .*broken\.png can't be read", broken)
    assert re.search(r"row 2: .*none\.png is missing", missing)
    assert caplog.messages == [f"skipped: {broken}", f"skipped: {missing}"]


def test_if_no_row_can_be_read_the_error_names_the_first(colours: Path) -> None:
    """After `MAX_UNREADABLE` unreadable rows, no more rows are tried."""
    broken_pictures = ["broken.png"] * (2 * MAX_UNREADABLE)
    data = write_rows(colours, *broken_pictures)
    message = rf"can't be read: {MAX_UNREADABLE}, the first: .*row 0: image .*broken\.png"
    with pytest.raises(DiagnosticsError, match=message):
        load_questions(data, 2)


def test_the_error_counts_rows_that_can_not_be_read_and_rows_without_a_picture(colours: Path) -> None:
    """The two rows of text alone can be read, so the error counts only one row that can't."""
    text_only = [{"from": "human", "value": "what is red?"}, {"from": "gpt", "value": "a colour"}]
    rows = [
        {"conversations": text_only},
        {"conversations": text_only},
        {"image": "broken.png", "conversations": TURNS},
    ]
    path = colours / "rows.json"
    path.write_text(json.dumps(rows))

    with pytest.raises(DiagnosticsError) as raised:
        load_questions(str(path), 2)
    message = str(raised.value)
    assert "(2 rows without one before the first answer)" in message
    assert "Rows that can't be read: 1, the first: " in message


def test_pictures_in_subfolders_count_and_hidden_files_do_not(tmp_path: Path) -> None:
    visible = ["a/b/c.jpg", "a/z.png", "b.png"]
    hidden = [".hidden.png", ".git/x.png", "a/.y.png"]
    for number, name in enumerate([*visible, *hidden]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = (40 * number, 0, 0)  # a different colour for each, because equal pictures would count once
        Image.new("RGB", (8, 8), colour).save(path)

    questions = load_questions(tmp_path, 9).questions
    names = [str(Path(question.source).relative_to(tmp_path)) for question in questions]
    assert names == visible


def test_a_datasets_rows_are_asked_about_and_not_the_logo_beside_them(tmp_path: Path) -> None:
    """The picture in the dataset has another size than the logo."""
    Image.new("RGB", (30, 20), "red").save(tmp_path / "logo.png")

    picture = io.BytesIO()
    Image.new("RGB", (20, 20), "blue").save(picture, "PNG")
    row = {"images": [{"bytes": picture.getvalue(), "path": None}], "conversations": TURNS}
    (tmp_path / "data").mkdir()
    # `datasets` takes the split from the beginning of the file's name.
    Dataset.from_list([row]).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")

    (question,) = load_questions(str(tmp_path), 4, split="validation").questions
    (picture_part, _) = question.prompt[0]["content"]
    assert picture_part["image"].size == (20, 20)


def test_data_may_be_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.avif"
    Image.new("RGB", (8, 8), "red").save(path)
    (question,) = load_questions(path, 4).questions
    assert question.source == str(path)


def test_a_picture_that_pillow_has_no_decoder_for_is_unreadable(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.avif")
    # A HEIC file begins with a size of four bytes and "ftypheic".
    (tmp_path / "b.heic").write_bytes(bytes(4) + b"ftypheic")
    chosen = load_questions(tmp_path, 4)

    assert len(chosen.questions) == 1
    (unreadable,) = chosen.unreadable
    assert "b.heic can't be read" in unreadable


def test_a_folder_with_a_json_file_holds_rows(tmp_path: Path) -> None:
    """LLaVA's data is such a folder. A picture beside the JSON file is asked about only if a row names the picture."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.avif")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "in_no_row.png")
    write_rows(tmp_path, "a.avif")
    (question,) = load_questions(tmp_path, 4).questions
    assert question.source == f"{tmp_path}, row 0"


def copy_model(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the composed model's folder, which a test may change."""
    return shutil.copytree(make_model_folder(), tmp_path / "model")


def error_on_loading(folder: Path) -> str:
    """The error for a model's folder that can't be loaded, which must be one line that begins with the folder."""
    with pytest.raises(UserError) as raised:
        load_model(str(folder))
    message = str(raised.value)
    assert message.startswith(f"{folder} can't be loaded: ")
    assert "\n" not in message
    return message


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    assert "Unrecognized" in error_on_loading(tmp_path)


def test_a_model_of_an_unknown_type_is_refused_in_one_line(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_model(make_model_folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "nope"
    del config["auto_map"]  # `auto_map` names the model's class, so the type would not matter
    (folder / "config.json").write_text(json.dumps(config))
    assert "`nope`" in error_on_loading(folder)


def test_a_model_without_some_of_its_weights_is_refused_in_one_line(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_model(make_model_folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.multi_modal_projector.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "Weights missing: 1 of multi_modal_projector" in error_on_loading(folder)


def test_a_processor_whose_package_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsTorchvision:
        """Fails as `AutoProcessor` does without torchvision."""

        @staticmethod
        def from_pretrained(name: str, **options: Any) -> None:
            raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library.\nInstall it.\n")

    monkeypatch.setattr(loading, "AutoProcessor", NeedsTorchvision)
    with pytest.raises(UserError) as raised:
        load_processor("owner/name")
    message = "owner/name can't be loaded: Qwen2VLVideoProcessor requires the Torchvision library. Install it."
    assert str(raised.value) == message
