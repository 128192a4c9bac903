"""Questions as model inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from diagnostics.loading import Question, load_model, load_questions
from diagnostics.model_report import record_samples
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import Record
from diagnostics.comparison import prepare_samples


TURNS = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "seven"}]


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """A file with a question, and two pictures beside it."""
    for number in range(2):
        picture.rotate(90 * number).save(tmp_path / f"{number}.png")
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": TURNS}]))
    return tmp_path / "rows.json"


def record(model: PreTrainedModel, processor: Any, questions: list[Question]) -> Record:
    return record_samples(model, prepare_samples(model, processor, questions), [0])[0]


def test_chat_tokens_without_a_role_are_no_text(data: Path, composed: Callable[..., Path]) -> None:
    """As Llama 3 ships them: special, and named by nothing."""
    questions = load_questions(str(data), 1).questions
    model, processor = load_model(str(composed()))
    before = record(model, processor, questions)
    processor.tokenizer._extra_special_tokens = []
    assert processor.tokenizer.convert_tokens_to_ids("<|im_start|>") not in processor.tokenizer.all_special_ids
    after = record(model, processor, questions)
    assert torch.equal(after.tokens.text, before.tokens.text)


def test_the_map_lies_over_what_the_encoder_saw(composed: Callable[..., Path], tmp_path: Path) -> None:
    """CLIP's processor cuts a square out of the middle."""
    picture = Image.new("RGB", (84, 28), (255, 0, 0))
    picture.paste((0, 0, 255), (28, 0, 56, 28))
    picture.save(tmp_path / "wide.png")
    (question,) = load_questions(str(tmp_path), 1).questions
    for vision, seen in (("clip", {(0, 0, 255)}), ("siglip", {(0, 0, 255), (255, 0, 0)})):
        model, processor = load_model(str(composed(vision=vision)))
        (sample,) = prepare_samples(model, processor, [question])
        shown = sample.picture
        colours = {tuple(255 * (value > 127) for value in pixel) for _, pixel in shown.getcolors(10_000)}
        assert shown.size == (28, 28)
        assert ((255, 0, 0) in colours) == ((255, 0, 0) in seen)


def test_two_pictures_have_no_map(composed: Callable[..., Path], data: Path) -> None:
    turns = [{"from": "human", "value": "<image><image>\nwhich is it?"}]
    data.write_text(json.dumps([{"image": ["0.png", "1.png"], "conversations": turns}]))
    questions = load_questions(str(data), 1).questions
    model, processor = load_model(str(composed()))
    seen = record(model, processor, questions)
    assert seen.tokens.visual.sum() == 2 * 4
    assert seen.grid is None


def test_a_processor_without_a_chat_template(data: Path, composed: Callable[..., Path]) -> None:
    questions = load_questions(str(data), 1).questions
    model, processor = load_model(str(composed()))
    processor.chat_template = None
    (sample,) = prepare_samples(model, processor, questions)
    text = processor.tokenizer.decode(sample.inputs["input_ids"][0])
    assert text == "<|image_pad|>" * 4 + "\nwhat is it?"


def test_a_template_that_refuses_a_question_names_it(composed: Callable[..., Path], data: Path) -> None:
    model, processor = load_model(str(composed()))
    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    questions = load_questions(str(data), 1).questions
    with pytest.raises(DiagnosticsError, match=r"row \S+: The processor can't prepare it: System role not supported"):
        prepare_samples(model, processor, questions)
