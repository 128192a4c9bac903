"""The weights of a folder, read once: how many they are, whether they are finite, and which were never trained."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.errors import UserError
from common.files import WEIGHT_FILES, hash_files
from hub_cards.contents import INDEX


NORM = "model.multi_modal_projector.norm."
KEY_ADAPTER = ".key_adapter."


@dataclass(frozen=True)
class Weights:
    """What a folder's weight files hold: hashes by file, numbers of weights by part of the model and by dtype.

    `not_finite` names tensors with NaN or infinite values; `constant` has the values of the norm's and the key
    adapters' tensors that hold one value only.
    """

    sha256: dict[str, str]
    parts: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    not_finite: list[str] = field(default_factory=list)
    constant: dict[str, float] = field(default_factory=dict)

    def find_faults(self, steps: int) -> Iterator[str]:
        """Values that `steps` steps of training can't leave; 0 if their number is not known."""
        if self.not_finite:
            yield f"weights: {listed(self.not_finite)}: NaN or infinite values. Train again."
        if steps and f"{NORM}weight" in self.constant and self.constant.get(f"{NORM}bias") == 0:
            yield f"weights: the norm is untrained after {steps} steps. Stage the folder that training wrote."
        untrained = sorted(name for name, value in self.constant.items() if KEY_ADAPTER in name and value == 0)
        if untrained and steps:
            yield f"weights: {listed(untrained)}: untrained after {steps} steps. Train the key adapters, or take none."


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to."""
    if name.startswith(NORM):
        return "multi_modal_projector.norm"
    return "language_model.key_adapter" if KEY_ADAPTER in name else name.removeprefix("model.").split(".")[0]


def listed(names: list[str]) -> str:
    """The first name, and how many more there are: all tensors of a model can have the same fault."""
    return names[0] + (f" (and {len(names) - 1} more)" if names[1:] else "")


def read_weights(folder: Path) -> Weights:
    """Read every weight file. Raises `UserError` if there is none, one is torn, or the index names others."""
    weights = Weights(hash_files(folder, WEIGHT_FILES))
    if not weights.sha256:
        raise UserError(f"{folder / 'model.safetensors'} is missing: the folder holds no complete model.")
    if (folder / INDEX).exists():
        indexed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        if wrong := sorted({*indexed} ^ weights.sha256.keys()):
            raise UserError(f"{folder / wrong[0]}: the folder's weight files are not those of its index.")
    for path in (folder / name for name in weights.sha256):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_tensor(name)
                    weights.parts[part_of(name)] += tensor.numel()
                    weights.dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
                    if tensor.is_floating_point() and not tensor.isfinite().all():
                        weights.not_finite.append(name)
                    is_watched = name.startswith(NORM) or name.endswith(f"{KEY_ADAPTER}up")
                    if is_watched and (tensor == (first := tensor.flatten()[0])).all():
                        weights.constant[name] = first.item()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} can't be read ({error}).") from error
    return weights
