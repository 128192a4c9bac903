"""Changes, mostly faults, that tests plant in a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


# A function that changes a folder.
Plant = Callable[[Path], object]
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def write_file(name: str, content: str | bytes) -> Plant:
    """Replace the content of a file, or make the file."""

    def plant(folder: Path) -> None:
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            (folder / name).write_bytes(content)

    return plant


def append_text(name: str, text: str) -> Plant:
    """Add text at the end of a file."""

    def plant(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return plant


def delete_file(name: str) -> Plant:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def set_fields(name: str, **fields: Any) -> Plant:
    """Set fields of a JSON file. `a__b` is the field `b` inside `a`; a field that is set to `None` is removed."""

    def plant(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for path, value in fields.items():
            *outer_fields, field = path.split("__")
            parent = content
            for outer_field in outer_fields:
                parent = parent[outer_field]

            if value is None:
                parent.pop(field, None)
            else:
                parent[field] = value
        (folder / name).write_text(json.dumps(content))

    return plant


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Plant:
    """Change the weights by a function that changes their dict."""

    def plant(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return plant


def split_weights(folder: Path) -> None:
    """Split the weight file into two files with an index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    middle = len(names) // 2

    weight_map = {}
    for number, shard_names in enumerate((names[:middle], names[middle:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        shard = {name: weights[name].clone() for name in shard_names}
        save_file(shard, folder / file, {"format": "pt"})
        for name in shard_names:
            weight_map[name] = file
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
