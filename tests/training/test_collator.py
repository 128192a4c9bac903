"""Collated batches: which tokens are trained, that a blank picture changes nothing, and which rows are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.chat_template import plain_template
from normllava.conversations.layouts import read_row
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.rows import BadRowError
from training.modules.stages import LearningRates, Stage, prepare_stage
from training.rows.collator import VisionLanguageCollator


def make_row(folder: Path, answer: str, *further_turns: str, num_images: int = 1) -> dict[str, Any]:
    """A row that asks "What is it?" about `num_images` pictures, which are written into `folder`.

    `further_turns` are the texts of further questions and answers, in turn.
    """
    paths = []
    for number in range(num_images):
        path = folder / f"{number}.png"
        Image.new("RGB", (30, 20), (40 * number, 90, 200)).save(path)
        paths.append(str(path))

    question = "<image>\n" * num_images + "What is it?"
    turns = []
    for number, text in enumerate([question, answer, *further_turns]):
        speaker = "human" if number % 2 == 0 else "gpt"
        turns.append({"from": speaker, "value": text})
    return {"images": paths, "conversations": turns, "source": "rows.json, row 7"}


def collate_rows(tokenize: RowTokenizer, rows: list[dict[str, Any]], packed: bool = False) -> dict[str, Any]:
    tokenized = [tokenize(row) for row in rows]
    collator = VisionLanguageCollator(tokenize, packed)
    return collator(tokenized)


@pytest.fixture(scope="module", params=["qwen2", "llama", "gemma3", "vicuna"])
def processor(request: pytest.FixtureRequest, make_model_folder: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(make_model_folder(text=request.param))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# The content of a question and of its answer.
MESSAGES: dict[str, tuple[Any, Any]] = {
    "several texts": (
        [{"type": "image"}, text_part("Context: a bill of 9"), text_part("How much is it?")],
        [text_part("Nine"), text_part("Euro")],
    ),
    "line breaks around a picture": ([text_part("First:\n"), {"type": "image"}, text_part("\nAnd?")], "Red."),
    "an empty text": ([text_part(""), {"type": "image"}, text_part(" What? ")], [text_part("Red.")]),
    "white space around the question": ("\n What? \n", "Red."),
    "code": ("Complete the function.", "    return x\n"),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_is_trained_as_it_is_asked(processor: Any, kind: str) -> None:
    question, answer = MESSAGES[kind]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    row = read_row({"images": ["a.png"] * str(question).count("'image'"), "messages": messages})
    tokenized = RowTokenizer(processor, processor.chat_template)(row | {"source": "a row"})

    asked = processor.apply_chat_template(messages, tokenize=False)
    assert processor.tokenizer.decode(tokenized["input_ids"]) == asked
    trained = [label for label in tokenized["labels"] if label != -100]
    written = answer if isinstance(answer, str) else "\n".join(part["text"] for part in answer)
    assert written in processor.tokenizer.decode(trained)


@pytest.mark.parametrize("content", [[{"type": "input_image"}], [{"type": "video", "video": "a.mp4"}]])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_an_unknown_type_is_refused(processor: Any, role: str, content: list[Any]) -> None:
    messages = [{"role": "user", "content": "Why?"}, {"role": role, "content": content}]
    with pytest.raises(TemplateError, match=f"has a part of type {content[0]['type']}"):
        processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False)
    assert "neither text nor picture" in read_row({"messages": messages})["problem"]


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_answer_without_text_is_not_trained(processor: Any, tmp_path: Path, empty: str) -> None:
    tokenize = RowTokenizer(processor, processor.chat_template)
    with_empty = tokenize(make_row(tmp_path, empty, "Sure?", "A dog."))
    trained = processor.tokenizer.decode([label for label in with_empty["labels"] if label != -100])
    assert trained.strip() == f"A dog.{processor.tokenizer.eos_token}"

    with pytest.raises(BadRowError, match="no supervised token"):
        tokenize(make_row(tmp_path, empty))


def test_only_answers_of_chat_rows_are_trained(processor: Any, tmp_path: Path) -> None:
    rows = [
        make_row(tmp_path, "A dog.", "Sure?", "Yes, a dog."),
        make_row(tmp_path, "Text alone.", num_images=0),
        make_row(tmp_path, "Two.", num_images=2),
    ]
    batch = collate_rows(RowTokenizer(processor, processor.chat_template), rows)

    eos = processor.tokenizer.eos_token
    is_vicuna = eos == "</s>"
    space = " " if is_vicuna else ""  # answers in Vicuna's format start with a space
    answers_of_rows = [
        f"{space}A dog.{eos}{space}Yes, a dog.{eos}",
        f"{space}Text alone.{eos}",
        f"{space}Two.{eos}",
    ]
    for labels, answers in zip(batch["labels"], answers_of_rows, strict=True):
        assert processor.tokenizer.decode(labels[labels != -100]) == answers
    is_padding = batch["attention_mask"] == 0
    assert (batch["labels"][is_padding] == -100).all()

    # The rows have one picture, none and two, and a picture has four image tokens.
    assert batch["pixel_values"].shape == (3, 3, 28, 28)
    num_image_tokens = (batch["input_ids"] == processor.image_token_id).sum(dim=1)
    assert num_image_tokens.tolist() == [4, 0, 8]

    # The row without pictures has the tokens that the tokenizer gives for the rendered conversation.
    text = processor.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": "Text alone."},
        ]
    )
    expected_ids = processor.tokenizer(text, add_special_tokens=False).input_ids
    is_token = batch["attention_mask"][1].bool()
    assert batch["input_ids"][1][is_token].tolist() == expected_ids


def test_plain_rows_are_a_picture_a_caption_and_a_line_break(processor: Any, tmp_path: Path) -> None:
    template = plain_template(processor.tokenizer, processor.image_token)
    rows = [make_row(tmp_path, "A dog."), make_row(tmp_path, "A black cat.")]
    batch = collate_rows(RowTokenizer(processor, template), rows)
    bos = processor.tokenizer.bos_token or ""  # Qwen2's tokenizer has no BOS
    longer_row = processor.tokenizer.decode(batch["input_ids"][1])  # has no padding
    assert longer_row == f"{bos}{processor.image_token * 4}A black cat.\n"
    labels = batch["labels"][0]
    assert processor.tokenizer.decode(labels[labels != -100]) == "A dog.\n"


def loss_and_projector_gradient(
    model: NormLlavaForConditionalGeneration, batch: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss of a batch, and the gradient of the projector's first weight.

    The gradient is `None` if the loss doesn't depend on the projector.
    """
    model.zero_grad()
    # With a cache, transformers would take a packed row for one sample.
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), model.model.multi_modal_projector.linear_1.weight.grad


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_blank_picture_changes_nothing(make_model_folder: Callable[..., Path], tmp_path: Path, packed: bool) -> None:
    """The collator adds a blank picture to a batch without pictures."""
    processor = AutoProcessor.from_pretrained(make_model_folder())
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.float64)
    rows = [make_row(tmp_path, answer, num_images=0) for answer in ("Short.", "A longer answer, of more words.")]
    tokenize = RowTokenizer(processor, processor.chat_template)
    batch = collate_rows(tokenize, rows, packed)
    batch["pixel_values"] = batch["pixel_values"].double()

    # Cut off the blank picture's four image tokens, which come last.
    names = ["input_ids", "labels"]
    names.append("position_ids" if packed else "attention_mask")
    without_blank = {name: batch[name][:, :-4] for name in names}
    assert not (without_blank["input_ids"] == processor.image_token_id).any()

    decoder = model.model.language_model
    expected_loss, gradient_without_blank = loss_and_projector_gradient(model, without_blank)
    expected_gradients = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    loss, gradient_with_blank = loss_and_projector_gradient(model, batch)
    torch.testing.assert_close(loss, expected_loss)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], msg=name)

    # The blank picture gives the projector a gradient of 0 instead of none.
    assert gradient_without_blank is None
    assert gradient_with_blank is not None
    assert not gradient_with_blank.any()

    # Stage "align" trains only the projector, so without the blank picture the backward pass fails.
    prepare_stage(model, Stage.ALIGN, LearningRates(common=1e-3, vision=0.0, norm=1e-3))
    loss_and_projector_gradient(model, batch)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_and_projector_gradient(model, without_blank)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_batch_without_rows_is_a_blank_picture(model: NormLlavaForConditionalGeneration, packed: bool) -> None:
    """A process for which no rows are left gets a batch without rows. The model can run on this batch too."""
    processor = AutoProcessor.from_pretrained(model.name_or_path)
    batch = collate_rows(RowTokenizer(processor, processor.chat_template), [], packed)
    assert (batch["labels"] == -100).all()  # nothing is trained
    assert (batch["input_ids"] == processor.image_token_id).sum() == 4
    assert model(**batch, use_cache=False).logits.isfinite().all()


def test_a_row_without_trained_tokens_is_refused(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    # This template writes the roles, but no answers, so there is nothing to train.
    template = "{{ '<|image_pad|>' }}{% for message in messages %}{{ message['role'] }}{% endfor %}"
    tokenize = RowTokenizer(processor, template)
    with pytest.raises(BadRowError, match=r"rows.json, row 7: no supervised token"):
        tokenize(make_row(tmp_path, "A dog."))
