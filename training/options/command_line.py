"""Reads a run's fields from a recipe, which `--config` names, and from the command line.

If both give a field, the command line's value counts.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from normllava.command_line import parse

import yaml
from trl import TrlParser

from normllava.errors import UserError
from training.options.arguments import RunArguments, TrainingConfig
from training.options.refusals import check_arguments


FIELDS_HELP = (
    "Every field of TRL's SFTConfig and ModelConfig is an option too, such as --output_dir, --learning_rate, "
    "--num_train_epochs, --max_steps, --per_device_train_batch_size and --logging_steps."
)
# Fields that older versions of transformers and TRL had, and what to give instead.
RENAMED_FIELDS = {
    "warmup_ratio": "give warmup_steps, where a number below 1 is a fraction of all steps, as in warmup_steps: 0.03",
    "torch_dtype": "give bf16: true or false; trained weights are float32",
}
# Fields that hold a path, in which a leading `~` stands for the home folder.
PATH_FIELDS = (
    "model_name_or_path",
    "dataset_name",
    "image_folder",
    "eval_dataset_name",
    "eval_image_folder",
    "output_dir",
)


def build_parser() -> TrlParser:
    """The parser of all fields of a run. `--config`, which names a recipe, is parsed by [`build_recipe_parser`]."""
    # argparse prints the usage before an error. Here it would list all fields, so it is suppressed.
    return TrlParser((RunArguments, TrainingConfig), allow_abbrev=False, usage=argparse.SUPPRESS)


def build_recipe_parser() -> argparse.ArgumentParser:
    """The parser of `--config`, which is read before all other options."""
    parser = argparse.ArgumentParser(prog="training/sft.py", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this help, and exit")
    parser.add_argument("--config", metavar="RECIPE", help="YAML file of a run's fields; options win over it")
    return parser


def build_help_parser(parser: TrlParser) -> argparse.ArgumentParser:
    """The parser that prints `--help`. It lists those of the hundreds of fields in `parser` that are declared here.

    They are this project's own, and those of TRL that have another default here.
    """
    help_parser = argparse.ArgumentParser(
        usage="training/sft.py --config RECIPE [--FIELD VALUE ...]",
        epilog=FIELDS_HELP,
        parents=[build_recipe_parser()],
        add_help=False,
    )
    declared = RunArguments.__annotations__ | TrainingConfig.__annotations__
    for action in parser._actions:  # argparse has no public list of options
        if action.dest in declared:
            help_parser._add_action(action)
    return help_parser


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RunArguments, TrainingConfig]:
    """The checked arguments of a run.

    Args:
        argv: The words of the command line, by default `sys.argv[1:]`.

    Raises:
        UserError: if the recipe can't be read, a field is unknown, or [`check_arguments`] refuses the arguments.
    """
    parser = build_parser()
    return make_arguments(parser, read_fields(parser, argv))


def read_fields(parser: TrlParser, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """All fields by name, with the values given or their defaults. The entry `recipe` is the recipe's path or `None`.

    Raises:
        UserError: if the recipe can't be read, or a field is unknown.
    """
    parsed, command_line_options = build_recipe_parser().parse_known_args(argv)
    if parsed.help:
        build_help_parser(parser).print_help()
        sys.exit()
    recipe_path = parsed.config
    for word in command_line_options:
        if word.startswith("--"):
            name = word.removeprefix("--").split("=")[0]  # "--warmup_ratio=0.03" -> "warmup_ratio"
            refuse_renamed_field(name)

    # Recipe and command line are first parsed separately, so that the message about a wrong field of the recipe names
    # the recipe.
    recipe_options: list[str] = []
    if recipe_path is not None:
        recipe_options = read_recipe(Path(recipe_path), parser)
        parse(parser, recipe_options, where=f"{recipe_path}: ")
    parse(parser, command_line_options)

    # If an option is given twice, argparse takes the later value. So the command line's options come last.
    fields: dict[str, Any] = vars(parse(parser, recipe_options + command_line_options))
    for name in PATH_FIELDS:
        if fields[name] is not None:
            fields[name] = os.path.expanduser(fields[name])
    return {**fields, "recipe": recipe_path}


def make_arguments(parser: TrlParser, fields: dict[str, Any]) -> tuple[RunArguments, TrainingConfig]:
    """The checked arguments, made of the fields that [`read_fields`] returns.

    Raises:
        UserError: if [`check_arguments`] refuses them.
    """
    recipe_path = fields["recipe"]
    parsed_fields = {name: value for name, value in fields.items() if name != "recipe"}
    if parsed_fields["dataset_streaming"] and parsed_fields["dataloader_num_workers"] is None:
        # A place in a stream depends on the number of workers, so their default must not depend on the machine.
        parsed_fields["dataloader_num_workers"] = 0
    run_args, args = parser.parse_dict(parsed_fields)
    run_args.recipe = recipe_path
    check_arguments(run_args, args)
    return run_args, args


def read_recipe(path: Path, parser: TrlParser) -> list[str]:
    """Turn a recipe's fields into options of the command line, so that argparse checks their types and choices.

    Lists and mappings can't be written as options. They become defaults of `parser`.

    Raises:
        UserError: if the recipe is not a mapping of fields to values, if a field has been renamed, or if a field that
            takes neither lists nor mappings is given one.
    """
    with path.open(encoding="utf-8") as file:
        try:
            recipe = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            problem = " ".join(str(error).split())  # in one line; a YAML error has several lines
            raise UserError(f"--config {path} is not YAML: {problem}") from error

    is_valid = isinstance(recipe, dict) and None not in recipe.values()
    if not is_valid:
        raise UserError(f"--config {path} must be a mapping of fields to values; leave out fields without a value.")
    for name in recipe:
        refuse_renamed_field(name)

    lists_and_mappings = {name: value for name, value in recipe.items() if isinstance(value, list | dict)}
    for name, list_or_mapping in lists_and_mappings.items():
        if not takes_type(name, type(list_or_mapping)):
            type_name = "list" if isinstance(list_or_mapping, list) else "mapping"
            raise UserError(f"--config {path}: {name} can't be a {type_name}, got {list_or_mapping!r}.")
    # These fields become defaults of the parser. The call returns unknown fields as options, which the parser will
    # refuse.
    options = parser.set_defaults_with_config(**lists_and_mappings)

    # YAML reads `no` without quotes as false. In a field such as eval_strategy, "no" is one of the choices.
    fields_with_no = [action.dest for action in parser._actions if "no" in (action.choices or ())]
    for name, value in recipe.items():
        if name in lists_and_mappings:
            continue
        if value is False and name in fields_with_no:
            value = "no"
        options.append(f"--{name}={value}")
    return options


def takes_type(name: str, wanted_type: type) -> bool:
    """Whether a field may have values of `wanted_type`, which is `list` or `dict`.

    The answer is true for an unknown field, which the parser will refuse.
    """
    annotations = get_type_hints(RunArguments) | get_type_hints(TrainingConfig)
    if name not in annotations:
        return True

    annotation = annotations[name]
    members = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        members = list(get_args(annotation))  # `list[str]` and `None` of `list[str] | None`
    types = [get_origin(member) or member for member in members]  # `list` of `list[str]`
    return wanted_type in types


def refuse_renamed_field(name: str) -> None:
    """Refuse the old name of a field that has been renamed.

    Raises:
        UserError: if `name` is an old name. The message says what to give instead.
    """
    name_with_underscores = name.replace("-", "_")
    replacement = RENAMED_FIELDS.get(name_with_underscores)
    if replacement is not None:
        raise UserError(f"{name} is gone: {replacement}.")
