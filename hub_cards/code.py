"""The code that a model needs from its repository: this project's class files, or none for a plain Llava.

The class files are the Python files of `modeling_normllava`. An `auto_map` in a model's settings names the class files
that transformers runs when somebody loads the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlavaConfig
from transformers.dynamic_module_utils import get_relative_import_files

from hub_cards.contents import CLASS_FOLDER
from modeling_normllava import NormLlavaConfig, NormLlavaProcessor


# The settings files that need an `auto_map` if the processor's class is this project's own.
PROCESSOR_FILES = ("processor_config.json", "tokenizer_config.json")


def has_own_processor(processor: Mapping[str, Any]) -> bool:
    """Whether a model's processor is of this project's own class, which cuts pictures into tiles.

    Args:
        processor: The content of processor_config.json.
    """
    return processor.get("processor_class") == NormLlavaProcessor.__name__


def needed_auto_maps(config: LlavaConfig, processor: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The `auto_map` that each settings file of a model needs, by the file's name.

    Files that need no `auto_map` are left out, so the result is empty for a model of transformers' own classes.

    Args:
        config: The model's config.
        processor: The content of processor_config.json.
    """
    if not isinstance(config, NormLlavaConfig):
        return {}

    # `config` may name another version's class files. A new config names this version's.
    new_config: Any = type(config)()
    auto_maps = {"config.json": new_config.auto_map}
    if has_own_processor(processor):
        reference = f"processing_normllava.{NormLlavaProcessor.__name__}"
        for name in PROCESSOR_FILES:
            auto_maps[name] = {"AutoProcessor": reference}
    return auto_maps


def list_class_files(auto_maps: Mapping[str, Mapping[str, str]]) -> list[Path]:
    """This version's class files for a model: the files that `auto_map`s name, and all files that those import.

    Args:
        auto_maps: The result of [`needed_auto_maps`].
    """
    files = set()
    for auto_map in auto_maps.values():
        for reference in auto_map.values():
            # A reference names a file and a class in it, such as "modeling_normllava.NormLlavaModel".
            module = reference.split(".")[0]
            file = CLASS_FOLDER / f"{module}.py"
            files.add(file)
            imported_files = get_relative_import_files(file)
            files.update(Path(path) for path in imported_files)
    return sorted(files)


def find_auto_maps(settings: Any) -> list[dict[str, str]]:
    """Every `auto_map` of a settings file, at any depth."""
    auto_maps = []
    if isinstance(settings, list):
        for entry in settings:
            auto_maps += find_auto_maps(entry)
    elif isinstance(settings, dict):
        for name, entry in settings.items():
            if name == "auto_map":
                auto_maps.append(entry)
            else:
                auto_maps += find_auto_maps(entry)
    return auto_maps
