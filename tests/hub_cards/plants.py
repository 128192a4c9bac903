"""Faults to plant in a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


Plant = Callable[[Path], object]
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def write_file(name: str, content: str | bytes) -> Plant:
    """Write a file anew."""

    def plant(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return plant


def append_text(name: str, text: str) -> Plant:
    """Add to the end of a file."""

    def plant(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return plant


def delete_file(name: str) -> Plant:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def set_fields(name: str, **fields: Any) -> Plant:
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


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Plant:
    """Change the weights in place."""

    def plant(folder: Path) -> None:
        content = load_file(folder / WEIGHTS)
        change(content)
        save_file(content, folder / WEIGHTS, {"format": "pt"})

    return plant


def split_weights(folder: Path) -> None:
    """Split the weights in two files, with an index."""
    content = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(content)
    middle = len(names) // 2
    weight_map = {}
    for number, part in enumerate((names[:middle], names[middle:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        tensors = {name: content[name].clone() for name in part}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
