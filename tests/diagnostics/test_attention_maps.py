"""Attention maps, against transformers' own attention, and of models that are made to look at one patch."""

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
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


@pytest.mark.parametrize("word", ["Colour", "is it", "sea green"])
def test_a_map_is_the_attention_of_the_eager_model(
    word: str,
    model: NormLlavaForConditionalGeneration,
    composed: Callable[..., Path],
    picture: Image.Image,
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    word_map = attention_map(model, processor, picture, QUESTION, word, answer="It is sea green.")

    eager = NormLlavaForConditionalGeneration.from_pretrained(composed(), attn_implementation="eager").eval()
    inputs = prepare_inputs(eager, processor, conversation(picture, QUESTION, "It is sea green."))
    with torch.no_grad():
        attentions = eager(**inputs, output_attentions=True).attentions

    # Each token of this tokenizer is a letter, so the word's tokens stand in the prompt as they are.
    ids = inputs["input_ids"][0].tolist()
    word_ids = processor.tokenizer(word.lower(), add_special_tokens=False).input_ids
    starts = [start for start in range(len(ids)) if ids[start : start + len(word_ids)] == word_ids]
    positions = range(starts[0], starts[0] + len(word_ids))
    is_image_token = inputs["input_ids"][0] == eager.config.image_token_id

    assert word_map.layers == [0, 1]
    for layer, attention in enumerate(attentions):
        from_word_to_picture = attention[0][:, positions][:, :, is_image_token]
        expected = from_word_to_picture.mean(dim=(0, 1)).reshape(2, 2)
        assert word_map.weights[layer] == pytest.approx(expected.numpy(), rel=1e-4)


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
    # A query is large only for the letter, and a key only for the image token that differs.
    for projection, source in (
        (attention.q_proj, model.get_input_embeddings().weight[letter]),
        (attention.k_proj, direction),
    ):
        projection.weight.zero_()
        projection.bias.zero_()
        # Of the eight coordinates of a head, coordinate 3 is hardly turned by rotary embedding.
        projection.weight[3::8] = 2 * source / source.norm()


@pytest.mark.parametrize(
    ("vision", "num_rows", "num_columns", "row", "column"),
    [("siglip", 2, 2, 0, 1), ("clip", 2, 2, 1, 0), ("dinov2", 2, 4, 1, 2), ("dinov2", 4, 2, 2, 0)],
)
def test_the_patch_that_the_word_looks_at_has_the_largest_weight(
    vision: str, num_rows: int, num_columns: int, row: int, column: int, composed: Callable[..., Path]
) -> None:
    """DINOv2 also takes pictures that are not square."""
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

    word_map = attention_map(model, processor, picture, "which is z?", "z", layers=[0])
    assert word_map.weights.shape == (1, num_rows, num_columns)
    largest = np.unravel_index(word_map.weights[0].argmax(), (num_rows, num_columns))
    assert largest == (row, column)
    assert relative_weights(word_map)[0, row, column] > 1.5
    # The map's picture is the one before the processor normalized it, except for rounding.
    assert np.abs(np.asarray(word_map.picture, dtype=int) - pixels).max() <= 1


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
    word_map = attention_map(model.train(), processor, picture, QUESTION, "colour")
    assert word_map.weights == pytest.approx(expected.weights)
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
    with_two_pictures = question_of(picture, picture, "Which colour?")
    questions = [before, after, with_two_pictures, answered]
    assert questions_with_word(questions, "colour") == [after, answered]
    assert questions_with_word([after] * 5, "colour") == [after] * 3  # no more than three are drawn
    with pytest.raises(DiagnosticsError, match=r'--attention_map: no question .* has "colour" after the picture'):
        questions_with_word([before, with_two_pictures], "colour")


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


def test_the_report_shows_attention_maps(
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
