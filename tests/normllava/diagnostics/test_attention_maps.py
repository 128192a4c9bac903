"""Tests of attention maps: against transformers' own attention, and with models that are made to look at one patch."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from families import FAMILIES
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.diagnostics import attention_map, compare
from normllava.diagnostics.attention_maps import (
    AttentionMap,
    draw_attention_maps,
    find_grid,
    questions_with_word,
    relative_weights,
)
from normllava.diagnostics.loading import Question
from normllava.inputs import prepare_inputs
from normllava.parts import DiagnosticsError


PATCH = 14  # pixels on a side of a patch; the model's picture has 2 x 2 patches
HEAD_DIM = 8  # of the model's decoder
QUESTION = "Which colour is it, or is it of no colour?"
ANSWER = "It is sea green."


def make_messages(picture: Image.Image, question: str, answer: str) -> list[dict[str, Any]]:
    """A question about a picture, and the answer, as chat messages."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def find_first(ids: list[int], word_ids: list[int]) -> range:
    """The positions at which `word_ids` first stand in `ids`."""
    for start in range(len(ids)):
        end = start + len(word_ids)
        if ids[start:end] == word_ids:
            return range(start, end)
    raise AssertionError("the word is not in the prompt")


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("Colour", id="in the question, in another case"),
        pytest.param("is it", id="two words"),
        pytest.param("sea green", id="in the answer"),
    ],
)
def test_a_map_is_the_attention_of_the_eager_model(
    word: str,
    model: NormLlavaForConditionalGeneration,
    make_model_folder: Callable[..., Path],
    picture: Image.Image,
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    word_map = attention_map(model, processor, picture, QUESTION, word, answer=ANSWER)

    eager = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), attn_implementation="eager").eval()
    inputs = prepare_inputs(eager, processor, make_messages(picture, QUESTION, ANSWER))
    with torch.no_grad():
        attentions = eager(**inputs, output_attentions=True).attentions

    # Each token of this tokenizer is a letter, so a word has the same tokens alone and inside of the prompt.
    input_ids = inputs["input_ids"][0]
    word_ids = processor.tokenizer(word.lower(), add_special_tokens=False).input_ids
    word_positions = find_first(input_ids.tolist(), word_ids)
    is_image_token = input_ids == eager.config.image_token_id

    assert word_map.layers == [0, 1]
    for layer, attention in enumerate(attentions):
        from_word = attention[0][:, word_positions]  # [num_heads, num_word_tokens, prompt_length]
        from_word_to_picture = from_word[:, :, is_image_token]
        expected = from_word_to_picture.mean(dim=(0, 1)).reshape(2, 2)
        assert word_map.weights[layer] == pytest.approx(expected.numpy(), rel=1e-4)


@torch.no_grad()
def let_z_look_at_difference(
    model: NormLlavaForConditionalGeneration, processor: Any, plain: Image.Image, changed: Image.Image
) -> None:
    """Set layer 0's weights so that the letter z looks at the image token that differs most between two pictures."""
    features = []
    for picture in (plain, changed):
        inputs = prepare_inputs(model, processor, make_messages(picture, "z", ""))
        features.append(model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output[0])
    differences = features[1] - features[0]  # [num_image_tokens, hidden_size]
    largest_difference = differences[differences.norm(dim=-1).argmax()]

    (letter_id,) = processor.tokenizer("z", add_special_tokens=False).input_ids
    letter_embedding = model.get_input_embeddings().weight[letter_id]

    # A query is large only for the letter, and a key only for the image token that differs.
    attention = model.model.language_model.layers[0].self_attn
    respond_only_to(letter_embedding, attention.q_proj)
    respond_only_to(largest_difference, attention.k_proj)


def respond_only_to(direction: torch.Tensor, projection: torch.nn.Linear) -> None:
    """Let a projection measure how far its input goes in a direction, in one coordinate of each head.

    The other coordinates become 0.
    """
    coordinate = 3  # of a head's eight, rotary embedding turns coordinates 3 and 7 the least
    projection.weight.zero_()
    projection.bias.zero_()
    # The factor of 2 makes the attention to the direction clear.
    projection.weight[coordinate::HEAD_DIM] = 2 * direction / direction.norm()


@pytest.mark.parametrize(
    ("vision", "num_rows", "num_columns", "row", "column"),
    [
        pytest.param("siglip", 2, 2, 0, 1, id="SigLIP"),
        pytest.param("clip", 2, 2, 1, 0, id="CLIP, which also has a class token"),
        pytest.param("dinov2", 2, 4, 1, 2, id="DINOv2, a wide picture"),
        pytest.param("dinov2", 4, 2, 2, 0, id="DINOv2, a high picture"),
    ],
)
def test_the_patch_that_the_word_looks_at_has_the_largest_weight(
    vision: str, num_rows: int, num_columns: int, row: int, column: int, make_model_folder: Callable[..., Path]
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(vision)).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder(vision))
    size = {"height": num_rows * PATCH, "width": num_columns * PATCH}
    processor.image_processor.size = size
    processor.image_processor.crop_size = size  # CLIP's and DINOv2's image processors crop after they resize

    # A black picture, and a copy with one orange patch, in row `row` and column `column`.
    black_pixels = np.zeros((size["height"], size["width"], 3), dtype=np.uint8)
    pixels = black_pixels.copy()
    patch_rows = slice(row * PATCH, (row + 1) * PATCH)
    patch_columns = slice(column * PATCH, (column + 1) * PATCH)
    pixels[patch_rows, patch_columns] = (250, 120, 10)
    picture = Image.fromarray(pixels)
    let_z_look_at_difference(model, processor, Image.fromarray(black_pixels), picture)

    word_map = attention_map(model, processor, picture, "which is z?", "z", layers=[0])
    assert word_map.weights.shape == (1, num_rows, num_columns)
    patch_of_largest_weight = np.unravel_index(word_map.weights[0].argmax(), (num_rows, num_columns))
    assert patch_of_largest_weight == (row, column)
    assert relative_weights(word_map)[0, row, column] > 1.5  # clearly more than the mean, which is 1

    # The map's picture is what the model got, before normalization. It differs only by rounding.
    differences = np.asarray(word_map.picture, dtype=int) - pixels
    assert np.abs(differences).max() <= 1


