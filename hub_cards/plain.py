"""Publish a NormLlava as a plain Llava, which needs no code of its own, if both compute the same.

Both do if the NormLlava has no norm layer, merged patches, key adapters or tiles. Scaling or aligning the projector
before training changes nothing.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor


# Fields that NormLlava's config adds to Llava's, with the values for which the model computes the same as a Llava.
LLAVA_VALUES = {"projector_norm": "none", "spatial_merge_size": 1}
# Added fields that have no effect on a model without a norm layer.
FIELDS_WITHOUT_EFFECT = (
    "projector_norm_target",
    "projector_norm_eps",
    "projector_scaled",
    "projector_aligned",
    "llava_name_or_path",
)

# Prefixes of a NormLlava's tensor names, with the prefixes that replace them in the first Llava checkpoints. vLLM,
# converters and every version of transformers read the names of those checkpoints.
LLAVA_PREFIXES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.vision_tower.": "vision_tower.",
}
# Vision encoders whose tensors have one more level, `vision_model`, in the names of those checkpoints.
TYPES_WITH_VISION_MODEL = ("clip_vision_model", "siglip_vision_model")


def computes_like_llava(config: LlavaConfig, processor: Mapping[str, Any]) -> bool:
    """Whether a model computes the same with transformers' own classes as with NormLlava's.

    Args:
        config: The model's config.
        processor: The content of processor_config.json.
    """
    if processor.get("processor_class") != LlavaProcessor.__name__:  # NormLlava's own processor cuts tiles
        return False

    for name in added_fields(config) - set(FIELDS_WITHOUT_EFFECT):
        # A field in neither of the constants above is one of a config with key adapters, which Llava can't have.
        if name not in LLAVA_VALUES or getattr(config, name) != LLAVA_VALUES[name]:
            return False
    return True


def added_fields(config: LlavaConfig) -> set[str]:
    """The names of the fields that a config's class adds to Llava's."""
    llava_fields = {field.name for field in fields(LlavaConfig)}
    return {field.name for field in fields(config)} - llava_fields


def as_llava_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of a plain Llava's config.json, from the content of a NormLlava's."""
    removed_names = {"auto_map", *LLAVA_VALUES, *FIELDS_WITHOUT_EFFECT}
    kept_fields = {name: value for name, value in settings.items() if name not in removed_names}
    return {
        **kept_fields,
        "model_type": LlavaConfig.model_type,
        "architectures": [LlavaForConditionalGeneration.__name__],
    }


def copy_as_llava(weight_file: Path, folder: Path, vision_type: str) -> None:
    """Copy a weight file into a folder, and give its tensors the names that they have in a plain Llava.

    Args:
        weight_file: A NormLlava's weight file.
        folder: Where the copy goes.
        vision_type: The vision encoder's `model_type`.
    """
    tensors = {}
    with safe_open(weight_file, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file can't be iterated
            tensors[name_in_llava(name, vision_type)] = file.get_tensor(name)
    save_file(tensors, folder / weight_file.name, metadata={"format": "pt"})


def as_llava_index(index: dict[str, Any], vision_type: str) -> dict[str, Any]:
    """The index of a plain Llava's weight files, from the index of a NormLlava's."""
    weight_map = {}
    for name, file_name in index["weight_map"].items():
        weight_map[name_in_llava(name, vision_type)] = file_name
    return {**index, "weight_map": weight_map}


def name_in_llava(name: str, vision_type: str) -> str:
    """The name that a plain Llava's weight file has for a tensor of a NormLlava."""
    prefixes = dict(LLAVA_PREFIXES)
    if vision_type in TYPES_WITH_VISION_MODEL:
        prefixes["model.vision_tower."] = "vision_tower.vision_model."

    for prefix, llava_prefix in prefixes.items():
        if name.startswith(prefix):
            return llava_prefix + name.removeprefix(prefix)
    raise AssertionError(f"{name}: no tensor of a NormLlava begins like this")
