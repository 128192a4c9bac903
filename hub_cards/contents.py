"""The files that a release folder may hold. `build.py` puts them there, and `check.py` refuses all others."""

import json
import re
from inspect import getfile
from pathlib import Path
from typing import Any

import modeling_normllava
from hub_cards.release import RELEASE_FILE
from normllava.conversations import pixels
from normllava.errors import UserError


CARD_FILE = "README.md"
WEIGHTS_INDEX = "model.safetensors.index.json"
# The diagnostics' figure, which the card shows.
OVERVIEW_PLOT = "diagnostics/overview.png"

# JSON files that a checkpoint may have. They are copied without the names of this machine's folders.
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    WEIGHTS_INDEX,
)

# Other files that a checkpoint may have. They are copied unchanged.
COPIED_FILES = ("tokenizer.json", "chat_template.jinja", "evaluation.json")

# Files without which a model can't answer.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

ASSETS = Path(__file__).with_name("assets")
SPACE_FOLDER = ASSETS / "space"
APACHE_TEXT = ASSETS / "LICENSE-APACHE"

# The folder of the class files, which are the Python files that a release needs to load its model.
CLASS_FOLDER = Path(getfile(modeling_normllava)).parent

# `pixels.py` turns a picture into RGB. Endpoints and Spaces get a copy, so that they read pictures as training does.
PIXELS_FILE = Path(getfile(pixels))

# Answers the requests of an inference endpoint.
HANDLER_FILE = ASSETS / "handler.py"

# Files that an inference endpoint needs beside the model.
SERVING_FILES = (HANDLER_FILE, ASSETS / "requirements.txt", PIXELS_FILE)

# The files that may be published: their paths inside the release folder.
LISTED_FILES = {
    CARD_FILE,
    RELEASE_FILE,
    OVERVIEW_PLOT,
    "LICENSE",
    "LICENSE-APACHE",
    "NOTICE",
    *SETTINGS_FILES,
    *COPIED_FILES,
    *(path.name for path in SERVING_FILES),
    *(path.name for path in CLASS_FOLDER.glob("[!_]*.py")),  # all class files, but not __init__.py
}
# Files that may be published too: weights such as model-00001-of-00002.safetensors, pictures such as
# images/example1.png, and files for llama.cpp such as mmproj-Mine-f16.gguf.
LISTED_PATTERN = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|images/example\d+\.png|[A-Za-z0-9][\w.-]*-(f32|f16)\.gguf"
)


def list_release(folder: Path) -> list[Path]:
    """All files and folders in a release folder, except `__pycache__`, which Python writes if the handler is tried."""
    return [path for path in sorted(folder.rglob("*")) if not is_bytecode(path.relative_to(folder))]


def is_bytecode(path: Path) -> bool:
    """Whether a path inside a release folder is Python's `__pycache__`, or lies in it."""
    return "__pycache__" in path.parts


def is_listed(name: str) -> bool:
    """Whether the file with this path inside a release folder may be published."""
    return name in LISTED_FILES or LISTED_PATTERN.fullmatch(name) is not None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: if the file is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
