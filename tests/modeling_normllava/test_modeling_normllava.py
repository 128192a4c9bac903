"""The model class has a norm and is Llava otherwise, and a saved folder loads without this repository."""

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


# The prefix of the norm's weights in a state dict.
NORM = "model.multi_modal_projector.norm"


def make_plain_llava(model: NormLlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """A Llava with the weights of a NormLlava, except those of the norm."""
    field_names = ("vision_config", "text_config", "image_token_index", "vision_feature_select_strategy")
    fields = {name: getattr(model.config, name) for name in field_names}
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith(NORM)}

    llava = LlavaForConditionalGeneration(LlavaConfig(**fields))
    llava.load_state_dict(weights)
    return llava.eval()


def write_prompt(processor: Any, num_images: int, text: str) -> str:
    """The prompt that the chat template writes for pictures with a text after them."""
    image_parts = [{"type": "image"}] * num_images
    message = {"role": "user", "content": [*image_parts, {"type": "text", "text": text}]}
    return processor.apply_chat_template([message], add_generation_prompt=True)


def inputs_for(processor: Any, images: list[list[Image.Image]], texts: list[str]) -> dict[str, torch.Tensor]:
    """The model's inputs for a batch of prompts. `images` has the list of pictures of each prompt."""
    prompts = []
    for prompt_images, text in zip(images, texts, strict=True):
        prompts.append(write_prompt(processor, len(prompt_images), text))
    inputs: dict[str, Any] = {"text": prompts}
    if any(images):  # the processor refuses a batch whose lists are all empty
        inputs["images"] = images
    return dict(processor(**inputs, padding=True, return_tensors="pt"))


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(StrictDataclassError, match=r"gwc.*layernorm.*none"):
        NormLlavaConfig(projector_norm="rmsnorm")


def new_norm(model: NormLlavaForConditionalGeneration, **fields: Any) -> torch.nn.LayerNorm:
    """The norm of a new model with the backbones of `model`, and with these fields of the config.

    The hidden size is 32.
    """
    config = NormLlavaConfig(vision_config=model.config.vision_config, text_config=model.config.text_config, **fields)
    return NormLlavaForConditionalGeneration(config).model.multi_modal_projector.norm


@pytest.mark.parametrize("projector_norm", ["gwc", "layernorm"])
def test_the_gain_starts_so_that_tokens_have_the_target_norm(
    model: NormLlavaForConditionalGeneration, projector_norm: str
) -> None:
    norm = new_norm(model, projector_norm=projector_norm, projector_norm_target=0.8)
    # With a gain of 1, a normalised token of 32 units has the L2 norm √32.
    torch.testing.assert_close(norm.weight, torch.full((32,), 0.8 / 32**0.5))
    assert not norm.bias.any()
    is_compensated = isinstance(norm, GlobalWeightCompensatedLayerNorm)
    assert is_compensated == (projector_norm == "gwc")


def test_without_a_target_the_gain_starts_at_1(model: NormLlavaForConditionalGeneration) -> None:
    norm = new_norm(model, projector_norm="gwc", projector_norm_target=None)
    assert torch.equal(norm.weight, torch.ones(32))


def test_without_the_norm_the_model_is_llava(make_model_folder: Callable[..., Path], picture: Image.Image) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    model = NormLlavaForConditionalGeneration(
        NormLlavaConfig.from_pretrained(make_model_folder(), projector_norm="none")
    )
    model.eval()
    inputs = inputs_for(processor, [[picture]], ["What is it?"])
    llava = make_plain_llava(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, llava(**inputs).logits)

    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), llava.generate(**inputs, **options))


@torch.no_grad()
def test_with_the_norm_logits_differ_and_tokens_have_the_target_norm(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    inputs = inputs_for(processor, [[picture]], ["What is it?"])
    llava = make_plain_llava(model)
    assert not torch.allclose(model(**inputs).logits, llava(**inputs).logits, atol=1e-3)

    (image_tokens,) = model.get_image_features(inputs["pixel_values"]).pooler_output  # there is one picture
    mean_norm = image_tokens.norm(dim=-1).mean().item()
    assert mean_norm == pytest.approx(model.config.projector_norm_target, rel=1e-2)


def test_loading_never_touches_the_gain(model: NormLlavaForConditionalGeneration, tmp_path: Path) -> None:
    trained_gain = torch.linspace(0.01, 0.05, 32)
    model.model.multi_modal_projector.norm.weight.data.copy_(trained_gain)
    model.save_pretrained(tmp_path)
    for loaded in (
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path),
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16),
        # Only a new norm's gain would come from this target.
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
    make_plain_llava(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"training/compose.py --llava_model .*--projector_norm gwc --output_dir"):
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path)


