"""What of a conversation has a loss: what training sees, with every kind of template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from conversations.rows import Row
from conversations.tokens import RowTokenizer
from diagnostics.gradients import measure_gradients
from diagnostics.loading import Question, load_model, load_questions
from diagnostics.model_report import record_samples
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import Record
from diagnostics.samples import Sample, prepare_samples
from training.collator import VisionLanguageCollator


TURNS = [
    {"from": "human", "value": "<image>\nwhat is it?"},
    {"from": "gpt", "value": "seven"},
    {"from": "human", "value": "which colour?"},
    {"from": "gpt", "value": "red"},
]


@pytest.fixture
def loaded(composed: Callable[..., Path]) -> tuple[PreTrainedModel, Any]:
    return load_model(str(composed()), dtype="float32")


def prepare(loaded: tuple[PreTrainedModel, Any], folder: Path, picture: Image.Image, turns: list) -> Sample:
    picture.save(folder / "0.png")
    (folder / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": turns}]))
    questions = load_questions(str(folder / "rows.json"), 1).questions
    (sample,) = prepare_samples(*loaded, questions, num_answered=1)
    return sample


def scored(loaded: tuple[PreTrainedModel, Any], sample: Sample) -> str:
    """The text that has a loss."""
    assert sample.answered is not None
    return loaded[1].tokenizer.decode(sample.answered.inputs["input_ids"][0, sample.answered.targets])


def test_the_loss_is_that_of_training(
    loaded: tuple[PreTrainedModel, Any], tmp_path: Path, picture: Image.Image
) -> None:
    """The line break past the end of a turn, and the next question, were scored too."""
    model, processor = loaded
    sample = prepare(loaded, tmp_path, picture, TURNS)
    assert scored(loaded, sample) == "seven<|im_end|>red<|im_end|>"
    row: Row = {"images": [str(tmp_path / "0.png")], "conversations": TURNS, "source": "row"}  # type: ignore[typeddict-item]
    tokenize = RowTokenizer(processor, processor.chat_template)
    batch = VisionLanguageCollator(tokenize)([tokenize(row)])
    measured = measure_gradients(model, [sample.answered] if sample.answered else [])
    assert measured is not None
    with torch.no_grad():
        expected = model(**batch).loss.item()
    assert measured.norms["compensated"].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("end", ["<|im_end|>\\n", "\\n \\n"])
def test_a_template_without_marks_is_scored_to_the_end_of_the_turn(
    end: str, loaded: tuple[PreTrainedModel, Any], tmp_path: Path, picture: Image.Image
) -> None:
    _, processor = loaded
    processor.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{{ '<|image_pad|>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        "{{ '" + end + "' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt else '' }}"
    )
    sample = prepare(loaded, tmp_path, picture, TURNS)
    assert scored(loaded, sample).strip() == "seven" + ("<|im_end|>" if "im_end" in end else "")
    assert not scored(loaded, sample).endswith("\n")


def test_a_question_without_an_answer_has_no_loss(
    loaded: tuple[PreTrainedModel, Any], tmp_path: Path, picture: Image.Image
) -> None:
    """The words of the prompt were scored, which training never does."""
    assert prepare(loaded, tmp_path, picture, TURNS[:1]).answered is None


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """A file with a question, and two pictures beside it."""
    for number in range(2):
        picture.rotate(90 * number).save(tmp_path / f"{number}.png")
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": TURNS[:2]}]))
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
    text = processor.tokenizer.decode(sample.prompt.inputs["input_ids"][0])
    assert text == "<|image_pad|>" * 4 + "\nwhat is it?"


def test_a_template_that_refuses_a_question_names_it(loaded: tuple[PreTrainedModel, Any], data: Path) -> None:
    model, processor = loaded
    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    questions = load_questions(str(data), 1).questions
    with pytest.raises(DiagnosticsError, match=r"row \S+: The processor can't prepare it: System role not supported"):
        prepare_samples(model, processor, questions)
