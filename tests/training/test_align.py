"""The aligned start: image tokens learn to point at their captions, and only the projector changes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from conversations.loading import load_rows
from conversations.rows import BadRowError
from modeling_normllava import NormLlavaForConditionalGeneration
from training.align import align, embed_captions, first_answer


RGB_OF_COLOUR = {"red": (220, 30, 30), "green": (20, 180, 40), "blue": (30, 40, 220), "grey": (128, 128, 128)}


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A file with two rows for each colour: a picture of that colour, and a caption that names it."""
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
def test_pictures_point_at_their_captions(composed: Callable[..., Path], captions: Path, projector_norm: str) -> None:
    folder = composed(projector_norm=projector_norm)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    images = [Image.new("RGB", (28, 28), rgb) for rgb in RGB_OF_COLOUR.values()]
    pixel_values = processor.image_processor(images, return_tensors="pt")["pixel_values"]

    def image_tokens() -> torch.Tensor:
        """The image tokens of a picture of each colour, `(4, num_patches, hidden_size)`."""
        with torch.no_grad():
            return torch.stack(model.model.get_image_features(pixel_values).pooler_output)

    weights_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    norm_before = image_tokens().norm(dim=-1).mean().item()
    align(model, processor, load_rows(str(captions)), seed=0, steps=200)

    # A colour's direction is the mean of its word's token embeddings. "it is" hardly counts, as all captions have it.
    embeddings = model.get_input_embeddings().weight.detach()
    mean = embeddings[: len(processor.tokenizer)].mean(dim=0)
    directions = []
    for colour in RGB_OF_COLOUR:
        word = embeddings[processor.tokenizer(colour).input_ids]  # [num_tokens, hidden_size]
        directions.append(word.mean(dim=0) - mean)
    pictures = image_tokens().mean(dim=1) - mean  # [4, hidden_size]
    cosines = torch.cosine_similarity(pictures[:, None], torch.stack(directions)[None], dim=-1)
    assert cosines.argmax(dim=1).tolist() == [0, 1, 2, 3]  # each picture is nearest to its own colour

    # Only the directions of image tokens have changed.
    assert image_tokens().norm(dim=-1).mean() == pytest.approx(norm_before, rel=1e-3)

    linear_layers = ("model.multi_modal_projector.linear_1.", "model.multi_modal_projector.linear_2.")
    changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, weights_before[name])]
    assert len(changed) > 0
    assert all(name.startswith(linear_layers) for name in changed)
    assert model.config.projector_aligned


def test_the_norm_of_image_tokens_does_not_matter(composed: Callable[..., Path], captions: Path) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    aligned_weights = []
    for factor in (1, 30):
        model = NormLlavaForConditionalGeneration.from_pretrained(composed())
        model.model.multi_modal_projector.norm.weight.data *= factor
        align(model, processor, load_rows(str(captions)), seed=0, steps=20)
        aligned_weights.append(model.model.multi_modal_projector.linear_2.weight)
    torch.testing.assert_close(aligned_weights[1], aligned_weights[0], rtol=1e-2, atol=1e-3)


def test_words_that_all_captions_share_hardly_count(composed: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    processor = AutoProcessor.from_pretrained(composed())
    letters = list("abcdefgh")
    letter_directions, _ = embed_captions(model, processor, letters)
    caption_directions, _ = embed_captions(model, processor, [f"xyxyxyxyxyxy{letter}" for letter in letters])

    # Each caption points at its own letter, and no other caption points at that letter as closely.
    cosines = caption_directions @ letter_directions.T  # [caption, letter]
    assert cosines.diagonal().min() > 0.5
    assert torch.equal(cosines.argmax(dim=0), torch.arange(len(letters)))


def test_a_model_that_was_saved_is_aligned_in_its_dtype(
    composed: Callable[..., Path], captions: Path, tmp_path: Path
) -> None:
    """Saving a model replaces the dtype in its config by a string."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    align(model, AutoProcessor.from_pretrained(composed()), load_rows(str(captions)), seed=0, steps=1)
    assert model.model.multi_modal_projector.linear_1.weight.dtype == torch.bfloat16
    assert model.model.multi_modal_projector.norm.weight.dtype == torch.float32


def test_the_caption_is_the_first_answer_that_is_not_blank() -> None:
    blank_answer = {"from": "gpt", "value": " "}
    question = {"from": "human", "value": "Hi"}
    answer = {"from": "gpt", "value": " A dog.\n"}
    assert first_answer({"conversations": [blank_answer, question, answer], "source": "row 1"}) == "A dog."
    with pytest.raises(BadRowError, match="row 1: no caption"):
        first_answer({"conversations": [blank_answer, question], "source": "row 1"})


def test_a_row_without_a_picture_or_a_caption_is_named(composed: Callable[..., Path], captions: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    processor = AutoProcessor.from_pretrained(composed())
    rows = json.loads(captions.read_text())
    question = {"from": "human", "value": "Hi"}
    answer = {"from": "gpt", "value": "Ho"}
    for turns, message in (
        ([question, answer], "0 pictures; aligning needs one"),
        ([question], "no assistant turn"),
    ):
        rows[3] = {"conversations": turns}
        captions.write_text(json.dumps(rows))
        with pytest.raises(BadRowError, match=rf"captions.json, row 3: {message}"):
            align(model, processor, load_rows(str(captions)), seed=0)
