"""What a word looks at: against transformers' own attention, and in models that are made to look at one patch."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from diagnostics import attention_map, compare
from diagnostics.attention_maps import (
    AttentionMap,
    draw_attention_maps,
    find_grid,
    questions_with_word,
    relative_weights,
)
from diagnostics.loading import Question
from diagnostics.parts import DiagnosticsError
from diagnostics.recording import prepare_inputs
from families import FAMILIES
from modeling_normllava import NormLlavaForConditionalGeneration


PATCH = 14
QUESTION = "Which colour is it, or is it of no colour?"


def conversation(picture: Image.Image, question: str, answer: str) -> list[dict[str, Any]]:
    asked = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


@pytest.mark.parametrize("word", ["Colour", "is it", "sea green"])
def test_it_is_the_attention_that_eager_returns(
    word: str,
    model: NormLlavaForConditionalGeneration,
    composed: Callable[..., Path],
    picture: Image.Image,
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    found = attention_map(model, processor, picture, QUESTION, word, answer="It is sea green.")

    eager = NormLlavaForConditionalGeneration.from_pretrained(composed(), attn_implementation="eager").eval()
    inputs = prepare_inputs(eager, processor, conversation(picture, QUESTION, "It is sea green."))
    with torch.no_grad():
        attentions = eager(**inputs, output_attentions=True).attentions
    ids = inputs["input_ids"][0].tolist()
    letters = processor.tokenizer(word.lower(), add_special_tokens=False).input_ids  # a token is a byte
    starts = [number for number in range(len(ids)) if ids[number : number + len(letters)] == letters]
    positions = range(starts[0], starts[0] + len(letters))
    is_image_token = inputs["input_ids"][0] == eager.config.image_token_id

    assert found.layers == [0, 1]
    for number, attention in enumerate(attentions):
        expected = attention[0][:, positions][:, :, is_image_token].mean(dim=(0, 1)).reshape(2, 2)
        assert found.weights[number] == pytest.approx(expected.numpy(), rel=1e-4)


@torch.no_grad()
def look_at_what_changes(
    model: NormLlavaForConditionalGeneration, processor: Any, plain: Image.Image, changed: Image.Image
) -> None:
    """Set layer 0's weights so that the letter z looks at the image token that differs most between two pictures."""
    features = []
    for picture in (plain, changed):
        inputs = prepare_inputs(model, processor, conversation(picture, "z", ""))
        features.append(model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output[0])
    differences = features[1] - features[0]  # [num_image_tokens, hidden_size]
    direction = differences[differences.norm(dim=-1).argmax()]

    (letter,) = processor.tokenizer("z", add_special_tokens=False).input_ids
    attention = model.model.language_model.layers[0].self_attn
    for projection, reads in (
        (attention.q_proj, model.get_input_embeddings().weight[letter]),
        (attention.k_proj, direction),
    ):
        projection.weight.zero_()
        projection.bias.zero_()
        # Of a head's eight coordinates, rotation by position hardly turns this one.
        projection.weight[3::8] = 2 * reads / reads.norm()


