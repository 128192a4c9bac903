"""Changes that tests make in a folder with a model. Most of them are faults.

The functions return a function that makes the change in a folder, so that tests can list changes before there is a
folder. Only `split_weights` makes its change itself.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


# A function that makes a change in a folder.
FolderChange = Callable[[Path], object]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def write_file(name: str, content: str | bytes) -> FolderChange:
    """Write a file with this content. A file with this name is replaced."""

    def change_folder(folder: Path) -> None:
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            (folder / name).write_bytes(content)

    return change_folder


def append_text(name: str, text: str) -> FolderChange:
    """Add text at the end of a file."""

    def change_folder(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return change_folder


def delete_file(name: str) -> FolderChange:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def set_fields(name: str, **fields: Any) -> FolderChange:
    """Set fields of a JSON file.

    Args:
        name: The file's name.
        fields: New values, by the names of fields. `a__b` names the field `b` of the object in the field `a`. `None`
            removes a field.
    """

    def change_folder(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for field_path, value in fields.items():
            *parent_fields, field = field_path.split("__")
            parent = content
            for parent_field in parent_fields:
                parent = parent[parent_field]

            if value is None:
                parent.pop(field, None)
            else:
                parent[field] = value
        (folder / name).write_text(json.dumps(content))

    return change_folder


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> FolderChange:
    """Change the weights. `change` gets a dict with the tensor of each name, and changes the dict in place."""

    def change_folder(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return change_folder


def split_weights(folder: Path) -> None:
    """Split the weight file into two files with an index, as transformers saves a large model."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()

    names = sorted(weights)
    middle = len(names) // 2
    names_by_file = {
        "model-00001-of-00002.safetensors": names[:middle],
        "model-00002-of-00002.safetensors": names[middle:],
    }
    weight_map = {}
    for file_name, shard_names in names_by_file.items():
        shard = {name: weights[name].clone() for name in shard_names}
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        for name in shard_names:
            weight_map[name] = file_name
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