def copy_with_changed_weights(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """Copy a checkpoint into a folder, with the weights that `change` returns for the checkpoint's weights."""
    shutil.copytree(source, folder)
    weights = change(load_file(source / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy_without_weight(source: Path, folder: Path, dropped_name: str) -> Path:
    """Copy a checkpoint into a folder without one of its weights."""

    def drop_weight(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in weights.items() if name != dropped_name}

    return copy_with_changed_weights(source, folder, drop_weight)


@pytest.mark.parametrize("model_class", [NormLlavaForConditionalGeneration, NormLlavaModel])
@pytest.mark.parametrize(
    ("dropped_name", "part"),
    [
        ("model.vision_tower.encoder.layers.1.mlp.fc1.bias", "vision_tower"),
        ("model.multi_modal_projector.norm.weight", "multi_modal_projector"),
    ],
)
def test_a_missing_weight_is_refused(
    make_model_folder: Callable[..., Path],
    tmp_path: Path,
    dropped_name: str,
    part: str,
    model_class: type[PreTrainedModel],
) -> None:
    folder = copy_without_weight(make_model_folder(), tmp_path / "gap", dropped_name)
    message = f"missing: 1 of {part}, first"
    with pytest.raises(ValueError, match=message):
        model_class.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        model_class.from_pretrained(folder, output_loading_info=True)


def test_a_missing_lm_head_is_refused_by_the_class_that_has_one(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_without_weight(make_model_folder(), tmp_path / "headless", "lm_head.weight")
    NormLlavaModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"lm_head, first 'lm_head\.weight'"):
        NormLlavaForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize("name", ["lm_head.bias", "model.language_model.layers.2.mlp.up_proj.weight"])
def test_a_weight_that_the_model_lacks_is_refused(
    make_model_folder: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """The model's head has no bias, and its decoder's layers are 0 and 1."""

    def add_weight(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**weights, name: torch.ones(3)}  # any size will do

    folder = copy_with_changed_weights(make_model_folder(), tmp_path / "more", add_weight)
    # NormLlavaModel's message has the name without "model.".
    name_in_both_messages = re.escape(name.removeprefix("model."))
    for model_class in (NormLlavaForConditionalGeneration, NormLlavaModel):
        with pytest.raises(ValueError, match=f"unexpected: 1 of .*{name_in_both_messages}"):
            model_class.from_pretrained(folder)


def test_a_checkpoint_in_shards_with_a_tied_head_loads_in_all_ways(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    saved = NormLlavaForConditionalGeneration.from_pretrained(
        make_model_folder(text="gemma3")
    )  # Gemma 3's head is tied
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    num_shards = len(list(tmp_path.glob("model-*.safetensors")))
    assert num_shards > 5
    saved_weights = saved.state_dict()
    for loaded in (
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path),
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map="auto"),
        NormLlavaForConditionalGeneration.from_pretrained(None, config=saved.config, state_dict=saved_weights),
    ):
        loaded_weights = loaded.state_dict()
        for name, weight in saved_weights.items():
            assert torch.equal(loaded_weights[name], weight)
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight

    on_meta_device = NormLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map="meta")
    assert on_meta_device.device.type == "meta"


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_loading_info_of_a_whole_checkpoint_is_empty(make_model_folder: Callable[..., Path], family: str) -> None:
    folder = make_model_folder(text=family)
    _, loading_info = NormLlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values())  # no weight is missing, unexpected or of another shape


def test_a_model_can_be_loaded_without_its_norm(make_model_folder: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), projector_norm="none")
    assert isinstance(model.model.multi_modal_projector.norm, torch.nn.Identity)


def test_a_batch_is_answered_like_each_prompt_alone(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    turned_picture = picture.transpose(Image.Transpose.ROTATE_180)
    images = [[picture], [picture, turned_picture], []]
    texts = ["Say.", "What is this picture of?", "A text alone."]

    def answer(batch_images: list[list[Image.Image]], batch_texts: list[str], **options: object) -> torch.Tensor:
        """The tokens of the answers to a batch of prompts: `(num_prompts, 6)`."""
        inputs = inputs_for(processor, batch_images, batch_texts)
        prompt_length = inputs["input_ids"].shape[1]
        output = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
        return output[:, prompt_length:]

    separate_answers = [answer([prompt_images], [text]) for prompt_images, text in zip(images, texts, strict=True)]
    expected = torch.cat(separate_answers)
    assert torch.equal(answer(images, texts), expected)
    assert torch.equal(answer(images, texts, cache_implementation="static"), expected)


# A program that loads a model from the folder `source`, saves the model into the folder `again`, and loads the model
# from `again`, all without this repository. It also writes the model's logits for `messages` to again/logits.pt.
RELOADING_PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class NoRepository(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_normllava", "normllava", "training"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, NoRepository())

import torch
from PIL import Image
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor,
    pipeline,
)

source, again = sys.argv[1:]
image = Image.new("RGB", (40, 30), (10, 200, 30))
messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
options = {"trust_remote_code": True}
logits = {}
for folder in (source, again):  # the first round writes `again`
    # Every auto class loads the right class of the folder's code.
    assert AutoConfig.from_pretrained(folder, **options).model_type.startswith("normllava")
    headless = AutoModel.from_pretrained(folder, **options)  # the model without its LM head
    headless_class = type(headless).__name__
    assert headless_class in ("NormLlavaModel", "NormLlavaKeyAdapterModel")
    for auto_class in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        with_lm_head = auto_class.from_pretrained(folder, **options)
        assert type(with_lm_head).__name__ == headless_class.replace("Model", "ForConditionalGeneration")

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
        headless.save_pretrained(again + "-headless")
        AutoModel.from_pretrained(again + "-headless", **options)
assert torch.equal(logits[source], logits[again])
torch.save(logits[source], again + "/logits.pt")
"""


@pytest.mark.parametrize("max_tiles", [1, 4])
def test_a_saved_folder_loads_without_this_repository(
    make_model_folder: Callable[..., Path], tmp_path: Path, max_tiles: int
) -> None:
    source = make_model_folder(vision="clip", max_tiles=max_tiles)
    again = tmp_path / "again"
    command = [sys.executable, "-c", RELOADING_PROGRAM, str(source), str(again)]
    # Python imports from the working directory first, so the repository's root must not be the working directory.
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

    # Here the repository's classes are loaded, without `trust_remote_code`. The picture and the question are those of
    # the program, so the logits are too.
    processor = AutoProcessor.from_pretrained(source)
    inputs = inputs_for(processor, [[Image.new("RGB", (40, 30), (10, 200, 30))]], ["What?"])
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model = auto_class.from_pretrained(source)
        assert isinstance(model, NormLlavaForConditionalGeneration)
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, torch.load(again / "logits.pt"))
