"""Writes `docs/reference.md`, the page of three commands' options, which are read from the commands' parsers.

    python docs/reference.py

The other commands have few options, which `--help` prints.
"""

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple


# Packages of the repository are imported from its root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl import SFTConfig

from training.options.arguments import RunArguments, TrainingConfig


PAGE = Path(__file__).with_name("reference.md")
INTRODUCTION = "# Options\n\n`--help` prints these. Defaults stand in brackets. Made by `python docs/reference.py`.\n"
RECIPE_FIELDS = (
    "Fields of a recipe, beside those of TRL's [`SFTConfig`](https://huggingface.co/docs/trl/sft_trainer) and "
    "`ModelConfig`. The command line takes them too."
)
CHANGED_FIELDS = "Fields of TRL with another default or effect:"
# A command's options by argparse's `dest`. If several share a `dest`, as `--x` and `--no_x` do, the first is kept.
Options = dict[str, argparse.Action]


class Command(NamedTuple):
    """A command on the page."""

    heading: str
    """The heading of the command's section."""
    start: str
    """How a reader starts the command."""
    module: str


COMMANDS = (
    Command("compose", "python training/compose.py", "training.compose"),
    Command("sft", "accelerate launch -q training/sft.py --config recipe.yaml", "training.sft"),
    Command("diagnostics", "normllava diagnose", "normllava.diagnostics.command"),
)


def render() -> str:
    """The whole page."""
    sections = [INTRODUCTION]
    for command in COMMANDS:
        options = read_options(command.module)
        if command.module == "training.sft":
            description = describe_recipe(options)
        else:
            description = "\n".join(describe_option(option) for option in options.values())
        sections.append(f"## {command.heading}\n\n`{command.start}`\n\n{description}\n")
    return "\n".join(sections)


def build_parser(module: str) -> argparse.ArgumentParser:
    """The parser of the command in a module."""
    return importlib.import_module(module).build_parser()


def read_options(module: str) -> Options:
    """The options of the command in a module, without `--help`."""
    options: Options = {}
    for option in build_parser(module)._actions:  # argparse has no public list of options
        if option.dest != "help":
            options.setdefault(option.dest, option)
    return options


def describe_recipe(options: Options) -> str:
    """The recipe's fields that this project adds, then the fields of TRL whose default or effect this project changes.

    Fields without an option, which the user can't set, are left out.
    """
    # `__annotations__` names the fields that a class itself declares, without the fields of its base class.
    own_names = [name for name in RunArguments.__annotations__ if name in options]
    own_lines = [describe_option(options[name]) for name in own_names]

    # `TrainingConfig` declares only fields of TRL's `SFTConfig`, to change them.
    changed_names = [name for name in TrainingConfig.__annotations__ if name in options]
    defaults = field_defaults(TrainingConfig)
    trl_defaults = field_defaults(SFTConfig)
    changed_lines = []
    for name in changed_names:
        default = f"`{defaults[name]}`"
        if defaults[name] != trl_defaults[name]:
            default += f", in TRL `{trl_defaults[name]}`"
        changed_lines.append(describe_option(options[name], default))

    return "\n\n".join([RECIPE_FIELDS, "\n".join(own_lines), CHANGED_FIELDS, "\n".join(changed_lines)])


def field_defaults(config: type) -> dict[str, Any]:
    """The default of each field of a dataclass."""
    return {field.name: field.default for field in dataclasses.fields(config)}


def describe_option(option: argparse.Action, default: str | None = None) -> str:
    """An option as an item of a list, with its name, its default, its help and its choices.

    Args:
        option: The option.
        default: The text in brackets about the option's default; by default the text of `describe_default`.
    """
    first_name = option.option_strings[0]  # an option may have several names, such as --max_length and --max-length
    label = f"`{first_name}`"
    if default is None:
        default = describe_default(option)
    if default:
        label += f" ({default})"

    text = help_text(option)
    if text and not text.endswith("."):
        text += "."
    if option.choices:
        choices = ", ".join(f"`{choice}`" for choice in option.choices)
        text += f" One of {choices}."
    return f"- {label}: {text}"


def describe_default(option: argparse.Action) -> str:
    """The text about an option's default, such as "`8`", or "required" if the option must be given.

    The text is empty for a default of `None` or `False`, and if the help text names the default.
    """
    if option.required:
        return "required"
    if option.default is None or option.default is False:
        return ""
    if "default" in help_text(option):
        return ""
    value = getattr(option.default, "value", option.default)  # only a member of an enum has the attribute `value`
    return f"`{value}`"


def help_text(option: argparse.Action) -> str:
    """The help text of an option in one line, with its default in place of `%(default)s`."""
    text = (option.help or "") % {"default": option.default}
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
