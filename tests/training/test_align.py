"""The aligned start: pictures come to point at their captions, and nothing but the projector changes."""

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


COLOURS = {"red": (220, 30, 30), "green": (20, 180, 40), "blue": (30, 40, 220), "grey": (128, 128, 128)}


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """Rows of plain pictures with their colour as caption, each twice."""
    rows = []
    for colour, pixels in COLOURS.items():
        Image.new("RGB", (32, 32), pixels).save(tmp_path / f"{colour}.png")
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"it is {colour}"}]
        rows += [{"image": f"{colour}.png", "conversations": turns}] * 2
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("arm", ["gwc", "none"])
def test_pictures_point_at_their_captions(composed: Callable[..., Path], captions: Path, arm: str) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(projector_norm=arm))
    processor = AutoProcessor.from_pretrained(composed(projector_norm=arm))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    images = [Image.new("RGB", (28, 28), pixels) for pixels in COLOURS.values()]
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]

    def visual_tokens() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack(model.model.get_image_features(pixels).pooler_output)

    length = visual_tokens().norm(dim=-1).mean()
    align(model, processor, load_rows(str(captions)), seed=0, steps=200)

    # By hand, without frequencies: only the colours' own letters tell the captions apart.
    embeddings = model.get_input_embeddings().weight.detach()
    mean = embeddings[: len(processor.tokenizer)].mean(dim=0)
    words = torch.stack([(embeddings[processor.tokenizer(word).input_ids] - mean).mean(dim=0) for word in COLOURS])
    cosines = torch.cosine_similarity((visual_tokens().mean(dim=1) - mean)[:, None], words[None], dim=-1)
    assert cosines.argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert visual_tokens().norm(dim=-1).mean() == pytest.approx(length.item(), rel=1e-3)  # only directions changed

    changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
    assert {name.rpartition(".linear")[0] for name in changed} == {"model.multi_modal_projector"}
    assert model.config.projector_aligned


def test_only_directions_count(composed: Callable[..., Path], captions: Path) -> None:
    processor, aligned = AutoProcessor.from_pretrained(composed()), []
    for length in (1, 30):
        model = NormLlavaForConditionalGeneration.from_pretrained(composed())
        model.model.multi_modal_projector.norm.weight.data *= length
        align(model, processor, load_rows(str(captions)), seed=0, steps=20)
        aligned.append(model.model.multi_modal_projector.linear_2.weight)
    torch.testing.assert_close(*aligned, rtol=1e-2, atol=1e-3)


def test_words_that_all_captions_share_hardly_count(composed: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    processor = AutoProcessor.from_pretrained(composed())
    shared, _ = embed_captions(model, processor, [f"xyxyxyxyxyxy{letter}" for letter in "abcdefgh"])
    alone, _ = embed_captions(model, processor, list("abcdefgh"))
    own = (shared * alone).sum(dim=-1)
    assert own.min() > 0.5
    of_others = torch.stack([shared @ alone[number] for number in range(8)])
    assert torch.equal(of_others.argmax(dim=1), torch.arange(8))


def test_a_model_that_was_saved_is_aligned_in_its_dtype(
    composed: Callable[..., Path], captions: Path, tmp_path: Path
) -> None:
    """Saving turns the config's dtype into text."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    align(model, AutoProcessor.from_pretrained(composed()), load_rows(str(captions)), seed=0, steps=1)
    assert model.model.multi_modal_projector.linear_1.weight.dtype == torch.bfloat16
    assert model.model.multi_modal_projector.norm.weight.dtype == torch.float32


def test_the_caption_is_what_the_assistant_says_first() -> None:
    turns = [{"from": "gpt", "value": " "}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": " A dog.\n"}]
    assert first_answer({"conversations": turns, "source": "row 1"}) == "A dog."
    with pytest.raises(BadRowError, match="row 1: no caption"):
        first_answer({"conversations": turns[:2], "source": "row 1"})


def test_a_row_without_a_picture_or_a_caption_is_named(composed: Callable[..., Path], captions: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    rows, turns = json.loads(captions.read_text()), [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    for kept, message in ((2, "0 pictures; aligning needs one"), (1, "no assistant turn")):
        rows[3] = {"conversations": turns[:kept]}
        captions.write_text(json.dumps(rows))
        with pytest.raises(BadRowError, match=rf"captions.json, row 3: {message}"):
            align(model, AutoProcessor.from_pretrained(composed()), load_rows(str(captions)), seed=0)
