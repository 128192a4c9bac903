"""Read the weights of a model folder once, to count them in each part and to find those that are not finite."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import UserError
from common.files import WEIGHT_FILES, hash_files
from hub_cards.contents import WEIGHTS_INDEX, read_json


# The names of the tensors of the norm after the projector begin with this.
NORM_PREFIX = "model.multi_modal_projector.norm."
# The names of the tensors of key adapters contain this.
KEY_ADAPTER = ".key_adapter."


@dataclass(frozen=True)
class Weights:
    """What the weight files of a folder hold.

    Attributes:
        file_hashes: SHA-256 hash of each weight file, by the file's name.
        counts: Number of weights in each part of the model, as [`name_part`] names it.
        dtypes: Number of weights of each dtype.
        not_finite: Names of tensors with NaN or infinite values.
    """

    file_hashes: dict[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    not_finite: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count one tensor's weights, and check that they are finite."""
        self.counts[name_part(name)] += tensor.numel()
        self.dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            self.not_finite.append(name)


def read_weights(folder: Path) -> Weights:
    """Read every weight file of a folder.

    Raises:
        UserError: if there is no weight file, a file can't be read, or the index names other files.
    """
    weights = Weights(file_hashes=hash_files(folder, WEIGHT_FILES))
    if not weights.file_hashes:
        raise UserError(f"{folder / 'model.safetensors'} is missing: the folder holds no complete model.")
    require_indexed_files(folder, set(weights.file_hashes))

    for name in weights.file_hashes:
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                for tensor_name in file.keys():  # noqa: SIM118 - the file can't be iterated
                    weights.add(tensor_name, file.get_tensor(tensor_name))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} can't be read ({error}).") from error
    return weights


def require_indexed_files(folder: Path, present: set[str]) -> None:
    """Raises `UserError` if the index of a sharded model doesn't name exactly the weight files that are present."""
    path = folder / WEIGHTS_INDEX
    if not path.exists():
        return

    indexed = set(read_json(path)["weight_map"].values())
    different = sorted(indexed.symmetric_difference(present))
    if different:
        raise UserError(f"{folder / different[0]}: the folder's weight files are not those of its index.")


def name_part(tensor_name: str) -> str:
    """The name of the model's part that a tensor belongs to, such as "vision_tower"."""
    if tensor_name.startswith(NORM_PREFIX):
        return "norm"
    if KEY_ADAPTER in tensor_name:
        return "key_adapter"
    return tensor_name.removeprefix("model.").split(".")[0]
