"""Faults to plant in a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file


Plant = Callable[[Path], object]
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def edit(name: str, old: str, new: str) -> Plant:
    """Replace text in a file, which must be there."""

    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return plant


def write(name: str, content: str | bytes) -> Plant:
    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return plant


def append(name: str, text: str) -> Plant:
    return lambda folder: write(name, (folder / name).read_text() + text)(folder)


def delete(name: str) -> Plant:
    return lambda folder: (folder / name).unlink()


def put(name: str, **fields: Any) -> Plant:
    """Set fields of a JSON file; `a__b` is field `b` of `a`, and `None` takes a field out."""

    def plant(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for field, value in fields.items():
            *outer, last = field.split("__")
            place = content
            for key in outer:
                place = place[key]
            place[last] = value
            if value is None:
                del place[last]
        (folder / name).write_text(json.dumps(content))

    return plant


def tensors(change: Callable[[dict[str, torch.Tensor]], object], metadata: dict[str, str] | None = None) -> Plant:
    """Change the weights."""

    def plant(folder: Path) -> None:
        content = load_file(folder / WEIGHTS)
        change(content)
        save_file(content, folder / WEIGHTS, {"format": "pt"} | (metadata or {}))

    return plant


def shard(
    folder: Path, change: Callable[[list[dict[str, torch.Tensor]], dict[str, str]], object] | None = None
) -> None:
    """Split the weights in two, with an index; and break them."""
    content = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(content)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = [{name: content[name] for name in half} for half in (names[: len(names) // 2], names[len(names) // 2 :])]
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    if change is not None:
        change(parts, weight_map)
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensor.clone() for name, tensor in part.items()}, folder / file, {"format": "pt"})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def deep_picture(mode: str, path: Path) -> None:
    """A picture of more than 8 bits; a PNG, which has 16, is to be turned."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = {"format": "PNG", "exif": exif} if mode == "I;16" else {"format": "TIFF"}
    dtype = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}[mode]
    pixels = np.linspace(0, 65535, 600).astype(dtype)
    Image.frombytes(mode, (30, 20), pixels.tobytes()).save(path, **file)
