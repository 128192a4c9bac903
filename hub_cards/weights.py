"""The weights of a folder, read once: what is where, whether it is finite, and the files' hashes."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from hub_cards.findings import REBUILD, Finding


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Those that can hold a NaN, by the names of safetensors.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NORM = "model.multi_modal_projector.norm."
PIECE = 2**26  # bytes; a multiple of every dtype's size


@dataclass(frozen=True)
class StoredTensor:
    """An entry of a weight file's header, and whether all its values are finite."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    is_finite: bool = True


@dataclass(frozen=True)
class Weights:
    """What a folder's weight files hold.

    Attributes:
        tensors: In the order of files and bytes; a name may be there twice.
        sha256: By file.
        headers: JSON text by file, metadata included.
        index: File by tensor, `None` where there is no index.
        norm: `weight` and `bias` of the norm behind the projector; empty if there is none.
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
            part = "multi_modal_projector.norm" if tensor.name.startswith(NORM) else _part(tensor.name)
            counts[part if by == "part" else tensor.dtype] += torch.Size(tensor.shape).numel()
        return dict(sorted(counts.items()))

    @property
    def mean_gain(self) -> float | None:
        """Mean |gain| of the norm; `None` if there is none."""
        gain = self.norm.get("weight")
        return None if gain is None else gain.float().abs().mean().item()


def _part(name: str) -> str:
    return name.removeprefix("model.").split(".")[0]


def read_weights(folder: Path) -> Weights:
    """Read every weight file once, from its first byte to its last.

    Raises:
        ValueError: if there is none, or one can't be read.
    """
    paths = sorted(folder.glob("model*.safetensors"))
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
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error}).") from error


def read_file(path: Path, weights: Weights, progress: tqdm) -> None:
    """Add a weight file to `weights`. Raises `ValueError` if it is torn."""
    try:
        with safe_open(path, framework="pt"):  # which compares the header with the length, without a gap
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
            is_finite = True
            for begin in range(start, end, PIECE):
                piece = bytearray(file.read(min(PIECE, end - begin)))
                digest.update(piece)
                progress.update(len(piece))
                if dtype is not None:
                    values = torch.frombuffer(piece, dtype=dtype)
                    is_finite = is_finite and bool(values.isfinite().all())
                    if name.startswith(NORM):  # of one piece
                        weights.norm[name.removeprefix(NORM)] = values
            weights.tensors.append(StoredTensor(name, path.name, entry["dtype"], tuple(entry["shape"]), is_finite))
        weights.sha256[path.name] = digest.hexdigest()


def find_weight_faults(weights: Weights, expected: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """What the files hold and the model does not, and the other way round.

    Args:
        weights: What [`read_weights`] returned.
        expected: The model's own tensors, of which names, shapes and dtypes count.
    """
    names = {dtype: name for name, dtype in FLOATS.items()}
    stored = {tensor.name: tensor for tensor in weights.tensors}
    place = WEIGHTS if weights.index is None else INDEX
    yield from _summarize(place, "lacks {}, which the model has", sorted(expected.keys() - stored.keys()))
    for file in weights.sha256:
        here = [tensor for tensor in weights.tensors if tensor.file == file]
        known = [tensor for tensor in here if tensor.name in expected]
        twice = [tensor.name for tensor in here if stored[tensor.name] is not tensor]
        yield from _summarize(file, "holds {}, which is there twice", twice)
        extra = [tensor.name for tensor in here if tensor.name not in expected]
        yield from _summarize(file, "holds {}, which the model does not have", extra)
        shapes = [f"{t.name} of {list(t.shape)}, not {list(expected[t.name].shape)}" for t in known
                  if t.shape != expected[t.name].shape]  # fmt: skip
        yield from _summarize(file, "holds {}", shapes)
        wanted = {tensor.name: names.get(expected[tensor.name].dtype, "?") for tensor in known}
        dtypes = [f"{t.name} as {t.dtype}, not {wanted[t.name]}" for t in known if t.dtype != wanted[t.name]]
        yield from _summarize(file, "holds {}", dtypes)
        broken = [tensor.name for tensor in here if not tensor.is_finite]
        yield from _summarize(file, "holds values in {} that are no finite numbers", broken)
        if weights.index is None and file != WEIGHTS:
            yield Finding(file, "is a shard without an index", REBUILD)
        if weights.index is not None:
            if file not in weights.index.values():
                yield Finding(
                    file, "is not in the index: a stale file, which may be loaded in place of it", "Delete it."
                )
            elsewhere = [tensor.name for tensor in here if weights.index.get(tensor.name, file) != file]
            yield from _summarize(file, "holds {}, which the index puts elsewhere", elsewhere)
    for file in sorted(set((weights.index or {}).values()) - weights.sha256.keys()):
        yield Finding(file, "is in the index and not in the folder", REBUILD)


def _summarize(file: str, reason: str, items: list[str]) -> Iterator[Finding]:
    if items:
        more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
        yield Finding(file, reason.format(items[0] + more), REBUILD)
