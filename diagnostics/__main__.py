"""Measure vision-language models side by side and write a report.

    python -m diagnostics --model llava-hf/llava-1.5-7b-hf --data questions.json --output_dir report/

`--data` is what training takes (LLaVA's JSON or JSONL, a dataset on disk or on the Hub) or a folder of pictures. Out
come `report.html`, `report.json`, `report.csv`, `rows.csv`, the figures, and of a sweep `sweep.csv`.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase

from common.console import command, parse
from common.errors import UserError
from common.files import folder_or_id, weights_fingerprint
from diagnostics.comparison import measure_models
from diagnostics.loading import add_arguments, load_model, model_options, read_questions


logger = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, num_samples=32)
    add = parser.add_argument
    add("--model", nargs="+", required=True, help="folders or Hub ids, compared side by side; the first is the base")
    add("--names", nargs="+", help="their names in the report (default: as given in --model)")
    add("--output_dir", type=Path, required=True, help="folder for the report; an existing one is overwritten")
    add("--layers", type=int, nargs="+", help="layers whose attention and keys are measured (default: 6 of them)")
    add("--attention_map", metavar="WORD", help="also draw what this word of questions or answers looks at")
    add("--sweep", action="store_true", help="also test how answers change with visual tokens x 0.03 to 30")
    args = parse(parser)
    args.names = args.names or args.model
    if len(args.names) != len(args.model):
        parser.error(f"--names gives {len(args.names)} names for {len(args.model)} models")
    if len(set(args.names)) < len(args.names):
        parser.error(f"two models have the same name, set --names: {' '.join(args.names)}")
    return args


def load_models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, Any]]:
    """Name, model and processor, one after the other; no reference is kept here."""
    for path in args.model:  # before hours of measuring the first one
        processor = AutoProcessor.from_pretrained(folder_or_id(path), trust_remote_code=args.trust_remote_code)
        if isinstance(processor, PreTrainedTokenizerBase):
            raise UserError(f"{path} takes no pictures, it has only a tokenizer: give a vision-language model.")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for path, name in zip(args.model, args.names, strict=True):
        logger.info("Loading %s ...", path)
        yield name, *load_model(path, **model_options(args))


@command()
def main() -> None:
    """Run the command line."""
    plt.switch_backend("agg")
    args = parse_arguments()
    given = "python -m diagnostics " + shlex.join(sys.argv[1:])
    models, questions, data = load_models(args), read_questions(args), Path(args.data).name
    for measured in measure_models(models, questions, data, args.layers, given, args.sweep, args.attention_map):
        sources = zip(measured.report.models, args.model, strict=False)
        reports = [replace(model, weights=weights_fingerprint(Path(source))) for model, source in sources]
        replace(measured, report=replace(measured.report, models=reports)).save(args.output_dir)
    logger.info("\n%s\n\nReport: %s", measured, args.output_dir / "report.html")


if __name__ == "__main__":
    main()
