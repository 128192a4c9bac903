"""The model class: how it differs from Llava, that it is Llava otherwise, and that a saved folder loads anywhere."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from modeling_normllava import (
    GlobalWeightCompensatedLayerNorm,
    NormLlavaConfig,
    NormLlavaForConditionalGeneration,
    NormLlavaModel,
)


NORM = "model.multi_modal_projector.norm"


def plain_llava(model: NormLlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """A Llava with the weights of a NormLlava, except those of the norm."""
    names = ("vision_config", "text_config", "image_token_index", "vision_feature_select_strategy")
    fields = {name: getattr(model.config, name) for name in names}
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith(NORM)}

    llava = LlavaForConditionalGeneration(LlavaConfig(**fields))
    llava.load_state_dict(weights)
    return llava.eval()


def prompt(processor: Any, num_images: int, text: str = "What is it?") -> str:
    """A user's turn with pictures before a text, as the chat template writes it, and the beginning of the answer."""
    content = [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def inputs_for(processor: Any, images: list[list[Image.Image]], texts: list[str]) -> dict[str, torch.Tensor]:
    """A batch of the model's inputs, in which each text comes after its pictures."""
    prompts = [prompt(processor, len(pictures), text) for pictures, text in zip(images, texts, strict=True)]
    # The processor takes `None` in place of a batch without any picture.
    all_images = images if any(images) else None
    return dict(processor(images=all_images, text=prompts, padding=True, return_tensors="pt"))


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(StrictDataclassError, match=r"gwc.*layernorm.*none"):
        NormLlavaConfig(projector_norm="rmsnorm")


@pytest.mark.parametrize(
    ("projector_norm", "target", "gain"),
    [("gwc", 0.8, 0.8 / 32**0.5), ("layernorm", 0.8, 0.8 / 32**0.5), ("gwc", None, 1.0)],
)
def test_gain_starts_at_the_target(
    model: NormLlavaForConditionalGeneration, projector_norm: str, target: float | None, gain: float
) -> None:
    parts = {"vision_config": model.config.vision_config, "text_config": model.config.text_config}
    config = NormLlavaConfig(**parts, projector_norm=projector_norm, projector_norm_target=target)
    norm = NormLlavaForConditionalGeneration(config).model.multi_modal_projector.norm
    torch.testing.assert_close(norm.weight, torch.full((32,), gain))
    assert not norm.bias.any()
    assert isinstance(norm, GlobalWeightCompensatedLayerNorm) == (projector_norm == "gwc")


def test_without_the_norm_logits_are_llavas(composed: Callable[..., Path], picture: Image.Image) -> None:
    folder = composed(projector_norm="none")
    model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(images=picture, text=prompt(processor, 1), return_tensors="pt")
    llava = plain_llava(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, llava(**inputs).logits)

    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), llava.generate(**inputs, **options))


def test_with_the_norm_logits_differ_and_tokens_have_the_target_norm(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    inputs = processor(images=picture, text=prompt(processor, 1), return_tensors="pt")
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"]).pooler_output[0]
        assert not torch.allclose(model(**inputs).logits, plain_llava(model)(**inputs).logits, atol=1e-3)
    mean_norm = features.norm(dim=-1).mean().item()
    assert mean_norm == pytest.approx(model.config.projector_norm_target, rel=1e-2)


def test_loading_never_touches_the_gain(model: NormLlavaForConditionalGeneration, tmp_path: Path) -> None:
    trained_gain = torch.linspace(0.01, 0.05, 32)
    model.model.multi_modal_projector.norm.weight.data.copy_(trained_gain)
    model.save_pretrained(tmp_path)
    for loaded in (
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path),
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16),
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, projector_norm_target=5.0),
    ):
        norm = loaded.model.multi_modal_projector.norm
        assert norm.weight.dtype == torch.float32
        assert torch.equal(norm.weight, trained_gain)


def test_a_bfloat16_model_saves_its_norm_in_float32(model: NormLlavaForConditionalGeneration, tmp_path: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert weights.get_tensor(f"{NORM}.weight").dtype == torch.float32
        assert weights.get_tensor("model.multi_modal_projector.linear_1.weight").dtype == torch.bfloat16


def test_a_plain_llava_folder_is_refused(model: NormLlavaForConditionalGeneration, tmp_path: Path) -> None:
    plain_llava(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"training/compose.py --llava_model"):
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path)


