"""Find every fault for which a release folder may not be published.

The class files are the Python files that a release needs to load its model.
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForImageTextToText

from hub_cards.contents import (
    CARD_FILE,
    HANDLER_FILE,
    NEEDED_FILES,
    PIXELS_FILE,
    SETTINGS_FILES,
    is_listed,
    list_release,
    read_json,
)
from hub_cards.model_folder import ModelFolder
from hub_cards.release import read_release
from hub_cards.weights import Weights
from normllava.errors import UserError


# Tokens of the Hub: "hf_" for a user or "api_org_" for an organization, then at least 20 letters and digits.
TOKEN_PATTERN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")

# Files that are not searched for tokens and private paths. The vocabulary in tokenizer.json holds all kinds of text,
# which would raise false alarms. Weights and pictures are no text, and are written without metadata.
UNSEARCHED_FILES = ("tokenizer.json",)
UNSEARCHED_SUFFIXES = (".safetensors", ".gguf", ".png")


def require_no_faults(folder: Path, weights: Weights | None = None) -> None:
    """Raises `UserError` if a release folder has faults. The message lists all faults.

    The arguments are those of [`find_faults`].
    """
    faults = find_faults(folder, weights)
    if faults:
        raise UserError("\n  ".join([f"{folder} can't be published:", *faults]))


def find_faults(folder: Path, weights: Weights | None = None) -> list[str]:
    """All faults of a release folder, as messages that name a file and say what to do.

    Args:
        folder: The release folder.
        weights: What the weight files hold, if they were just read to build the folder; `None` to read them here.
    """
    faults = []
    for path in list_release(folder):
        faults += find_file_faults(path, folder)
    if not (folder / CARD_FILE).is_file():
        faults.append(f"{CARD_FILE}: is missing. Delete the folder, and build it again.")

    try:
        read_release(folder)  # raises UserError if release.json is missing or can't be read
        model = ModelFolder(folder, weights)
        code_faults = find_code_faults(model)
        faults += code_faults
        # The model is loaded only if the folder names no code but this version's.
        if not code_faults:
            faults += find_model_faults(model)
    except UserError as error:
        faults.append(str(error))
    return faults


def find_file_faults(path: Path, folder: Path) -> list[str]:
    """Why a file may not be published: it is a symlink, is not listed in `contents.py`, or holds something private.

    The result is empty for a folder, and for a file without faults.
    """
    name = path.relative_to(folder).as_posix()
    if path.is_symlink():  # the link may point to a file outside of the folder
        return [f"{name}: is a symlink. Put the file itself there, or delete it."]
    if not path.is_file():  # a folder
        return []
    if not is_listed(name):
        return [f"{name}: is not on the list of published files. Delete it."]
    if name in UNSEARCHED_FILES or path.suffix in UNSEARCHED_SUFFIXES:
        return []

    faults = []
    text = path.read_text(encoding="utf-8", errors="replace")
    if TOKEN_PATTERN.search(text):
        faults.append(f"{name}: holds a Hugging Face token. Revoke it now, then remove it.")
    home = f"{Path.home()}/"
    if home != "//" and home in text:  # "/" is the home folder in some containers, and every URL has "//"
        faults.append(f"{name}: holds a path of your home folder, {home}. Remove it.")
    return faults


def find_code_faults(model: ModelFolder) -> list[str]:
    """Why a folder's code may not be published: a file of code is not this version's, or settings name other code.

    Settings name code in an `auto_map`. transformers runs this code when somebody loads the release.

    Raises:
        UserError: if config.json can't be read.
    """
    faults = []
    for file in (*model.class_files, HANDLER_FILE, PIXELS_FILE):
        released_file = model.path / file.name
        if not released_file.is_file() or released_file.read_bytes() != file.read_bytes():
            faults.append(f"{file.name}: is not this version's file. Delete the folder, and build it again.")

    for name in SETTINGS_FILES:
        path = model.path / name
        if path.is_file():
            faults += find_auto_map_faults(name, read_json(path), model.auto_maps.get(name))
    return faults


def find_auto_map_faults(name: str, settings: dict[str, Any], needed_auto_map: dict[str, str] | None) -> list[str]:
    """Why the `auto_map`s of a settings file may not be published.

    Args:
        name: The file's name.
        settings: The file's content.
        needed_auto_map: The `auto_map` that the file must have; `None` if the file must have none. Settings further
            inside the file, such as the image processor's, may repeat this `auto_map`.
    """
    if needed_auto_map is not None and settings.get("auto_map") != needed_auto_map:
        return [f"{name}: its auto_map is not {json.dumps(needed_auto_map)}. Build the folder again."]

    if any(auto_map != needed_auto_map for auto_map in find_auto_maps(settings)):
        return [f'{name}: holds an "auto_map" that names other code than the release\'s. Remove it.']
    return []


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


def find_model_faults(model: ModelFolder) -> list[str]:
    """Why a model can't answer: files are missing, weights are not finite, or weights don't fit the config."""
    missing = [name for name in NEEDED_FILES if not (model.path / name).is_file()]
    if missing:
        return [f"{', '.join(missing)}: missing. Give the output folder of a complete run."]

    faults = []
    not_finite = model.weights.not_finite
    if not_finite:
        faults.append(f"weights: {shorten(not_finite)}: NaN or infinite values. Train again.")
    try:
        # On the meta device, loading compares names and shapes of tensors and reads no values. With
        # `ignore_mismatched_sizes`, `loading_info` lists wrong shapes, where loading would otherwise stop.
        _, loading_info = AutoModelForImageTextToText.from_pretrained(
            model.path,
            dtype="auto",
            device_map="meta",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        return [*faults, f"The model can't be loaded: {error}"]
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading_info[kind]:
            names = [str(name) for name in loading_info[kind]]  # a mismatched key is a tuple of name and shapes
            faults.append(f"weights: {kind} for the model of config.json: {shorten(names)}. Train or merge again.")
    return faults


def shorten(names: list[str]) -> str:
    """A list of names as short text: the first name, and the number of the others."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more)"
