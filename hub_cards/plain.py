"""The names of a plain Llava's weights in its release.

transformers' newest versions write the weights of CLIP and SigLIP without the level `vision_model` in their names.
vLLM, converters and every version of transformers read the names of the first Llava checkpoints, which have it.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file


ENCODER = "vision_tower."
ENCODER_IN_RELEASE = "vision_tower.vision_model."
# The vision encoders whose weights have this level in those checkpoints.
TYPES_WITH_VISION_MODEL = ("clip_vision_model", "siglip_vision_model")


def copy_with_release_names(weight_file: Path, folder: Path, vision_type: str) -> None:
    """Copy a weight file of a Llava into a folder, under the names of a release.

    Args:
        weight_file: The weight file.
        folder: Where the copy goes.
        vision_type: The vision encoder's `model_type`.
    """
    tensors = {}
    with safe_open(weight_file, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file can't be iterated
            tensors[release_name(name, vision_type)] = file.get_tensor(name)
    save_file(tensors, folder / weight_file.name, metadata={"format": "pt"})


def index_with_release_names(index: dict[str, Any], vision_type: str) -> dict[str, Any]:
    """The index of a Llava's weight files, under the names of a release."""
    weight_map = {}
    for name, file_name in index["weight_map"].items():
        weight_map[release_name(name, vision_type)] = file_name
    return {**index, "weight_map": weight_map}


def release_name(name: str, vision_type: str) -> str:
    """The name that a weight of a Llava has in a release."""
    has_level = name.startswith(ENCODER_IN_RELEASE)
    if vision_type not in TYPES_WITH_VISION_MODEL or has_level or not name.startswith(ENCODER):
        return name
    return ENCODER_IN_RELEASE + name.removeprefix(ENCODER)
