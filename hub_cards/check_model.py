"""Every reason why a folder's model should not be published, checked before and after staging."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

import modeling_normllava
from hub_cards.client import explain
from hub_cards.facts import parse_json, read_json
from hub_cards.findings import REBUILD, Finding
from hub_cards.fresh_load import ask
from hub_cards.weights import INDEX, KEY_ADAPTER, NORM, Weights, find_weight_faults
from modeling_normllava import NormLlavaConfig, NormLlavaKeyAdapterConfig


CLASS_FILES = tuple(sorted(Path(str(modeling_normllava.__file__)).parent.glob("*_normllava.py")))
KEY_ADAPTER_FILE = CLASS_FILES[0].with_name("key_adapters.py")
# Files of a checkpoint that are staged if they exist, besides weights and class files.
JSON_FILES = (
    "config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", INDEX,
)  # fmt: skip
QUESTION = "What is it?"
NEEDED = ("config.json", "generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
# Fields that make transformers run code or read other files, and values that name code elsewhere.
CODE_FIELDS = {
    "auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation", "experts_implementation",
    "transformers_weights", "configuration_files", "fast_tokenizer_files",
}  # fmt: skip
OTHER_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+--[\w.]+")


def find_model_faults(folder: Path, weights: Weights, steps: int) -> Iterator[Finding]:
    """All faults of a model. Code comes first: if it is not this version's, nothing is loaded.

    Args:
        folder: A run's folder, or a stage folder.
        weights: What [`read_weights`] returned for it.
        steps: Training steps that it claims.
    """
    faults = [*find_code_faults(folder)]
    yield from faults
    if faults:
        return
    try:
        config = AutoConfig.from_pretrained(folder)
        if not isinstance(config, NormLlavaConfig):
            raise ValueError(f"model_type is {config.model_type!r}, not {NormLlavaConfig.model_type!r}")
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config, dtype=config.dtype or torch.float32)
    except Exception as error:  # files may hold anything
        yield Finding("config.json", f"no model can be built from it ({explain(error)})", REBUILD)
        return
    yield from find_config_faults(read_json(folder / "config.json"))
    yield from find_weight_faults(weights, stored_tensors(model))
    yield from find_norm_faults(weights, steps)
    yield from find_key_adapter_faults(weights, steps)
    yield from find_processor_faults(folder, model)


def find_code_faults(folder: Path) -> Iterator[Finding]:
    """Class files that are not this version's, and settings that would run other code."""
    for path in class_files(folder):
        if not (folder / path.name).is_file():
            yield Finding(path.name, "is missing", f"Copy it from {path.parent.name}/.")
        elif (folder / path.name).read_bytes() != path.read_bytes():
            fix = f"Look at the difference; then copy it from {path.parent.name}/, or use the version it comes from."
            yield Finding(path.name, "differs from this version's file", fix)
    for name in NEEDED:
        if not (folder / name).is_file():
            yield Finding(name, "is missing", REBUILD)
    for name in JSON_FILES:
        if not (folder / name).is_file():
            continue
        try:
            value = parse_json((folder / name).read_text(encoding="utf-8"))
        except ValueError as error:
            yield Finding(name, f"is not valid JSON ({error})", REBUILD)
            continue
        if name == "config.json":
            keys = isinstance(value, dict) and value.get("model_type") == NormLlavaKeyAdapterConfig.model_type
            ours = (NormLlavaKeyAdapterConfig if keys else NormLlavaConfig)().auto_map
            if not isinstance(value, dict) or value.pop("auto_map", None) != ours:
                yield Finding(name, f"its auto_map is not {json.dumps(ours)}", "Save the model again.")
        for field, entry in walk(value):
            if field in CODE_FIELDS and entry is not None:
                reason = f"has {field}, {json.dumps(entry)}, which would run other code or read other files"
                yield Finding(name, reason, "Remove it.")
            elif isinstance(entry, str) and OTHER_REPOSITORY.fullmatch(entry):
                yield Finding(name, f"{field} points to another repository, {entry}", "Remove it.")


def class_files(folder: Path) -> tuple[Path, ...]:
    """The class files of this version that a folder's model needs."""
    try:
        has_keys = read_json(folder / "config.json")["model_type"] == NormLlavaKeyAdapterConfig.model_type
    except (KeyError, OSError, TypeError, ValueError):
        has_keys = False
    return (*CLASS_FILES, KEY_ADAPTER_FILE) if has_keys else CLASS_FILES


