"""Measure vision-language models side by side and write a report.

    normllava diagnose --model llava-hf/llava-1.5-7b-hf --data questions.json --output_dir report/

`--data` is what training takes (LLaVA's JSON or JSONL, a dataset on disk or on the Hub) or a folder of pictures. The
command writes the page `report.html`, its content as `report.json`, the tables `report.csv`, `rows.csv` and
`key_map.csv`, and figures. With `--sweep` it also writes the table `sweep.csv`.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

import matplotlib.pyplot as plt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from normllava.diagnostics.comparison import Comparison, Scope, measure_models
from normllava.diagnostics.loading import add_arguments, load_model, load_processor, model_options, read_questions
from normllava.diagnostics.training_answers import TrainingAnswer, read_training_answers
from normllava.errors import UserError
from normllava.files import folder_or_id, weights_fingerprint


logger = logging.getLogger(__name__)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    plt.switch_backend("agg")  # figures are written to files, and need no display
    parser = build_parser()
    args = parse(parser, argv)
    names = choose_names(parser, args)

    questions = read_questions(args)
    check_processors(args)
    held_by_folders = [(weights_fingerprint(Path(model)), read_training_answers(Path(model))) for model in args.model]
    args.output_dir.mkdir(parents=True, exist_ok=True)

    words_of_command = sys.argv[1:] if argv is None else argv
    comparisons = measure_models(
        load_models(args, names),
        questions,
        data_name=Path(args.data).name,
        scope=Scope(args.layers, args.sweep, args.attention_map),
        command="normllava diagnose " + shlex.join(words_of_command),
    )
    # Models are measured one by one, and each comparison has one model more than the one before it. The report is
    # saved after each model, so that there is a report even if the next model fails.
    for comparison in comparisons:
        add_what_folders_hold(comparison, held_by_folders).save(args.output_dir)

    # After the loop, `comparison` is the comparison of all models.
    logger.info("\n%s\n\nReport: %s", comparison, args.output_dir / "report.html")


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="normllava diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, num_samples=32)
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        required=True,
        help="folders or Hub ids, compared side by side; for two models also their difference",
    )
    add("--names", nargs="+", help="the models' names in the report (default: as given in --model)")
    add("--output_dir", type=Path, required=True, help="folder for the report; an existing one is overwritten")
    add("--layers", type=int, nargs="+", help="layers whose attention and keys are measured (default: 6 layers)")
    add("--attention_map", metavar="WORD", help="also draw where this word of a question or answer looks")
    add("--sweep", action="store_true", help="also measure answers with image tokens multiplied by 0.03 to 30")
    return parser


def choose_names(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The models' names in the report.

    The parser ends the command if two names are the same, or if there aren't as many names as models.
    """
    names = args.model if args.names is None else args.names
    if len(names) != len(args.model):
        parser.error(f"--names gives {len(names)} names for {len(args.model)} models")
    if len(set(names)) < len(names):
        parser.error(f"two models have the same name, set --names: {' '.join(names)}")
    return names


def check_processors(args: argparse.Namespace) -> None:
    """Check that every model takes pictures, so that no hours are spent on the first model if a later one takes none.

    Raises:
        UserError: if a model takes no pictures.
    """
    for model_name_or_path in args.model:
        processor = load_processor(folder_or_id(model_name_or_path), args.trust_remote_code)
        # For a model that takes no pictures, `AutoProcessor` loads a tokenizer.
        if isinstance(processor, PreTrainedTokenizerBase):
            raise UserError(
                f"{model_name_or_path} takes no pictures, it has only a tokenizer: give a vision-language model."
            )


def load_models(args: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, PreTrainedModel, Any]]:
    """Load one model at a time, and yield its name in the report, the model and its processor."""
    for model_name_or_path, name in zip(args.model, names, strict=True):
        logger.info("Loading %s ...", model_name_or_path)
        # The model has no variable here, because a variable would keep it in memory while the next model loads.
        yield name, *load_model(model_name_or_path, **model_options(args))


def add_what_folders_hold(
    comparison: Comparison, held_by_folders: Sequence[tuple[str | None, list[TrainingAnswer]]]
) -> Comparison:
    """A copy of a comparison, in which each model's report has what the model's folder holds besides the model.

    Args:
        comparison: The comparison of the models measured so far.
        held_by_folders: For every model, in the order in which they are measured, the fingerprint of its weights
            (`None` for a model on the Hub and for an adapter), and what it answered while it was trained.
    """
    model_reports = []
    # The last models may not be measured yet, and then have no report. `strict=False` leaves them out.
    for model_report, (weights, answers) in zip(comparison.report.models, held_by_folders, strict=False):
        model_reports.append(replace(model_report, weights=weights, answers=answers))
    report = replace(comparison.report, models=model_reports)
    return replace(comparison, report=report)
