"""Measure vision-language models side by side and write a report.

    python -m diagnostics --model llava-hf/llava-1.5-7b-hf --data questions.json --output_dir report/

`--data` is what training takes (LLaVA's JSON or JSONL, a dataset on disk or on the Hub) or a folder of pictures. Out
come `report.json`, `report.md`, `report.html` and the plots.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from conversations.files import write_whole
from diagnostics import plots
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.key_space import Bases
from diagnostics.loading import add_arguments, load_model, model_options, read_questions
from diagnostics.measure import Closeup, measure_model
from diagnostics.parts import DiagnosticsError
from diagnostics.report import render_html, render_markdown
from diagnostics.results import LanguageModel, Report, to_json


logger = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, num_samples=32)
    add = parser.add_argument
    add("--model", nargs="+", required=True, help="folders or Hub ids, compared side by side; the first is the base")
    add("--names", nargs="+", help="what the report calls them; by default what --model says")
    add("--base_model", help="language model whose embeddings are set beside: folder or Hub id")
    add("--output_dir", type=Path, required=True, help="folder for the report; written over if it holds one")
    add("--layers", type=int, nargs="+", help="layers to draw attention and compare keys of; 6 by default")
    add("--heads", type=int, nargs="+", help="heads whose mean attention is drawn; all by default")
    add("--query", type=int, default=-1, help="query that is drawn: -1 is where the answer begins, -2 the word before")
    args = parser.parse_args()
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
    """Leave the command with one line that names the option, if what it names can't be loaded."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        # transformers goes on to list every class that it knows
        raise SystemExit(f"{option} {value}: {str(error).strip().splitlines()[0]}") from error


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    plt.switch_backend("agg")
    args = parse_arguments()
    questions, passed_over = read_questions(args)
    folder: Path = args.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output_dir: {error}") from error
    base = None
    if args.base_model:
        with naming("--base_model", args.base_model):
            base = measure_base(args.base_model, args.trust_remote_code)
    models, pictures = [], []
    bases: Bases = {}
    closeup = Closeup(args.layers, args.heads, args.query)
    for path, name in zip(args.model, args.names or args.model, strict=True):
        with naming("--model", path):
            model, processor = load_model(path, **model_options(args))
        try:
            measured, drawn = measure_model(model, processor, questions, name, bases, closeup)
        except DiagnosticsError as error:
            raise SystemExit(f"--model {path}: {error}") from error
        models.append(measured)
        pictures.append(drawn)
        del model
    report = Report(
        command="python -m diagnostics " + shlex.join(sys.argv[1:]),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        data=Path(args.data).name,
        num_samples=len(questions),
        passed_over=passed_over,
        models=models,
        base=base,
    )
    names = [model.name for model in models]
    plots.draw_layers(names, [model.layers for model in models], folder / "layers.png")
    plots.draw_attention(names, [model.attention for model in models], folder / "attention.png")
    plots.draw_keys(names, [model.key_space for model in models], pictures, folder / "keys.png")
    (folder / "attention_maps.png").unlink(missing_ok=True)
    plots.draw_maps(names, pictures, questions, folder / "attention_maps.png")
    markdown = render_markdown(report, folder)
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    (folder / "report.html").write_text(render_html(markdown, folder), encoding="utf-8")
    write_whole(folder / "report.json", json.dumps(to_json(report), indent=1, allow_nan=False))
    logger.info("%s", markdown.split("## In short")[1].split("## ")[0].strip())
    logger.info("Report in %s", folder)


if __name__ == "__main__":
    main()