def test_a_word_that_the_text_lacks_is_refused(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    with pytest.raises(DiagnosticsError, match='"hue" is not in the text after the picture: "Which colour'):
        attention_map(model, processor, picture, QUESTION, "hue")
    with pytest.raises(DiagnosticsError, match='"colo" is not in'):  # a part of a word
        attention_map(model, processor, picture, QUESTION, "colo")


def test_a_layer_that_the_model_lacks_is_refused(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    with pytest.raises(DiagnosticsError, match="has layers 0 to 1, got --layers 1 7"):
        attention_map(model, processor, picture, QUESTION, "colour", layers=[7, 1])


def test_a_model_that_does_not_run_with_sdpa_is_refused(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    model.set_attn_implementation("eager")
    with pytest.raises(DiagnosticsError, match="attention of layer 0, 1 was not recorded"):
        attention_map(model, processor, picture, QUESTION, "colour")


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "gemma3", "idefics3", "internvl", "mistral3"])
def test_merged_and_tiled_pictures_are_refused(name: str) -> None:
    family = FAMILIES[name]
    model: Any = SimpleNamespace(config=family.config)  # `find_grid` reads only the model's config
    pixel_values = family.make_picture()["pixel_values"]
    message = f"its {family.num_image_tokens} image tokens are not one for each patch"
    with pytest.raises(DiagnosticsError, match=message):
        find_grid(model, pixel_values, family.num_image_tokens)


def test_a_model_that_trains_is_mapped_without_dropout(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    map_without_dropout = attention_map(model, processor, picture, QUESTION, "colour")

    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    word_map = attention_map(model.train(), processor, picture, QUESTION, "colour")
    assert word_map.weights == pytest.approx(map_without_dropout.weights)
    assert model.training


def make_question(*content: str | Image.Image, answer: str = "") -> Question:
    """A question whose content is these texts and pictures, in this order."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image", "image": part})
    return Question(
        source="a row",
        fingerprint="0",
        prompt=[{"role": "user", "content": parts}],
        answer=answer,
    )


def test_questions_with_the_word_after_the_picture_or_in_the_answer_are_chosen(picture: Image.Image) -> None:
    word_before_picture = make_question("Which colour?", picture)
    word_after_picture = make_question(picture, "Which Colour?")
    word_in_answer = make_question(picture, "What is it?", answer="a colour")
    two_pictures = make_question(picture, picture, "Which colour?")

    questions = [word_before_picture, word_after_picture, two_pictures, word_in_answer]
    assert questions_with_word(questions, "colour") == [word_after_picture, word_in_answer]
    with pytest.raises(DiagnosticsError, match=r'--attention_map: no question .* has "colour" after the picture'):
        questions_with_word([word_before_picture, two_pictures], "colour")


def test_no_more_than_three_questions_are_chosen(picture: Image.Image) -> None:
    question = make_question(picture, "Which colour?")
    assert questions_with_word([question] * 5, "colour") == [question] * 3


def test_two_models_are_drawn_in_the_same_colours(picture: Image.Image) -> None:
    """Each map has two layers and 3 x 4 patches."""
    weak_weights = np.random.default_rng(0).uniform(0.001, 0.002, (2, 3, 4))
    weak = AttentionMap("colour", QUESTION, picture, layers=[0, 7], weights=weak_weights)
    strong_weights = np.full((2, 3, 4), 0.02)
    strong_weights[0, 1, 2] = 0.2
    strong = AttentionMap("colour", "Which colour?\ngreen", picture, layers=[0, 7], weights=strong_weights)
    figure = draw_attention_maps({"before": [weak], "after": [strong]})

    # The attention is drawn half transparent over the picture. The picture has no `alpha`.
    drawn_maps = []
    for axis in figure.axes:
        drawn_maps += [image for image in axis.images if image.get_alpha() is not None]
    assert len(drawn_maps) == 4
    assert len({(drawn.norm.vmin, drawn.norm.vmax) for drawn in drawn_maps}) == 1
    assert max(drawn.get_alpha().max() for drawn in drawn_maps) <= 0.8  # the picture can be seen everywhere

    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert "“colour” in: Which colour? green" in titles
    labels = []
    for axis in figure.axes:
        labels += [text.get_text() for text in axis.texts]
    assert "layer 0, 42% on picture" in labels  # 0.2 for one patch, and 0.02 for each of the other eleven


def test_the_report_shows_attention_maps(
    model: NormLlavaForConditionalGeneration,
    make_model_folder: Callable[..., Path],
    picture: Image.Image,
    tmp_path: Path,
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    models = {"one": (model, processor), "other": (model, processor)}
    pictures = [picture, picture.rotate(90)]
    comparison = compare(models, pictures, QUESTION, layers=[1], attention_word="colour")

    assert set(comparison.attention_maps) == {"one", "other"}
    first_map, second_map = comparison.attention_maps["other"]
    for word_map in (first_map, second_map):
        assert word_map.layers == [1]
        assert word_map.text == QUESTION
        assert word_map.weights.shape == (1, 2, 2)

    comparison.save(tmp_path)
    assert (tmp_path / "figures" / "attention_map.png").exists()
    assert "What a word of the question" in (tmp_path / "report.html").read_text()
