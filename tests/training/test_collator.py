"""Batches: what is trained, what a blank picture changes (nothing), and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from conversations.chat_template import plain_template
from conversations.rows import BadRowError
from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from training.collator import VisionLanguageCollator
from training.stages import LearningRates, Stage, prepare_stage


def make_row(folder: Path, answer: str, *more: str, num_images: int = 1) -> dict[str, Any]:
    """A row of `conversations.rows`: a question with pictures, an answer, and further questions and answers."""
    paths = [str(folder / f"{number}.png") for number in range(num_images)]
    for number, path in enumerate(paths):
        Image.new("RGB", (30, 20), (40 * number, 90, 200)).save(path)
    values = ["<image>\n" * num_images + "What is it?", answer, *more]
    turns = [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]
    return {"images": paths, "conversations": turns, "source": f"rows.json, row {answer}"}


@pytest.fixture(params=["qwen2", "llama", "gemma3", "vicuna"])
def processor(request: pytest.FixtureRequest, composed: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(composed(text=request.param))


def test_chat_rows_train_answers_only(processor: Any, tmp_path: Path) -> None:
    rows = [
        make_row(tmp_path, "A dog.", "Sure?", "Yes, a dog."),
        make_row(tmp_path, "Text alone.", num_images=0),
        make_row(tmp_path, "Two.", num_images=2),
    ]
    tokenize = RowTokenizer(processor, processor.chat_template)
    batch = VisionLanguageCollator(tokenize)(list(map(tokenize, rows)))
    end = processor.tokenizer.eos_token
    space = " " if end == "</s>" else ""  # Vicuna's answers start with one
    expected = [f"{space}A dog.{end}{space}Yes, a dog.{end}", f"{space}Text alone.{end}", f"{space}Two.{end}"]
    for labels, answers in zip(batch["labels"], expected, strict=True):
        assert processor.tokenizer.decode(labels[labels != -100]) == answers
    assert batch["pixel_values"].shape == (3, 3, 28, 28)
    assert (batch["input_ids"] == processor.image_token_id).sum(1).tolist() == [4, 0, 8]
    assert not ((batch["labels"] != -100) & (batch["attention_mask"] == 0)).any()

    # Token by token what the tokenizer makes of the rendered text, each picture's mark repeated.
    text = processor.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": "Text alone."},
        ]
    )
    length = batch["attention_mask"][1].sum()
    assert batch["input_ids"][1, :length].tolist() == processor.tokenizer(text, add_special_tokens=False).input_ids


def test_plain_rows_are_picture_caption_and_line_break(processor: Any, tmp_path: Path) -> None:
    template = plain_template(processor.tokenizer, processor.image_token)
    tokenize = RowTokenizer(processor, template)
    rows = [make_row(tmp_path, "A dog."), make_row(tmp_path, "A black cat.")]
    batch = VisionLanguageCollator(tokenize)(list(map(tokenize, rows)))
    bos = processor.tokenizer.bos_token or ""
    rendered = processor.tokenizer.decode(batch["input_ids"][1])
    assert rendered == f"{bos}{processor.image_token * 4}A black cat.\n"
    labels = batch["labels"][0]
    assert processor.tokenizer.decode(labels[labels != -100]) == "A dog.\n"


def losses_and_gradient(
    model: NormLlavaForConditionalGeneration, batch: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    model.zero_grad()
    # Packed rows too; with a cache transformers doesn't look for their samples.
    inputs = {name: value.double() if name == "pixel_values" else value for name, value in batch.items()}
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), model.model.multi_modal_projector.linear_1.weight.grad


@pytest.mark.parametrize("packed", [False, True])
def test_a_blank_picture_changes_nothing(composed: Callable[..., Path], tmp_path: Path, packed: bool) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.float64)
    rows = [make_row(tmp_path, answer, num_images=0) for answer in ("Short.", "A longer answer, of more words.")]
    tokenize = RowTokenizer(processor, processor.chat_template)
    batch = VisionLanguageCollator(tokenize, packed)(list(map(tokenize, rows)))
    blank = batch["input_ids"][0] == processor.image_token_id
    length = batch["input_ids"].shape[1] - int(blank.sum())
    names = ("input_ids", "labels", "position_ids" if packed else "attention_mask")
    without = {name: batch[name][:, :length] for name in names}

    expected, no_gradient = losses_and_gradient(model, without)
    language_gradients = {n: p.grad.clone() for n, p in model.model.language_model.named_parameters()}
    loss, gradient = losses_and_gradient(model, batch)
    assert no_gradient is None
    assert gradient is not None
    assert not gradient.any()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.model.language_model.named_parameters():
        torch.testing.assert_close(parameter.grad, language_gradients[name], msg=name)

    # Stage 1 trains nothing else, so without the picture it would have nothing to differentiate.
    prepare_stage(model, Stage.ALIGN, LearningRates(1e-3, 0.0, 1e-3))
    losses_and_gradient(model, batch)
    with pytest.raises(RuntimeError, match="does not require grad"):
        losses_and_gradient(model, without)
    # Of a process that gets no row: nothing to learn, but a forward pass.
    empty = VisionLanguageCollator(tokenize, packed)([])
    assert (empty["labels"] == -100).all()
    assert (empty["input_ids"] == processor.image_token_id).sum() == 4
    assert model(**{**empty, "pixel_values": empty["pixel_values"].double()}, use_cache=False).logits.isfinite().all()


def test_a_row_without_trained_tokens_is_refused(composed: Callable[..., Path], tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    template = "{{ '<|image_pad|>' }}{% for message in messages %}{{ message['role'] }}{% endfor %}"
    with pytest.raises(BadRowError, match=r"rows.json, row A dog.*: no supervised token"):
        RowTokenizer(processor, template)(make_row(tmp_path, "A dog."))
