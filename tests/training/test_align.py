"""Aligning the projector: image tokens learn to point at their captions, and only the projector changes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.loading import load_rows
from normllava.conversations.rows import BadRowError
from training.composing.align import align, embed_captions, first_answer


RGB_OF_COLOUR = {"red": (220, 30, 30), "green": (20, 180, 40), "blue": (30, 40, 220), "grey": (128, 128, 128)}


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """The path of a JSON file with two equal rows for each colour. Each has a picture of the colour, and a caption."""
    rows = []
    for colour, rgb in RGB_OF_COLOUR.items():
        Image.new("RGB", (32, 32), rgb).save(tmp_path / f"{colour}.png")
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"it is {colour}"}]
        row = {"image": f"{colour}.png", "conversations": turns}
        rows += [row, row]

    path = tmp_path / "captions.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("projector_norm", ["gwc", "none"])
def test_pictures_learn_to_point_at_their_captions(
    make_model_folder: Callable[..., Path], captions: Path, projector_norm: str
) -> None:
    folder = make_model_folder(projector_norm=projector_norm)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [Image.new("RGB", (28, 28), rgb) for rgb in RGB_OF_COLOUR.values()]
    pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]

    def compute_image_tokens() -> torch.Tensor:
        """The image tokens of a picture of each colour, `(4, num_patches, hidden_size)`."""
        with torch.no_grad():
            return torch.stack(model.model.get_image_features(pixel_values).pooler_output)

    weights_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    norm_before = compute_image_tokens().norm(dim=-1).mean().item()
    align(model, processor, load_rows(str(captions)), seed=0, steps=200)
    image_tokens = compute_image_tokens()

    # The direction of a colour's word is the mean of its tokens' embeddings, seen from the vocabulary's mean. The rest
    # of a caption, "it is", hardly counts, because all captions have it.
    embeddings = model.get_input_embeddings().weight.detach()
    vocabulary_size = len(processor.tokenizer)  # there may be more embeddings, which stand for no token
    vocabulary_mean = embeddings[:vocabulary_size].mean(dim=0)
    word_directions = []
    for colour in RGB_OF_COLOUR:
        word_embeddings = embeddings[processor.tokenizer(colour).input_ids]  # [num_tokens, hidden_size]
        word_directions.append(word_embeddings.mean(dim=0) - vocabulary_mean)

    # Each picture points most closely at the word of its own colour.
    for index, tokens_of_picture in enumerate(image_tokens):
        picture_direction = tokens_of_picture.mean(dim=0) - vocabulary_mean  # [hidden_size]
        cosines = torch.cosine_similarity(picture_direction, torch.stack(word_directions), dim=-1)  # of the four words
        assert cosines.argmax() == index

    # Image tokens have changed their directions, but not their mean norm.
    assert image_tokens.norm(dim=-1).mean() == pytest.approx(norm_before, rel=1e-3)

    # Only the projector's linear layers have changed, and not its norm layer.
    linear_layers = ("model.multi_modal_projector.linear_1.", "model.multi_modal_projector.linear_2.")
    weights = model.state_dict()
    changed = [name for name in weights if not torch.equal(weights[name], weights_before[name])]
    assert len(changed) > 0
    assert all(name.startswith(linear_layers) for name in changed)


def test_aligned_weights_do_not_depend_on_the_norm_of_image_tokens(
    make_model_folder: Callable[..., Path], captions: Path
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    aligned_weights = []
    for factor in (1, 30):
        model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
        projector = model.model.multi_modal_projector
        projector.norm.weight.data *= factor  # the norm of image tokens is proportional to this weight
        align(model, processor, load_rows(str(captions)), seed=0, steps=20)
        aligned_weights.append(projector.linear_2.weight)
    torch.testing.assert_close(aligned_weights[1], aligned_weights[0], rtol=1e-2, atol=1e-3)


def test_words_that_all_captions_share_hardly_count(make_model_folder: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    processor = AutoProcessor.from_pretrained(make_model_folder())
    letters = list("abcdefgh")
    # Each caption has twelve letters that all captions share, and one letter of its own. A letter is a token.
    captions = [f"xyxyxyxyxyxy{letter}" for letter in letters]
    letter_directions, _ = embed_captions(model, processor, letters)
    caption_directions, _ = embed_captions(model, processor, captions)

    # Each caption points at its own letter, and no other caption points as closely at this letter.
    cosines = caption_directions @ letter_directions.T  # [caption, letter]
    assert cosines.diagonal().min() > 0.5
    assert torch.equal(cosines.argmax(dim=0), torch.arange(len(letters)))


def test_a_model_that_was_saved_is_aligned_in_its_dtype(
    make_model_folder: Callable[..., Path], captions: Path, tmp_path: Path
) -> None:
    """Saving a model turns the dtype in its config into a string, so aligning can't take the dtype from the config."""
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    processor = AutoProcessor.from_pretrained(make_model_folder())
    buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    align(model, processor, load_rows(str(captions)), seed=0, steps=1)
    assert model.model.multi_modal_projector.linear_1.weight.dtype == torch.bfloat16
    assert model.model.multi_modal_projector.norm.weight.dtype == torch.float32  # the class keeps the norm in float32
    # The frequencies of rotary positions are float32 in any model. In bfloat16, later positions would run together.
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers_before[name].dtype, name
        assert torch.equal(buffer, buffers_before[name]), name


def test_the_caption_is_the_first_answer_that_is_not_blank() -> None:
    blank_answer = {"from": "gpt", "value": " "}
    question = {"from": "human", "value": "Hi"}
    answer = {"from": "gpt", "value": " A dog.\n"}
    row = {"conversations": [blank_answer, question, answer], "source": "row 1"}
    assert first_answer(row) == "A dog."

    row["conversations"] = [blank_answer, question]
    with pytest.raises(BadRowError, match="row 1: no caption"):
        first_answer(row)


def test_a_row_without_a_picture_or_a_caption_is_named(make_model_folder: Callable[..., Path], captions: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    processor = AutoProcessor.from_pretrained(make_model_folder())
    rows = json.loads(captions.read_text())
    question = {"from": "human", "value": "Hi"}
    answer = {"from": "gpt", "value": "Ho"}
    turns_by_problem = {
        "0 pictures; aligning needs one": [question, answer],
        "no assistant turn": [question],
    }
    for problem, turns in turns_by_problem.items():
        rows[3] = {"conversations": turns}
        captions.write_text(json.dumps(rows))
        with pytest.raises(BadRowError, match=rf"captions.json, row 3: {problem}"):
            align(model, processor, load_rows(str(captions)), seed=0)
