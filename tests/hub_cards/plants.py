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


def write(name: str, content: str | bytes) -> Plant:
    def plant(folder: Path) -> None:
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


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Plant:
    """Change the weights."""

    def plant(folder: Path) -> None:
        content = load_file(folder / WEIGHTS)
        change(content)
        save_file(content, folder / WEIGHTS, {"format": "pt"})

    return plant


def shard(folder: Path) -> None:
    """Split the weights in two, with an index."""
    content = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(content)
    weight_map = {}
    for number, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: content[name].clone() for name in half}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