@pytest.mark.parametrize(
    ("vision", "num_rows", "num_columns", "row", "column"),
    [("siglip", 2, 2, 0, 1), ("clip", 2, 2, 1, 0), ("dinov2", 2, 4, 1, 2), ("dinov2", 4, 2, 2, 0)],
)
def test_the_patch_that_the_word_looks_at_lights_up(
    vision: str, num_rows: int, num_columns: int, row: int, column: int, composed: Callable[..., Path]
) -> None:
    """Where the encoder takes pictures that aren't square, too: DINOv2 does."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(vision)).eval()
    processor = AutoProcessor.from_pretrained(composed(vision))
    size = {"height": num_rows * PATCH, "width": num_columns * PATCH}
    processor.image_processor.size = size
    processor.image_processor.crop_size = size

    pixels = np.zeros((num_rows * PATCH, num_columns * PATCH, 3), dtype=np.uint8)
    plain = Image.fromarray(pixels.copy())
    of_patch = (slice(row * PATCH, (row + 1) * PATCH), slice(column * PATCH, (column + 1) * PATCH))
    pixels[of_patch] = (250, 120, 10)
    picture = Image.fromarray(pixels)
    look_at_what_changes(model, processor, plain, picture)

    found = attention_map(model, processor, picture, "which is z?", "z", layers=[0])
    assert found.weights.shape == (1, num_rows, num_columns)
    brightest = np.unravel_index(found.weights[0].argmax(), (num_rows, num_columns))
    assert brightest == (row, column)
    assert relative_weights(found)[0, row, column] > 1.5
    assert np.abs(np.asarray(found.picture, dtype=int) - pixels).max() <= 1  # as it was before it was normalized


def test_what_can_not_be_mapped(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    with pytest.raises(DiagnosticsError, match='"hue" is not in the text after the picture: "Which colour'):
        attention_map(model, processor, picture, QUESTION, "hue")
    with pytest.raises(DiagnosticsError, match='"colo" is not in'):  # a part of a word
        attention_map(model, processor, picture, QUESTION, "colo")
    with pytest.raises(DiagnosticsError, match="has layers 0 to 1, got --layers 1 7"):
        attention_map(model, processor, picture, QUESTION, "colour", layers=[7, 1])
    model.set_attn_implementation("eager")
    with pytest.raises(DiagnosticsError, match="attention of layer 0, 1 was not recorded"):
        attention_map(model, processor, picture, QUESTION, "colour")


def test_a_model_that_trains_is_mapped_without_dropout(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    expected = attention_map(model, processor, picture, QUESTION, "colour")

    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    found = attention_map(model.train(), processor, picture, QUESTION, "colour")
    assert found.weights == pytest.approx(expected.weights)
    assert model.training


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "gemma3", "idefics3", "internvl", "mistral3"])
def test_merged_and_tiled_pictures_are_refused(name: str) -> None:
    family = FAMILIES[name]
    model: Any = SimpleNamespace(config=family.config)
    with pytest.raises(DiagnosticsError, match=f"its {family.image_tokens} image tokens are not one for each patch"):
        find_grid(model, family.pictures()["pixel_values"], family.image_tokens)


def question_of(*content: str | Image.Image, answer: str = "") -> Question:
    """A question whose content is texts and pictures, in this order."""
    parts: list[dict[str, Any]] = []
    for part in content:
        parts.append({"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part})
    return Question("a row", "0", [{"role": "user", "content": parts}], Image.new("RGB", (8, 8)), answer)


def test_questions_with_the_word_are_chosen(picture: Image.Image) -> None:
    before = question_of("Which colour?", picture)
    after = question_of(picture, "Which Colour?")
    answered = question_of(picture, "What is it?", answer="a colour")
    of_two = question_of(picture, picture, "Which colour?")
    assert questions_with_word([before, after, of_two, answered], "colour") == [after, answered]
    assert questions_with_word([after] * 5, "colour") == [after] * 3
    with pytest.raises(DiagnosticsError, match=r'--attention_map: no question .* has "colour" after the picture'):
        questions_with_word([before, of_two], "colour")


def test_two_models_are_drawn_in_the_same_colours(picture: Image.Image) -> None:
    rng = np.random.default_rng(0)
    weak = AttentionMap("colour", QUESTION, picture, [0, 7], rng.uniform(0.001, 0.002, (2, 3, 4)))
    weights = np.full((2, 3, 4), 0.02)
    weights[0, 1, 2] = 0.2
    strong = AttentionMap("colour", "Which colour?\ngreen", picture, [0, 7], weights)

    figure = draw_attention_maps({"before": [weak], "after": [strong]})
    overlays = [image for axis in figure.axes for image in axis.images if image.get_alpha() is not None]
    assert len(overlays) == 4
    assert len({(image.norm.vmin, image.norm.vmax) for image in overlays}) == 1
    assert max(image.get_alpha().max() for image in overlays) <= 0.8
    assert "“colour” in: Which colour? green" in [axis.get_title(loc="left") for axis in figure.axes]
    labels = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert "layer 0, 42% on picture" in labels  # 0.2 and eleven times 0.02


def test_the_report_shows_them(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image, tmp_path: Path
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    models = {"one": (model, processor), "other": (model, processor)}
    measured = compare(models, [picture, picture.rotate(90)], QUESTION, layers=[1], attention_word="colour")
    (first, second) = measured.attention_maps["other"]
    assert (first.layers, first.text, second.weights.shape) == ([1], QUESTION, (1, 2, 2))
    measured.save(tmp_path)
    assert (tmp_path / "figures" / "attention_map.png").exists()
    assert "What a word of the question" in (tmp_path / "report.html").read_text()
