"""The weights of a folder, read once: where each tensor is, whether it is finite, and the files' hashes."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from conversations.files import WEIGHT_FILES, fingerprint
from hub_cards.findings import REBUILD, Finding


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Dtypes that can hold a NaN, by their names in safetensors.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NORM = "model.multi_modal_projector.norm."
KEY_ADAPTER = ".key_adapter."
PIECE = 2**26  # bytes; a multiple of every dtype's size


@dataclass(frozen=True)
class StoredTensor:
    """An entry of a weight file's header, and whether all its values are finite, and whether all are 0."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    is_finite: bool = True
    is_zero: bool = False


@dataclass(frozen=True)
class Weights:
    """What a folder's weight files hold.

    Attributes:
        tensors: In the order of files and bytes; a name may occur twice.
        sha256: By file.
        headers: JSON text by file, metadata included.
        index: File by tensor, `None` if there is no index.
        norm: `weight` and `bias` of the norm after the projector; empty if there is none.
    """

    tensors: list[StoredTensor]
    sha256: dict[str, str]
    headers: dict[str, str]
    index: dict[str, str] | None
    norm: dict[str, torch.Tensor]

    def count(self, by: str) -> dict[str, int]:
        """Weights by `part` of the model, or by `dtype`."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[_part(tensor.name) if by == "part" else tensor.dtype] += torch.Size(tensor.shape).numel()
        return dict(sorted(counts.items()))

    @property
    def fingerprint(self) -> str:
        """Of all files."""
        return fingerprint(self.sha256)


def _part(name: str) -> str:
    if name.startswith(NORM):
        return "multi_modal_projector.norm"
    if KEY_ADAPTER in name:
        return "language_model.key_adapter"
    return name.removeprefix("model.").split(".")[0]


def read_weights(folder: Path) -> Weights:
    """Read every weight file once, from its first byte to its last.

    Raises:
        ValueError: if there is none, or one can't be read.
    """
    paths = sorted(folder.glob(WEIGHT_FILES))
    if not paths:
        raise ValueError(f"{folder / WEIGHTS} is missing: the folder holds no complete model.")
    weights = Weights([], {}, {}, read_index(folder / INDEX), {})
    size = sum(path.stat().st_size for path in paths)
    with tqdm(total=size, unit="B", unit_scale=True, desc="Reading weights", disable=None) as progress:
        for path in paths:
            read_file(path, weights, progress)
    return weights


def read_index(path: Path) -> dict[str, str] | None:
    """File by tensor. Raises `ValueError` if there is an index that can't be read."""
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index["metadata"], dict) or not isinstance(index["weight_map"], dict):
            raise TypeError("metadata and weight_map have to be mappings")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error}).") from error
    return dict(index["weight_map"])


def read_file(path: Path, weights: Weights, progress: tqdm) -> None:
    """Add a weight file to `weights`. Raises `ValueError` if it is truncated."""
    try:
        with safe_open(path, framework="pt"):  # checks that header and file length match, without gaps
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read ({error}).") from error
    with path.open("rb") as file:
        head = file.read(8)
        text = file.read(int.from_bytes(head, "little"))
        digest = hashlib.sha256(head + text)
        progress.update(len(head) + len(text))
        weights.headers[path.name] = text.decode()
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = FLOATS.get(entry["dtype"])
            start, end = entry["data_offsets"]
            is_finite, is_zero = True, dtype is not None
            for begin in range(start, end, PIECE):
                piece = bytearray(file.read(min(PIECE, end - begin)))
                digest.update(piece)
                progress.update(len(piece))
                if dtype is not None:
                    values = torch.frombuffer(piece, dtype=dtype)
                    is_finite = is_finite and bool(values.isfinite().all())
                    is_zero = is_zero and not values.any()
                    if name.startswith(NORM):  # fits in one piece
                        weights.norm[name.removeprefix(NORM)] = values
            shape = tuple(entry["shape"])
            weights.tensors.append(StoredTensor(name, path.name, entry["dtype"], shape, is_finite, is_zero))
        weights.sha256[path.name] = digest.hexdigest()


def find_weight_faults(weights: Weights, expected: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Tensors that the files hold and the model does not, or the other way round, or that differ.

    Args:
        weights: What [`read_weights`] returned.
        expected: The model's own tensors; only names, shapes and dtypes matter.
    """
    names = {dtype: name for name, dtype in FLOATS.items()}
    index = weights.index or dict.fromkeys(expected, WEIGHTS)
    # By file and kind, since all tensors of a model can have the same fault.
    faults: dict[tuple[str, str], list[str]] = defaultdict(list)
    files: dict[str, str] = {}
    for tensor in weights.tensors:
        name, file, own = tensor.name, tensor.file, expected.get(tensor.name)
        if own is None:
            faults[file, "holds {}, which the model does not have"].append(name)
        elif tensor.shape != own.shape:
            faults[file, "holds {}"].append(f"{name} of {list(tensor.shape)}, not {list(own.shape)}")
        elif tensor.dtype != names.get(own.dtype):
            faults[file, "holds {}"].append(f"{name} as {tensor.dtype}, not {names.get(own.dtype, own.dtype)}")
        if not tensor.is_finite:
            faults[file, "holds {} with NaN or infinite values"].append(name)
        if name in files:
            faults[file, "holds duplicate {}"].append(f"{name}, also in {files[name]}")
        elif index.get(name, file) != file:
            faults[file, "holds {}, which the index puts elsewhere"].append(name)
        files[name] = file
    for name in sorted(expected.keys() - files.keys()):
        faults[index.get(name, INDEX), "lacks {}, which the model has"].append(name)
    for (file, reason), items in faults.items():
        yield Finding(file, reason.format(items[0] + (f" (and {len(items) - 1} more)" if items[1:] else "")), REBUILD)
    for file in sorted(set(index.values()) ^ weights.sha256.keys()):
        stale = file in weights.sha256
        yield Finding(file, "is not in the index" if stale else "is in the index but missing", REBUILD)
