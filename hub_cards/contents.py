"""What a release holds: the one list that build copies by and check allows."""

import re
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

import modeling_normllava
from conversations import pixels


ASSETS = Path(__file__).with_name("assets")
CLASS_FOLDER = Path(str(modeling_normllava.__file__)).parent
CARD, INDEX = "README.md", "model.safetensors.index.json"
# Of a checkpoint: copied without the names of this machine.
SETTINGS = (
    "config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", INDEX,
)  # fmt: skip
# Of a checkpoint: copied as they are.
OTHERS = ("tokenizer.json", "chat_template.jinja", "evaluation.json")
# A checkpoint without these can't answer.
NEEDED = ("config.json", "generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
# What serves a model, and the rule for a picture's pixels, which an endpoint and a Space share with training.
SERVING = ("handler.py", "requirements.txt")
SPACE = ASSETS / "space"
PIXELS = Path(str(pixels.__file__))
PLOT = "diagnostics/overview.png"
LISTED = {
    *SETTINGS, *OTHERS, *SERVING, PIXELS.name, CARD, PLOT, "LICENSE", "LICENSE-APACHE", "NOTICE",
    *(path.name for path in CLASS_FOLDER.glob("[!_]*.py")),
}  # fmt: skip
PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|images/example\d+\.png")


def is_listed(name: str) -> bool:
    """Whether a file with this path inside the folder may be published."""
    return name in LISTED or PATTERN.fullmatch(name) is not None


def class_files(config: Any) -> list[Path]:
    """This version's class files for a model with this config: those that `auto_map` names, and what they import."""
    named = {CLASS_FOLDER / f"{value.split('.')[0]}.py" for value in config.auto_map.values()}
    imported = (Path(file) for path in named for file in get_relative_import_files(path))
    return sorted({*named, *imported})
