"""Measures norms and turning in each checkpoint of a run (Fig. 5 of "The Unseen Bias", arXiv 2512.08374).

    python -m diagnostics.dynamics --run runs/digits/stage1 --data questions.json

The rows of each checkpoint are added to `dynamics.csv` in the run's folder, with a column `step`. A checkpoint whose
rows are in the file already is skipped.
"""

import argparse
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from common.console import command, parse
from common.errors import UserError
from common.files import weights_fingerprint, write_whole
from diagnostics.loading import Question, add_arguments, load_model, model_options, read_questions
from diagnostics.measures import measure_all
from diagnostics.plots import draw_dynamics, save_figure
from diagnostics.recording import record_questions
from diagnostics.table import Summary


logger = logging.getLogger(__name__)

FILE = "dynamics.csv"


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    plt.switch_backend("agg")
    args = parse(build_parser(), argv)

    questions = read_questions(args).questions
    table = measure_run(args.run, questions, args.start, **model_options(args))

    summaries = {step: Summary.of(rows.drop(columns="step")) for step, rows in table.groupby("step")}
    figure = args.run / "dynamics.png"
    save_figure(draw_dynamics(summaries), figure)
    logger.info("%d steps in %s, drawn in %s", len(summaries), args.run / FILE, figure)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m diagnostics.dynamics", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="output_dir of a training run")
    parser.add_argument("--start", help="the model that the run started from, measured as step 0: folder or Hub id")
    add_arguments(parser, num_samples=16)
    return parser


def measure_run(run: Path, questions: Sequence[Question], start: str | None = None, **options: Any) -> pd.DataFrame:
    """Measure the checkpoints of a run that are not in its `dynamics.csv` yet, and add their rows to this file.

    Args:
        run: The run's folder.
        questions: Asked of each checkpoint.
        start: The model that the run started from, measured as step 0.
        options: Keyword arguments of [`load_model`].

    Returns:
        All rows of the file, with a column `step`.

    Raises:
        UserError: if there are no checkpoints, or if the file has rows of other questions or another `dtype`.
    """
    models = find_models(run, start)
    measured_as = fingerprint_measurement(questions, options.get("dtype"))
    path = run / FILE
    table = read_table(path)
    if set(table["measured_as"]) - {measured_as}:
        raise UserError(f"{path} holds rows of other questions or another dtype: give the same, or move it away.")

    for step, name in sorted(models.items()):
        # A model on the Hub has no files here to fingerprint: its name stands for its weights.
        weights = weights_fingerprint(Path(name)) or name
        is_this_step = table["step"] == step
        is_measured = is_this_step & (table["weights"] == weights)
        if is_measured.any():
            logger.info("step %d is in %s already", step, path)
            continue

        rows = _measure_checkpoint(name, questions, **options)
        rows = rows.assign(step=step, weights=weights, measured_as=measured_as)

        # Rows of this step are of a checkpoint that a resumed run has replaced since.
        other_steps = table[~is_this_step]
        table = rows if other_steps.empty else pd.concat([other_steps, rows])
        table = table.sort_values("step", kind="stable")
        write_whole(path, table.to_csv(index=False))
    return table.drop(columns=["weights", "measured_as"])


def find_models(run: Path, start: str | None) -> dict[int, str]:
    """Folders of a run's checkpoints by step. The model that the run started from, if given, is step 0.

    Raises:
        UserError: if there are no checkpoints.
    """
    models = {}
    for path in run.glob("checkpoint-*"):
        step = path.name.split("-")[1]
        if step.isdigit():
            models[int(step)] = str(path)
    if not models:
        raise UserError(f"{run} has no checkpoint-<step> folders; train with --save_strategy steps.")

    if start is not None:
        models[0] = start
    return models


def fingerprint_measurement(questions: Sequence[Question], dtype: str | None) -> str:
    """A fingerprint of pictures, texts and dtype: two checkpoints can be compared only if these are the same."""
    asked = []
    for question in questions:
        texts = []
        for message in question.prompt:
            texts += [part.get("text") for part in message["content"]]
        asked.append((question.fingerprint, texts))

    description = repr((asked, dtype))
    return hashlib.sha256(description.encode()).hexdigest()[:16]


def read_table(path: Path) -> pd.DataFrame:
    """The rows of an earlier measurement; an empty table if there is no such file."""
    if not path.exists():
        return pd.DataFrame({"step": [], "weights": [], "measured_as": []})

    types = {"layer": "Int64", "picture": "Int64", "weights": str, "measured_as": str}
    return pd.read_csv(path, dtype=types).fillna({"modality": ""})


def _measure_checkpoint(name: str, questions: Sequence[Question], **options: Any) -> pd.DataFrame:
    """Rows of one checkpoint.

    The model is a local variable here, so that it is freed before the next checkpoint is loaded.
    """
    model, processor = load_model(name, **options)
    records = record_questions(model, processor, questions, layers=(), title=name)
    return measure_all(model, records)


if __name__ == "__main__":
    main()
