"""The list of files that a release folder may hold. The folder is built and checked by this list."""

import json
import re
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

import modeling_normllava
from common.errors import UserError
from conversations import pixels
from hub_cards.release import RELEASE_FILE


CARD = "README.md"
WEIGHTS_INDEX = "model.safetensors.index.json"
# The figure that the diagnostics drew, as the card shows it.
PLOT = "diagnostics/overview.png"

# JSON files of a checkpoint, if it has them. They are copied without the names of this machine's folders.
SETTINGS = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    WEIGHTS_INDEX,
)

# Files of a checkpoint that are copied as they are.
COPIED = ("tokenizer.json", "chat_template.jinja", "evaluation.json")

# Files without which a model can't answer.
NEEDED = ("config.json", "generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")

ASSETS = Path(__file__).with_name("assets")
SPACE = ASSETS / "space"
APACHE_TEXT = ASSETS / "LICENSE-APACHE"
CLASS_FOLDER = Path(str(modeling_normllava.__file__)).parent

# `pixels.py` turns any picture into RGB. Endpoints and Spaces get a copy, so that they read pictures as training does.
PIXELS_FILE = Path(str(pixels.__file__))

# Files that an inference endpoint needs beside the model.
SERVING = (ASSETS / "handler.py", ASSETS / "requirements.txt", PIXELS_FILE)

# Names of the files that may be published, and a pattern for the names that hold a number.
LISTED = {
    CARD,
    RELEASE_FILE,
    PLOT,
    "LICENSE",
    "LICENSE-APACHE",
    "NOTICE",
    *SETTINGS,
    *COPIED,
    *(path.name for path in SERVING),
    *(path.name for path in CLASS_FOLDER.glob("[!_]*.py")),
}
LISTED_PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|images/example\d+\.png")


def is_listed(name: str) -> bool:
    """Whether a file with this path inside the folder may be published."""
    return name in LISTED or LISTED_PATTERN.fullmatch(name) is not None


def class_files(config: Any) -> list[Path]:
    """This version's class files for a model with this config: those that `auto_map` names, and those they import."""
    files = set()
    for reference in config.auto_map.values():
        module = reference.split(".")[0]
        file = CLASS_FOLDER / f"{module}.py"
        files.add(file)
        files.update(Path(imported) for imported in get_relative_import_files(file))
    return sorted(files)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: if the file is no valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
