"""Write `docs/reference.md`: the options of three commands, read from the parsers that the commands themselves make.

python docs/reference.py
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl import SFTConfig

from training.arguments import RunArguments, TrainingConfig


PAGE = Path(__file__).with_name("reference.md")
# Heading, how the command is started, its module. The others have few options, which `--help` prints.
COMMANDS = (
    ("compose", "python training/compose.py", "training.compose"),
    ("sft", "accelerate launch -q training/sft.py --config recipe.yaml", "training.sft"),
    ("diagnostics", "python -m diagnostics", "diagnostics.__main__"),
)


class Asked(Exception):
    """Raised where a command would read its arguments; holds its parser."""


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser that a command makes: its `main` is stopped where it would read its arguments."""
    read, argv = argparse.ArgumentParser.parse_known_args, sys.argv

    def ask(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if any(action.dest == "config" for action in self._actions):  # a first look at the recipe's path
            return read(self, *args, **kwargs)
        raise Asked(self)

    argparse.ArgumentParser.parse_known_args, sys.argv = ask, [module]  # type: ignore[method-assign]
    try:
        importlib.import_module(module).main()
    except Asked as asked:
        return asked.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args, sys.argv = read, argv  # type: ignore[method-assign]
    raise RuntimeError(f"{module} has not read any arguments.")


def option_line(action: argparse.Action, default: str = "") -> str:
    """An option as an item of a list: its name, what it is, its default and its choices."""
    text = ((action.help or "") % {"default": action.default}).replace("|", "\\|")
    shown = action.default not in (None, argparse.SUPPRESS) and action.default is not False and "default" not in text
    default = default or (f"`{getattr(action.default, 'value', action.default)}`" if shown else "")
    default = "required" if action.required else default
    choices = f"One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    text = " ".join(text.split()) + ("." if text and not text.endswith(".") else "")
    name = f"`{action.option_strings[0]}`" + (f" ({default})" if default else "")
    return f"- {name}: " + " ".join(filter(None, [text, choices]))


def render_sft(options: Iterable[argparse.Action]) -> str:
    """The fields of a recipe that are this project's, and those of TRL with another default or effect."""
    actions = {action.dest: action for action in options if not isinstance(action, argparse._StoreFalseAction)}
    here, there = (
        {field.name: field.default for field in dataclasses.fields(config)} for config in (TrainingConfig, SFTConfig)
    )
    changed = []
    for name in TrainingConfig.__annotations__:
        if name in actions:
            default = f"`{here[name]}`"
            if here[name] != there[name]:
                default += f", in TRL `{there[name]}`"
            changed.append(option_line(actions[name], default))
    return "\n\n".join([
        "Fields of a recipe, beside those of TRL's [`SFTConfig`](https://huggingface.co/docs/trl/sft_trainer) and "
        "`ModelConfig`. The command line takes them too.",
        "\n".join(option_line(actions[name]) for name in RunArguments.__annotations__ if name in actions),
        "Fields of TRL with another default or effect:",
        "\n".join(changed),
    ])  # fmt: skip


def render() -> str:
    """The whole page."""
    parts = ["# Options\n\n`--help` prints these. Defaults stand in brackets. Made by `python docs/reference.py`.\n"]
    for heading, command, module in COMMANDS:
        parts.append(f"## {heading}\n\n`{command}`\n")
        # argparse's own --help is told above.
        actions = [action for action in parser_of(module)._actions if not isinstance(action, argparse._HelpAction)]
        listed = "\n".join(map(option_line, actions))
        parts.append((render_sft(actions) if module == "training.sft" else listed) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