def walk(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside a JSON value, with its field's name."""
    if field:
        yield field, value
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from walk(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from walk(entry, field)


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` would write for a model, by name."""
    tensors = {name: entry for name, entry in model.state_dict().items() if name not in model.all_tied_weights_keys}
    return revert_weight_conversion(model, tensors)


def find_config_faults(config: dict[str, Any]) -> Iterator[Finding]:
    """Settings that don't describe the weights."""
    keys = "KeyAdapter" if config.get("key_adapter_rank") else ""
    if config.get("architectures") != [f"NormLlava{keys}ForConditionalGeneration"]:
        reason = f"architectures is {config.get('architectures')}, not ['NormLlava{keys}ForConditionalGeneration']"
        yield Finding("config.json", reason, "Save the model again.")
    if not config.get("dtype"):
        yield Finding("config.json", "has no dtype", "Save the model again.")
    for field, _ in walk(config):
        if field == "quantization_config":
            yield Finding("config.json", "has a quantization_config, but the weights are not quantized", "Remove it.")


def find_norm_faults(weights: Weights, steps: int) -> Iterator[Finding]:
    """A norm that blocks the picture, or that was never trained."""
    if "weight" not in weights.norm:
        return
    file = next(tensor.file for tensor in weights.tensors if tensor.name == f"{NORM}weight")
    gain, bias = weights.norm["weight"], weights.norm.get("bias", torch.zeros(1))
    if not gain.any():
        yield Finding(file, "holds a norm with a gain of 0 everywhere: no picture gets through", REBUILD)
    elif steps > 0 and (gain == gain[0]).all() and not bias.any():
        reason = f"holds an untrained norm, gain {gain[0].item():.4g} and bias 0 everywhere, after {steps} steps"
        yield Finding(file, reason, "Stage the folder that training wrote.")


def find_key_adapter_faults(weights: Weights, steps: int) -> Iterator[Finding]:
    """Key adapters that were never trained."""
    starts = [tensor for tensor in weights.tensors if tensor.name.endswith(f"{KEY_ADAPTER}up") and tensor.is_zero]
    if steps > 0 and starts:
        more = f" (and {len(starts) - 1} more)" if starts[1:] else ""
        reason = f"holds untrained key adapters: {starts[0].name}{more} is 0 everywhere after {steps} steps"
        fix = "Train them, in stage adapt or instruct, or publish the model without them."
        yield Finding(starts[0].file, reason, fix)


def find_processor_faults(folder: Path, model: Any) -> Iterator[Finding]:
    """A processor whose tokens or pictures don't fit the model."""
    config = model.config
    try:
        processor = AutoProcessor.from_pretrained(folder)
        inputs = ask(processor, Image.new("RGB", (64, 48)), QUESTION)
        (features,) = model.get_image_features(inputs["pixel_values"].to("meta")).pooler_output
        generation = GenerationConfig.from_pretrained(folder)
        asked, ends = processor.decode(inputs["input_ids"][0]), generation.eos_token_id
    except Exception as error:  # files may hold anything
        reason = f"can't prepare a picture and a question for this model ({explain(error)})"
        yield Finding("processor_config.json", reason, "Stage the processor that the model was trained with.")
        return
    tokenizer, rows = processor.tokenizer, config.text_config.vocab_size
    token, count = processor.image_token_id, int((inputs["input_ids"] == config.image_token_id).sum())
    if token != config.image_token_id:
        reason = (
            f"image_token_index is {config.image_token_id}, but the processor's {processor.image_token} is {token}"
        )
        yield Finding("config.json", reason, "Set it to the tokenizer's.")
    elif count != features.shape[0]:
        reason = f"makes {count} tokens of a picture, but the model {features.shape[0]}"
        yield Finding("processor_config.json", reason, "Stage the processor that the model was trained with.")
    if config.image_seq_length != features.shape[0]:
        reason = f"image_seq_length is {config.image_seq_length}, but a picture becomes {features.shape[0]} tokens"
        yield Finding("config.json", reason, f"Set it to {features.shape[0]}; the card shows it.")
    if QUESTION not in asked:
        yield Finding("chat_template.jinja", f"makes {asked!r} of the question {QUESTION!r}", "Stage the model's own.")
    if generation.return_dict_in_generate:
        yield Finding("generation_config.json", "has return_dict_in_generate, which returns no tensor", "Remove it.")
    if max(tokenizer.get_vocab().values()) >= rows:
        yield Finding("tokenizer.json", f"has more tokens than the model's {rows}", "Stage the model's own tokenizer.")
    if tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
        reason = f"eos_token_id is {ends}, without the tokenizer's {tokenizer.eos_token_id}: answers would not end"
        yield Finding("generation_config.json", reason, "Add it.")
