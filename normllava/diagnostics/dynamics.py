"""Measures norms of tokens, and how far layers turn them, in each checkpoint of a training run.

    normllava dynamics --run runs/digits/stage1 --data questions.json

The rows of each checkpoint are added to `dynamics.csv` in the run's folder, with a column `step`. A checkpoint whose
rows are in the file already is skipped. All rows are then drawn in `dynamics.png`, in the way of Fig. 5 of "The Unseen
Bias" (arXiv 2512.08374).
"""

import argparse
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

import matplotlib.pyplot as plt
import pandas as pd

from normllava.diagnostics.loading import Question, add_arguments, load_model, model_options, read_questions
from normllava.diagnostics.measures import measure_all
from normllava.diagnostics.plots import draw_dynamics, save_figure
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.table import Summary
from normllava.errors import UserError
from normllava.files import fingerprint, hash_files, weights_fingerprint, write_whole


logger = logging.getLogger(__name__)

# Name of the file of rows in the run's folder.
FILE = "dynamics.csv"


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    plt.switch_backend("agg")  # figures are written to files, and need no display
    args = parse(build_parser(), argv)

    questions = read_questions(args).questions
    table = measure_run(args.run, questions, args.start, **model_options(args))

    summaries = {step: Summary.of(rows.drop(columns="step")) for step, rows in table.groupby("step")}
    figure_path = args.run / "dynamics.png"
    save_figure(draw_dynamics(summaries), figure_path)
    logger.info("%d steps in %s, drawn in %s", len(summaries), args.run / FILE, figure_path)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="normllava dynamics", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--run", type=Path, required=True, help="output_dir of a training run")
    parser.add_argument("--start", help="the model that the run started from, measured as step 0: folder or Hub id")
    add_arguments(parser, num_samples=16)
    return parser


def measure_run(run: Path, questions: Sequence[Question], start: str | None = None, **options: Any) -> pd.DataFrame:
    """Measure the checkpoints of a run that are not in its `dynamics.csv` yet, and add their rows to this file.

    Args:
        run: The run's folder.
        questions: What each checkpoint is asked.
        start: The model that the run started from, measured as step 0.
        options: Keyword arguments of [`load_model`].

    Returns:
        All rows of the file, with a column `step`.

    Raises:
        UserError: if there are no checkpoints, or if the file has rows of other questions or another `dtype`.
    """
    path = run / FILE
    models_by_step = find_models(run, start)
    table = read_table(path)
    # Each row of the file has a fingerprint of the questions and the dtype with which the row was measured.
    measured_as = fingerprint_measurement(questions, options.get("dtype"))
    is_comparable = table["measured_as"] == measured_as
    if not is_comparable.all():
        raise UserError(f"{path} holds rows of other questions or another dtype: give the same, or move it away.")

    for step, name in sorted(models_by_step.items()):
        folder = Path(name)
        weights = weights_fingerprint(folder)
        if weights is None and folder.is_dir():  # an adapter
            weights = fingerprint(hash_files(folder, "adapter_*"))
        if weights is None:
            weights = name  # a model on the Hub has no fingerprint, so its name stands for its weights

        is_this_step = table["step"] == step
        is_measured = is_this_step & (table["weights"] == weights)
        if is_measured.any():
            logger.info("step %d is in %s already", step, path)
            continue

        rows = _measure_checkpoint(name, questions, **options)
        rows = rows.assign(step=step, weights=weights, measured_as=measured_as)

        # Rows of this step with other weights are dropped: a resumed run has replaced the checkpoint since.
        other_steps = table[~is_this_step]
        # An empty table is not concatenated, because pandas would warn.
        table = rows if other_steps.empty else pd.concat([other_steps, rows])
        table = table.sort_values("step", kind="stable")
        write_whole(path, table.to_csv(index=False))
    return table.drop(columns=["weights", "measured_as"])


def find_models(run: Path, start: str | None) -> dict[int, str]:
    """Folder or Hub id of each model to measure, by step: a run's checkpoints, and `start`, if given, as step 0.

    Raises:
        UserError: if there are no checkpoints.
    """
    models = {}
    for path in run.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit():  # a folder such as checkpoint-500-copy, which the user made, is passed over
            models[int(step)] = str(path)
    if not models:
        raise UserError(f"{run} has no checkpoint-<step> folders; train with --save_strategy steps.")

    if start is not None:
        models[0] = start
    return models


def fingerprint_measurement(questions: Sequence[Question], dtype: str | None) -> str:
    """A fingerprint of pictures, texts and dtype. Checkpoints can be compared only if their fingerprints are equal."""
    contents = []
    for question in questions:
        texts = []
        for message in question.prompt:
            texts += [part.get("text") for part in message["content"]]  # `None` for a picture
        contents.append((question.fingerprint, texts))

    description = repr((contents, dtype))
    digest = hashlib.sha256(description.encode()).hexdigest()
    return digest[:16]  # long enough that two measurements don't get the same fingerprint by chance


def read_table(path: Path) -> pd.DataFrame:
    """The rows of an earlier measurement; an empty table if there is no such file."""
    if not path.exists():
        return pd.DataFrame({"step": [], "weights": [], "measured_as": []})

    # "Int64" allows missing integers. A fingerprint that happens to have only digits has to stay a text.
    types = {"layer": "Int64", "picture": "Int64", "weights": str, "measured_as": str}
    table = pd.read_csv(path, dtype=types)
    return table.fillna({"modality": ""})  # pandas reads an empty text as NaN


def _measure_checkpoint(name: str, questions: Sequence[Question], **options: Any) -> pd.DataFrame:
    """The rows of one checkpoint.

    This is a function so that the model, a local variable here, is freed before the next checkpoint is loaded.
    """
    model, processor = load_model(name, **options)
    records = record_questions(model, processor, questions, layers=(), title=name)  # no layer's attention is measured
    return measure_all(model, records)
