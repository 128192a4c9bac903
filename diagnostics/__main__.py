"""Measure vision-language models side by side and write a report.

    python -m diagnostics --model llava-hf/llava-1.5-7b-hf --data questions.json --output_dir report/

`--data` is what training takes (LLaVA's JSON or JSONL, a dataset on disk or on the Hub) or a folder of pictures. Out
come `report.html`, `report.md`, `report.json`, `report.csv` and the figures.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from conversations.files import weights_fingerprint
from diagnostics.comparison import measure_models
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.loading import (
    add_arguments,
    count_layers_and_heads,
    load_model,
    load_processor,
    model_options,
    read_questions,
)
from diagnostics.model_report import Closeup
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import MAX_QUERIES
from diagnostics.results import LanguageModel, ModelReport, Report


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
    add("--base_model", help="language model to compare embeddings with: folder or Hub id")
    add("--output_dir", type=Path, required=True, help="folder for the report; an existing one is overwritten")
    add("--layers", type=int, nargs="+", help="layers whose attention is drawn and keys are compared (default: 6)")
    add("--heads", type=int, nargs="+", help="heads whose mean attention is drawn (default: all)")
    add("--query", type=int, default=-1, help="query to draw: -1 is where the answer begins, -2 the word before")
    kinds = "checkpoints: one model during training; all use the first one's principal components of keys"
    add("--compare", choices=["models", "checkpoints"], default="models", help=kinds)
    args = parser.parse_args()
    names = args.names or args.model
    if len(set(names)) < len(names):
        parser.error(f"two models have the same name, set --names: {' '.join(names)}")
    if not -MAX_QUERIES <= args.query < 0:
        parser.error(f"--query is between -{MAX_QUERIES} and -1, got {args.query}")
    if args.names is not None and len(args.names) != len(args.model):
        parser.error(f"--names gives {len(args.names)} names for {len(args.model)} models")
    return args


def measure_base(name: str, trust_remote_code: bool) -> LanguageModel:
    """The embeddings of a language model."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return LanguageModel(name, measure_embeddings(vocabulary_norms(model), tokenizer))


@contextmanager
def naming(option: str, value: str) -> Iterator[None]:
    """Exit with one line that names the option if its value can't be loaded."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        # the first line only: transformers goes on to list all its classes
        raise SystemExit(f"{option} {value}: {str(error).strip().splitlines()[0]}") from error


def check_models(args: argparse.Namespace) -> None:
    """Exit, before weights are loaded, if a model is not there or lacks a requested layer or head."""
    for path in args.model:
        with naming("--model", path):
            load_processor(path, args.trust_remote_code)
            if args.layers is None and args.heads is None:
                continue
            Closeup(args.layers, args.heads).check(*count_layers_and_heads(path, args.trust_remote_code))


def load_models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, Any]]:
    """Name, model and processor, one after the other; no reference is kept here."""
    for path, name in zip(args.model, args.names or args.model, strict=True):
        with naming("--model", path):
            loaded = load_model(path, **model_options(args))
        yield name, *loaded
        del loaded


def with_weights(report: Report, sources: Sequence[str]) -> Iterator[ModelReport]:
    """The models' reports with the fingerprints of those weights that are in local folders."""
    for model, source in zip(report.models, sources, strict=True):
        yield replace(model, weights=weights_fingerprint(Path(source)))


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs every font table of a PDF
    plt.switch_backend("agg")
    args = parse_arguments()
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output_dir: {error}") from error
    check_models(args)
    questions = read_questions(args)
    base = None
    if args.base_model:
        with naming("--base_model", args.base_model):
            base = measure_base(args.base_model, args.trust_remote_code)
    try:
        measured = measure_models(
            load_models(args),
            questions,
            Path(args.data).name,
            args.compare,
            Closeup(args.layers, args.heads, args.query),
            base,
            command="python -m diagnostics " + shlex.join(sys.argv[1:]),
        )
    except DiagnosticsError as error:
        raise SystemExit(f"--model {error}") from error
    measured = replace(measured, report=replace(measured.report, models=[*with_weights(measured.report, args.model)]))
    measured.save(args.output_dir)
    logger.info("\n%s\n\nReport in %s", measured, args.output_dir)


if __name__ == "__main__":
    main()