def copy_with_changed_weights(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """Copy a checkpoint into a folder, with the weights that `change` makes of its weights."""
    shutil.copytree(source, folder)
    weights = change(load_file(source / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("model_class", [NormLlavaForConditionalGeneration, NormLlavaModel])
@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ("lm_head.", "lm_head, first 'lm_head.weight'"),
        ("vision_tower.encoder.layers.1.mlp.fc1.bias", "missing: 1 of vision_tower, first"),
        ("multi_modal_projector.norm.weight", "missing: 1 of multi_modal_projector, first"),
    ],
)
def test_missing_weights_are_refused(
    composed: Callable[..., Path], tmp_path: Path, dropped: str, message: str, model_class: type[PreTrainedModel]
) -> None:
    def drop(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in weights.items() if dropped not in name}

    folder = copy_with_changed_weights(composed(), tmp_path / "gap", drop)
    if dropped == "lm_head." and model_class is NormLlavaModel:
        model_class.from_pretrained(folder)  # this class has no head, so it misses none
        return

    for options in ({}, {"output_loading_info": True}):
        with pytest.raises(ValueError, match=re.escape(message)):
            model_class.from_pretrained(folder, **options)


@pytest.mark.parametrize("name", ["lm_head.bias", "model.language_model.layers.2.mlp.up_proj.weight"])
def test_weights_that_would_be_dropped_are_refused(composed: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = copy_with_changed_weights(composed(), tmp_path / "more", lambda weights: {**weights, name: torch.ones(3)})
    for model_class in (NormLlavaForConditionalGeneration, NormLlavaModel):
        with pytest.raises(ValueError, match=rf"unexpected: 1 of .*{re.escape(name.removeprefix('model.'))}"):
            model_class.from_pretrained(folder)


def test_ways_to_load_a_whole_checkpoint(composed: Callable[..., Path], tmp_path: Path) -> None:
    whole = NormLlavaForConditionalGeneration.from_pretrained(composed(text="gemma3"))  # Gemma 3's head is tied
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    for loaded in (
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path),
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map="auto"),
        NormLlavaForConditionalGeneration.from_pretrained(None, config=whole.config, state_dict=whole.state_dict()),
    ):
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in whole.state_dict().items())
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight

    assert NormLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map="meta").device.type == "meta"
    _, report = NormLlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())  # no key is missing, unexpected or of another shape

    without = NormLlavaForConditionalGeneration.from_pretrained(tmp_path, projector_norm="none")
    assert isinstance(without.model.multi_modal_projector.norm, torch.nn.Identity)


def test_a_batch_is_answered_like_its_rows_alone(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    other = picture.transpose(Image.Transpose.ROTATE_180)
    cases = [([picture], "Say."), ([picture, other], "What is this picture of?"), ([], "A text alone.")]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    def answer(cases: list[tuple[list[Image.Image], str]], **more_options: object) -> torch.Tensor:
        images = [case_images for case_images, _ in cases]
        texts = [text for _, text in cases]
        inputs = inputs_for(processor, images, texts)
        prompt_length = inputs["input_ids"].shape[1]
        return model.generate(**inputs, **options, **more_options)[:, prompt_length:]

    separate = torch.cat([answer([case]) for case in cases])
    assert torch.equal(answer(cases), separate)
    assert torch.equal(answer(cases, cache_implementation="static"), separate)


# A program that loads a model's folder, saves it and loads it again, without this repository. It takes both folders,
# and leaves the logits of a question about a picture in the second one.
FRESH_PROCESS = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_normllava", "common", "conversations", "diagnostics", "training"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocked())

import torch
from PIL import Image
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor,
    pipeline,
)

source, again = sys.argv[1:]
image = Image.new("RGB", (40, 30), (10, 200, 30))
messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
logits = {}
for folder in (source, again):
    options = {"trust_remote_code": True}
    assert AutoConfig.from_pretrained(folder, **options).model_type.startswith("normllava")
    base = AutoModel.from_pretrained(folder, **options)
    assert type(base).__name__ in ("NormLlavaModel", "NormLlavaKeyAdapterModel")
    for auto_class in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        whole = auto_class.from_pretrained(folder, **options)
        assert type(whole).__name__ == type(base).__name__.replace("Model", "ForConditionalGeneration")
    model = AutoModelForImageTextToText.from_pretrained(folder, **options)
    processor = AutoProcessor.from_pretrained(folder, **options)
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    logits[folder] = model(**inputs).logits
    pipe = pipeline("image-text-to-text", model=folder, **options)
    pipe(text=messages, max_new_tokens=3, return_full_text=False)
    if folder == source:
        model.save_pretrained(again)
        processor.save_pretrained(again)
        base.save_pretrained(again + "-base")
        AutoModel.from_pretrained(again + "-base", **options)
assert torch.equal(logits[source], logits[again])
torch.save(logits[source], again + "/logits.pt")
"""


@pytest.mark.parametrize("max_tiles", [1, 4])
def test_a_saved_folder_loads_without_this_repository(
    composed: Callable[..., Path], tmp_path: Path, max_tiles: int
) -> None:
    source = composed(vision="clip", max_tiles=max_tiles)
    again = tmp_path / "again"
    command = [sys.executable, "-c", FRESH_PROCESS, str(source), str(again)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    auto_map = json.loads((again / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {
        "AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"
    }  # fmt: skip
    code_files = {"configuration_normllava.py", "modeling_normllava.py"}
    if max_tiles > 1:
        code_files.add("processing_normllava.py")
    assert {path.name for path in again.glob("*.py")} == code_files

    # The logits are the same as inside the repository, where `trust_remote_code` isn't needed.
    processor = AutoProcessor.from_pretrained(source)
    picture = Image.new("RGB", (40, 30), (10, 200, 30))
    inputs = processor(images=picture, text=prompt(processor, 1, "What?"), return_tensors="pt")
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model = auto_class.from_pretrained(source)
        assert isinstance(model, NormLlavaForConditionalGeneration)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, torch.load(again / "logits.pt"))
