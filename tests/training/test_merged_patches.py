"""Models that join neighbouring patches into one image token can be composed, loaded from a folder and aligned."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.errors import UserError
from training.compose import compose, interface_norms, main
from training.composing.align import align


QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(params=["siglip", "clip"])
def merged(
    request: pytest.FixtureRequest, backbones: Callable[[str], Path]
) -> tuple[NormLlavaForConditionalGeneration, LlavaProcessor]:
    """A model that merges 2 x 2 patches into one image token, and its processor."""
    return compose(str(backbones(request.param)), str(backbones("qwen2")), spatial_merge_size=2)


def test_four_patches_become_one_image_token(
    merged: tuple[NormLlavaForConditionalGeneration, LlavaProcessor], picture: Image.Image
) -> None:
    model, processor = merged
    prompt = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    inputs = processor(images=[picture], text=prompt, return_tensors="pt")
    # A picture has 2 x 2 patches. The processor, the config and training count one image token for a picture.
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 1
    assert model.config.image_seq_length == 1
    assert RowTokenizer(processor, processor.chat_template).tokens_per_tile == 1

    # Image tokens still start with the norm of text tokens.
    norms = interface_norms(model, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-2)


def test_a_saved_model_loads_by_auto_classes(
    merged: tuple[NormLlavaForConditionalGeneration, LlavaProcessor], picture: Image.Image, tmp_path: Path
) -> None:
    model, processor = merged
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, trust_remote_code=True).eval()
    loaded_processor = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)

    prompt = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    inputs = processor(images=[picture], text=prompt, return_tensors="pt")
    loaded_inputs = loaded_processor(images=[picture], text=prompt, return_tensors="pt")
    assert torch.equal(loaded_inputs["input_ids"], inputs["input_ids"])
    with torch.no_grad():
        expected_logits = model.eval()(**inputs).logits
        logits = loaded(**loaded_inputs).logits
        generated = loaded.generate(**loaded_inputs, max_new_tokens=3)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-6)
    assert generated.shape[1] > inputs["input_ids"].shape[1]


def test_the_projector_can_be_aligned(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    model, processor = compose(str(backbones("siglip")), str(backbones("qwen2")), spatial_merge_size=2)
    weight_before = model.model.multi_modal_projector.linear_1.weight.clone()
    assert weight_before.shape == (32, 4 * 24)  # from four patches of 24 features to the decoder's hidden size of 32

    rows = []
    for colour in ("black", "white"):
        Image.new("RGB", (28, 28), colour).save(tmp_path / f"{colour}.png")
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": colour}]
        row = {"image": f"{colour}.png", "image_folder": str(tmp_path), "conversations": turns, "source": colour}
        rows.append(row)
    align(model, processor, Dataset.from_list(rows), seed=0, steps=2)
    assert not torch.equal(model.model.multi_modal_projector.linear_1.weight, weight_before)


def test_a_merge_size_that_does_not_divide_the_picture_is_refused(backbones: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"spatial_merge_size 3 doesn't divide .* 2 x 2 patches: take one of 1, 2,"):
        compose(str(backbones("siglip")), str(backbones("qwen2")), spatial_merge_size=3)


def test_a_llava_cannot_be_converted_to_merged_patches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--llava_model=x", "--projector_norm=gwc", f"--output_dir={tmp_path}", "--spatial_merge_size=2"])
    assert "--spatial_merge_size is for a new projector" in capsys.readouterr().err
