"""Read the weight files of a model: hash them, count the weights of each part, and find values that are not finite.

One pass over the files does it all, since the files of a large model take long to read.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hub_cards.contents import WEIGHTS_INDEX, read_json
from normllava.errors import UserError
from normllava.files import WEIGHT_FILES, sha256


# How the names of the norm's tensors begin. The norm follows the projector.
NORM_PREFIX = "model.multi_modal_projector.norm."
# How the name of the head's tensor begins in a Llava's file.
LLAVA_HEAD = "language_model.lm_head."
# What the names of key adapters' tensors contain. Key adapters are low-rank adapters of the decoder's keys.
KEY_ADAPTER = ".key_adapter."


@dataclass
class Weights:
    """What the weight files of a folder hold.

    Attributes:
        file_hashes: SHA-256 hash of each weight file, by the file's name.
        counts: Number of weights in each part of the model. [`name_part`] gives the parts' names.
        dtypes: Number of weights of each dtype.
        not_finite: Names of tensors with NaN or infinite values.
    """

    file_hashes: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    not_finite: list[str] = field(default_factory=list)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor's weights, and check that they are finite."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.counts[name_part(name)] += tensor.numel()
        self.dtypes[dtype] += tensor.numel()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            self.not_finite.append(name)


def read_weights(folder: Path) -> Weights:
    """Read all weight files of a folder.

    Raises:
        UserError: if there is no weight file, if a file can't be read, or if the index names other files.
    """
    paths = sorted(folder.glob(WEIGHT_FILES))
    if not paths:
        raise UserError(f"{folder / 'model.safetensors'} is missing: the folder holds no complete model.")
    check_index(folder, file_names={path.name for path in paths})

    weights = Weights()
    for path in paths:
        # A file that was just hashed is still in the system's cache when its tensors are read.
        weights.file_hashes[path.name] = sha256(path)
        try:
            with safe_open(path, framework="pt") as file:
                for tensor_name in file.keys():  # noqa: SIM118 - the file can't be iterated
                    weights.add_tensor(tensor_name, file.get_tensor(tensor_name))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} can't be read ({error}).") from error
    return weights


def check_index(folder: Path, file_names: set[str]) -> None:
    """Raises `UserError` if a sharded model's index doesn't name exactly the folder's weight files."""
    path = folder / WEIGHTS_INDEX
    if not path.exists():
        return

    # The index maps the name of each tensor to the name of the file that holds it.
    indexed_names = set(read_json(path)["weight_map"].values())
    different_names = sorted(indexed_names.symmetric_difference(file_names))
    if different_names:
        raise UserError(f"{folder / different_names[0]}: the folder's weight files are not those of its index.")


def name_part(tensor_name: str) -> str:
    """The name of the model's part that a tensor belongs to.

    The name is "norm", "key_adapter", or that of a module, such as "vision_tower" for
    "model.vision_tower.encoder.layers.0.mlp.fc1.weight".
    """
    if tensor_name.startswith(NORM_PREFIX):
        return "norm"
    if KEY_ADAPTER in tensor_name:
        return "key_adapter"
    if tensor_name.startswith(LLAVA_HEAD):
        return "lm_head"
    return tensor_name.removeprefix("model.").split(".")[0]
