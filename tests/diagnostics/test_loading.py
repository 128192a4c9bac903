"""Which models are loaded, which pictures are chosen, and what is passed over."""

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

from common.errors import UserError
from diagnostics import loading
from diagnostics.loading import MAX_UNREADABLE, load_model, load_processor, load_questions
from diagnostics.parts import DiagnosticsError


TURNS = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a colour"}]


def write_rows(folder: Path, *names: str) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"image": name, "conversations": TURNS} for name in names]))
    return str(path)


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """`red.png` and `same.png` show the same."""
    for name, colour in (("red", "red"), ("same", "red"), ("blue", "blue"), ("green", "green")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    return tmp_path


def test_pictures_are_different(colours: Path) -> None:
    """By content: the same picture in another file is no other picture."""
    data = write_rows(colours, "red.png", "red.png", "same.png", "red.png", "blue.png", "green.png")
    chosen = load_questions(data, 3).questions
    assert [question.source.split()[-1] for question in chosen] == ["0", "4", "5"]
    assert len({question.picture for question in chosen}) == 3
    assert len(load_questions(data, 9).questions) == 3


def test_pictures_past_the_first_answer_are_not_asked_about(colours: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nthis, or <image>"}, *TURNS[1:]]
    turns.append({"from": "human", "value": "<image>\nand this?"})
    rows = [{"image": ["red.png", "blue.png", name], "conversations": turns} for name in ("blue.png", "green.png")]
    (colours / "rows.json").write_text(json.dumps(rows))
    (question,) = load_questions(str(colours / "rows.json"), 2).questions
    assert [part["type"] for message in question.prompt for part in message["content"]] == ["image", "text", "image"]


def test_broken_and_missing_pictures_are_passed_over_and_named(
    colours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing one ended the command."""
    data = write_rows(colours, "red.png", "broken.png", "none.png", "blue.png")
    with caplog.at_level(logging.WARNING, "diagnostics.loading"):
        chosen = load_questions(data, 2)
    assert [question.source.split()[-1] for question in chosen.questions] == ["0", "3"]
    assert [record.getMessage() for record in caplog.records] == [f"skipped: {line}" for line in chosen.unreadable]
    assert re.search(r"row 1: .*broken\.png can't be read", chosen.unreadable[0])
    assert re.search(r"row 2: .*none\.png is missing", chosen.unreadable[1])


def test_where_no_row_can_be_read_the_first_is_named(colours: Path) -> None:
    data = write_rows(colours, *["broken.png"] * (2 * MAX_UNREADABLE))
    with pytest.raises(DiagnosticsError, match=r"row 0: image .*broken\.png"):
        load_questions(data, 2)


def test_subfolders_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    for number, name in enumerate(("b.png", "a/z.png", "a/b/c.jpg", ".hidden.png", ".git/x.png", "a/.y.png")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
    chosen = load_questions(tmp_path, 9)
    found = [str(Path(question.source).relative_to(tmp_path)) for question in chosen.questions]
    assert found == ["a/b/c.jpg", "a/z.png", "b.png"]


def test_pictures_beside_a_datasets_files_are_not_what_is_asked_about(tmp_path: Path) -> None:
    """The rows were passed over for the logo of a dataset's repository, without a word."""
    Image.new("RGB", (30, 20), "red").save(tmp_path / "logo.png")
    picture = io.BytesIO()
    Image.new("RGB", (20, 20), "blue").save(picture, "PNG")
    rows = Dataset.from_list([{"images": [{"bytes": picture.getvalue(), "path": None}], "conversations": TURNS}])
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    (question,) = load_questions(str(tmp_path), 4, split="validation").questions
    assert question.prompt[0]["content"][0]["image"].size == (20, 20)


def test_one_picture_and_a_folder_of_rows_are_taken_for_what_they_are(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.avif")
    (question,) = load_questions(tmp_path / "a.avif", 4).questions
    assert question.source == str(tmp_path / "a.avif")

    (tmp_path / "b.heic").write_bytes(b"ftypheic")  # Pillow has no decoder
    chosen = load_questions(tmp_path, 4)
    assert len(chosen.questions) == 1
    assert "b.heic can't be read" in chosen.unreadable[0]

    # LLaVA's layout: one JSON file beside its pictures, which aren't asked about by themselves.
    rows = [{"image": "a.avif", "conversations": TURNS}]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    (question,) = load_questions(tmp_path, 4).questions
    assert question.source == f"{tmp_path}, row 0"


def copy_of(composed: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(composed(), tmp_path / "model")


def refusal(folder: Path) -> str:
    """What is said of a model's folder that can't be loaded: one line that begins with the folder."""
    with pytest.raises(UserError) as raised:
        load_model(str(folder))
    message = str(raised.value)
    assert message.startswith(f"{folder} can't be loaded: ")
    assert "\n" not in message
    return message


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    assert "Unrecognized" in refusal(tmp_path)


def test_a_model_of_an_unknown_type_is_refused_in_one_line(composed: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(composed, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nope"}))
    assert "`nope`" in refusal(folder)


def test_a_model_without_some_of_its_weights_is_refused_in_one_line(
    composed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(composed, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.multi_modal_projector.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "Weights missing: 1 of multi_modal_projector" in refusal(folder)


def test_a_processor_whose_package_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsTorchvision:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> None:
            raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library.\nInstall it.\n")

    monkeypatch.setattr(loading, "AutoProcessor", NeedsTorchvision)
    with pytest.raises(UserError) as raised:
        load_processor("owner/name")
    said = "owner/name can't be loaded: Qwen2VLVideoProcessor requires the Torchvision library. Install it."
    assert str(raised.value) == said
