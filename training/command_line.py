"""Reads a run's fields: those of the recipe that `--config` names, which options of the command line override."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from common.console import parse
from common.errors import UserError
from training.arguments import RunArguments, TrainingConfig
from training.refusals import check_arguments


FIELDS = "Every field is an option: ours stand in docs/reference.md, the others in TRL's SFTConfig and ModelConfig."
# Fields that transformers and TRL have given up, and what to give in their place.
RENAMED = {
    "warmup_ratio": "give warmup_steps, where a number below 1 is a fraction of all steps, as in warmup_steps: 0.03",
    "torch_dtype": "give bf16: true or false; trained weights are float32",
}
# Paths in which a `~` stands for the home folder.
PATHS = ("model_name_or_path", "dataset_name", "image_folder", "eval_dataset_name", "eval_image_folder", "output_dir")


def build_parser() -> TrlParser:
    """The parser of all fields. A recipe has the same ones; [`build_recipe_parser`] has the option that names it."""
    return TrlParser((RunArguments, TrainingConfig), allow_abbrev=False, usage=argparse.SUPPRESS)


def build_recipe_parser() -> argparse.ArgumentParser:
    """The parser of `--config`, which is read before the fields."""
    parser = argparse.ArgumentParser("training/sft.py", epilog=FIELDS, allow_abbrev=False)
    parser.add_argument("--config", metavar="RECIPE", help="YAML file of a run's fields; options win over it")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RunArguments, TrainingConfig]:
    """The arguments that a command line, or `argv`, asks for.

    Raises:
        UserError: if the recipe can't be read, a field is unknown, or what it asks for would be passed over.
    """
    parser = build_parser()
    return make_arguments(parser, read_fields(parser, argv))


def read_fields(parser: TrlParser, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """All fields by name with their values or defaults, and the recipe's path, or `None`, as `recipe`.

    Raises:
        UserError: if the recipe can't be read, or a field is unknown.
    """
    known, options = build_recipe_parser().parse_known_args(argv)
    refuse_renamed([word.removeprefix("--").partition("=")[0] for word in options if word.startswith("--")])

    recipe_options: list[str] = []
    if known.config is not None:
        recipe_options = read_recipe(Path(known.config), parser)
        parse(parser, recipe_options, f"{known.config}: ")  # an unknown field is told with the recipe's name
    parse(parser, options)

    # The last of equal options counts.
    fields = vars(parse(parser, [*recipe_options, *options]))
    for name in PATHS:
        if fields[name] is not None:
            fields[name] = os.path.expanduser(fields[name])
    return {**fields, "recipe": known.config}


def make_arguments(parser: TrlParser, fields: dict[str, Any]) -> tuple[RunArguments, TrainingConfig]:
    """The arguments with the fields that [`read_fields`] returns, checked.

    Raises:
        UserError: if what they ask for would be passed over, or change the result without a word.
    """
    options = {name: value for name, value in fields.items() if name != "recipe"}
    run_args, args = parser.parse_dict(options)
    run_args.recipe = fields["recipe"]
    check_arguments(run_args, args)
    return run_args, args


def read_recipe(path: Path, parser: TrlParser) -> list[str]:
    """A recipe's fields as options: argparse then checks their types and choices, which TRL's own reading does not.

    Lists and mappings can't be options; they become the parser's defaults.

    Raises:
        UserError: if it is not a mapping of fields to values, or a field has been renamed.
    """
    with path.open(encoding="utf-8") as file:
        try:
            recipe = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            problem = " ".join(str(error).split())  # YAML's own has several lines
            raise UserError(f"--config {path} is not YAML: {problem}") from error
    if not isinstance(recipe, dict) or None in recipe.values():
        raise UserError(f"--config {path} must be a mapping of fields to values; leave out what has none.")
    refuse_renamed(list(recipe))

    nested = {name: value for name, value in recipe.items() if isinstance(value, list | dict)}
    # What the parser doesn't know comes back as options, which it will refuse.
    options = parser.set_defaults_with_config(**nested)

    choices = {action.dest: action.choices for action in parser._actions}
    for name, value in recipe.items():
        if name in nested:
            continue
        # YAML reads a bare `no` as false, and `no` is what some fields are called when they are off.
        if value is False and "no" in (choices.get(name) or ()):
            value = "no"
        options.append(f"--{name}={value}")
    return options


def refuse_renamed(names: Sequence[str]) -> None:
    """Say the new name of a field that people know by an old one.

    Raises:
        UserError: if one of these names is old.
    """
    for name in names:
        new_name = RENAMED.get(name.replace("-", "_"))
        if new_name is not None:
            raise UserError(f"{name} is gone: {new_name}.")
