"""Write `docs/reference.md`: every command's options, read from the parsers that the commands themselves make.

python docs/reference.py
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl import SFTConfig

from training.arguments import FIXED, RunArguments, TrainingConfig


PAGE = Path(__file__).with_name("reference.md")
# Heading, how the command is started, its module.
COMMANDS = (
    ("compose", "python training/compose.py", "training.compose"),
    ("sft", "accelerate launch training/sft.py --config recipe.yaml", "training.sft"),
    ("merge", "python training/merge.py", "training.merge"),
    ("diagnostics", "python -m diagnostics", "diagnostics.__main__"),
    ("dynamics", "python -m diagnostics.dynamics", "diagnostics.dynamics"),
    ("evaluation", "python -m evaluation", "evaluation.__main__"),
    ("hub_cards", "python -m hub_cards", "hub_cards.__main__"),
    ("serve", "python -m hub_cards.serve", "hub_cards.serve"),
    *(
        (f"benchmarks {name}", f"python -m benchmarks.{name}", f"benchmarks.{name}")
        for name in ("plan", "plan_check", "gpu", "training", "real", "norm", "diagnostics", "key_alignment",
                     "loading")
    ),
)  # fmt: skip
INTRODUCTION = """# Reference

Every command's options. This page is written by `python docs/reference.py` from the code.
"""


class Asked(Exception):
    """Raised where a command would read its arguments; holds its parser."""


@contextmanager
def asking() -> Iterator[None]:
    """Within the block, a command that reads its arguments raises [`Asked`] instead."""
    read = argparse.ArgumentParser.parse_known_args

    def ask(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if not self.add_help:  # a first look at some arguments, such as the recipe's path
            return read(self, *args, **kwargs)
        raise Asked(self)

    with patch.object(argparse.ArgumentParser, "parse_known_args", ask):
        yield


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser that a command makes."""
    try:
        with asking(), patch.object(sys, "argv", [module]):
            importlib.import_module(module).main()
    except Asked as asked:
        return asked.args[0]
    raise RuntimeError(f"{module} has not read any arguments.")


def actions_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Options that a user is told of, each with its subcommand, if there is one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from ((name, found) for _, found in actions_of(subparser))
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield "", action


def render_table(actions: Iterable[argparse.Action]) -> str:
    """A Markdown table of options."""
    lines = ["| option | default | |", "|---|---|---|"]
    for action in actions:
        name = action.option_strings[0] if action.option_strings else action.dest
        default = "required" if action.required else describe(action.default)
        choices = f"One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
        text = ((action.help or "") % {"default": action.default}).replace("|", "\\|")
        if isinstance(action, argparse._StoreFalseAction):  # transformers' pair of a field that is on by default
            text = f"Turns `--{action.dest}` off."
        sentences = [" ".join(text.split()) + ("." if text and not text.endswith(".") else ""), choices]
        lines.append(f"| `{name}` | {default} | {' '.join(filter(None, sentences))} |")
    return "\n".join(lines)


def describe(default: Any) -> str:
    """A default value, unless an option is simply not given by default."""
    if default is None or default is False or default == argparse.SUPPRESS:
        return ""
    return f"`{getattr(default, 'value', default)}`"


def render_sft(parser: argparse.ArgumentParser) -> str:
    """The fields of a recipe that are this project's, those of TRL with another default, and those that are fixed."""
    ours = RunArguments.__annotations__.keys()
    changed = TrainingConfig.__annotations__.keys()
    actions = {
        action.dest: action for _, action in actions_of(parser) if not isinstance(action, argparse._StoreFalseAction)
    }
    inherited = {field.name for field in dataclasses.fields(RunArguments)} - ours - FIXED.keys()
    here, there = (
        {field.name: field.default for field in dataclasses.fields(config)} for config in (TrainingConfig, SFTConfig)
    )
    fixed = [f"| `{name}` | `{value}` | {reason} |" for name, (value, reason) in sorted(FIXED.items())]
    return "\n\n".join([
        "Fields of a recipe, which can be given on the command line too. In addition to those of TRL's "
        "[`SFTConfig`](https://huggingface.co/docs/trl/sft_trainer), and "
        f"{', '.join(f'`{name}`' for name in sorted(inherited & actions.keys()))} of its `ModelConfig` and "
        "`ScriptArguments`:",
        render_table(actions[name] for name in ours if name in actions),
        "TRL's fields with another default:",
        "\n".join([
            "| field | here | in TRL | |",
            "|---|---|---|---|",
            *(f"| `{name}` | `{here[name]}` | `{there[name]}` | {actions[name].help} |" for name in changed),
        ]),
        "TRL's fields that have one value here:",
        "\n".join(["| field | value | why |", "|---|---|---|", *fixed]),
    ])  # fmt: skip


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for heading, command, module in COMMANDS:
        parser = parser_of(module)
        parts.append(f"## {heading}\n\n`{command}`\n")
        if module == "training.sft":
            parts.append(render_sft(parser) + "\n")
            continue
        tables: dict[str, list[argparse.Action]] = {}
        for subcommand, action in actions_of(parser):
            tables.setdefault(subcommand, []).append(action)
        for subcommand, actions in tables.items():
            parts.append((f"### {subcommand}\n\n" if subcommand else "") + render_table(actions) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
