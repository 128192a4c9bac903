"""Which pictures are chosen, what is passed over, and what is known before weights are loaded."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

from conversations import pictures
from conversations.rows import BadRowError
from diagnostics.loading import count_layers_and_heads, load_model, load_questions
from diagnostics.parts import DiagnosticsError, NoVisualTokensError
from families import FAMILIES


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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened."""
    names: list[str] = []
    before = pictures._open_image

    def see(image: Any, row: Any, number: int) -> Image.Image:
        names.append(Path(image["path"] if isinstance(image, dict) else image).name)
        return before(image, row, number)

    monkeypatch.setattr(pictures, "_open_image", see)
    return names


def test_pictures_are_different_where_there_are_enough(colours: Path, opened: list[str]) -> None:
    """By content: the same picture in another file is no other picture."""
    data = write_rows(colours, "red.png", "red.png", "same.png", "red.png", "blue.png", "green.png")
    chosen = load_questions(data, 3)
    assert [question.images[0].getpixel((0, 0)) for question in chosen.questions] == [
        (255, 0, 0), (0, 0, 255), (0, 128, 0)
    ]  # fmt: skip
    assert chosen.num_pictures == len({question.picture for question in chosen.questions}) == 3
    assert opened == ["red.png", "same.png", "blue.png", "green.png"]


def test_pictures_stand_again_where_there_are_too_few(colours: Path) -> None:
    data = write_rows(colours, "red.png", "red.png", "same.png", "blue.png")
    chosen = load_questions(data, 3)
    assert [question.source.split()[-1] for question in chosen.questions] == ["0", "3", "1"]
    assert chosen.num_pictures == 2
    assert chosen.questions[0].picture == chosen.questions[2].picture != chosen.questions[1].picture
    assert len(load_questions(data, 9).questions) == 4


def test_pictures_past_the_first_answer_are_not_what_is_sampled(colours: Path) -> None:
    later = [*TURNS, {"from": "human", "value": "<image>\nand this?"}]
    rows = [{"image": ["red.png", name], "conversations": later} for name in ("blue.png", "green.png")]
    (colours / "rows.json").write_text(json.dumps(rows))
    assert load_questions(str(colours / "rows.json"), 2).num_pictures == 1


def test_a_broken_picture_is_passed_over_and_named(colours: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_rows(colours, "red.png", "broken.png", "blue.png")
    with caplog.at_level(logging.WARNING, "diagnostics.loading"):
        chosen = load_questions(data, 2)
    assert [question.source.split()[-1] for question in chosen.questions] == ["0", "2"]
    (line,) = chosen.unreadable
    assert "row 1: image" in line
    assert "broken.png can't be read" in line
    assert [record.getMessage() for record in caplog.records] == [f"skipped: {line}"]


def test_nothing_readable_is_an_error_that_names_it(colours: Path) -> None:
    with pytest.raises(NoVisualTokensError, match=r"None can be read; the first: .*row 0: image .*broken\.png"):
        load_questions(write_rows(colours, "broken.png"), 2)


def test_a_malformed_row_is_an_error(colours: Path) -> None:
    with pytest.raises(BadRowError, match=r"row 1: .*none\.png is missing"):
        load_questions(write_rows(colours, "red.png", "none.png"), 2)


def test_subfolders_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    for number, name in enumerate(("b.png", "a/z.png", "a/b/c.jpg", ".hidden.png", ".git/x.png", "a/.y.png")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
    chosen = load_questions(str(tmp_path), 9, question="what is it?")
    found = [str(Path(question.source).relative_to(tmp_path)) for question in chosen.questions]
    assert found == ["a/b/c.jpg", "a/z.png", "b.png"]


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_missing_package_is_one_line_with_the_command(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")))
    tokenizer.save_pretrained(tmp_path)
    FAMILIES["qwen2_vl"].config().save_pretrained(tmp_path)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(DiagnosticsError) as error:
        load_model(str(tmp_path))
    assert str(error.value) == (
        "Qwen2VLVideoProcessor needs the package torchvision, which is not installed: run `pip install torchvision`."
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_and_heads_are_known_from_a_config(name: str, tmp_path: Path) -> None:
    """No weights lie in the folder."""
    FAMILIES[name].config().save_pretrained(tmp_path)
    assert count_layers_and_heads(str(tmp_path)) == (3, 4)


def test_a_config_without_layers_is_said(tmp_path: Path) -> None:
    AutoConfig.for_model("convnext").save_pretrained(tmp_path)
    with pytest.raises(DiagnosticsError, match="ConvNextConfig doesn't say how many layers"):
        count_layers_and_heads(str(tmp_path))


def test_pictures_beside_a_datasets_files_are_not_what_is_asked_about(tmp_path: Path) -> None:
    """The rows were passed over for the logo of a dataset's repository, without a word."""
    Image.new("RGB", (30, 20), "red").save(tmp_path / "logo.png")
    picture = io.BytesIO()
    Image.new("RGB", (20, 20), "blue").save(picture, "PNG")
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "blue"}]
    rows = Dataset.from_list([{"images": [{"bytes": picture.getvalue(), "path": None}], "conversations": turns}])
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    (question,) = load_questions(str(tmp_path), 4).questions
    assert question.images[0].size == (20, 20)
