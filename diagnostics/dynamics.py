"""Norms and turning through a run's checkpoints (Fig. 5 of "The Unseen Bias", arXiv 2512.08374).

    python -m diagnostics.dynamics --run runs/digits/stage1 --data questions.json

`dynamics.csv` in the run's folder gets the rows of each checkpoint with a column `step`. What is in it is skipped.
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
    """Measure every checkpoint of a run's folder that is not in its `dynamics.csv` yet, and add it there; all rows.

    Args:
        run: The folder.
        questions: Asked of each checkpoint.
        start: The model that the run started from, measured as step 0.
        options: Those of [`load_model`].

    Raises:
        UserError: if there are no checkpoints, or the file's rows are of other questions or another `dtype`.
    """
    models = find_models(run, start)
    measured_as = fingerprint_measurement(questions, options.get("dtype"))
    path = run / FILE
    table = read_table(path)
    if set(table["measured_as"]) - {measured_as}:
        raise UserError(f"{path} holds rows of other questions or another dtype: give the same, or move it away.")

    for step, name in sorted(models.items()):
        weights = weights_fingerprint(Path(name)) or name
        is_step = table["step"] == step
        if (is_step & (table["weights"] == weights)).any():
            logger.info("step %d is in %s already", step, path)
            continue

        rows = _measure_checkpoint(name, questions, **options)
        rows = rows.assign(step=step, weights=weights, measured_as=measured_as)
        others = table[~is_step]  # A resumed run replaces its checkpoints.
        table = rows if others.empty else pd.concat([others, rows])
        table = table.sort_values("step", kind="stable")
        write_whole(path, table.to_csv(index=False))
    return table.drop(columns=["weights", "measured_as"])


def find_models(run: Path, start: str | None) -> dict[int, str]:
    """Folder of each checkpoint of a run by its step, and where the run started from as step 0.

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
    """What the rows of two measurements must share to be compared: pictures, texts and dtype."""
    asked = []
    for question in questions:
        parts = [part for message in question.prompt for part in message["content"]]
        asked.append((question.picture, [part.get("text") for part in parts]))
    return hashlib.sha256(repr((asked, dtype)).encode()).hexdigest()[:16]


def read_table(path: Path) -> pd.DataFrame:
    """The rows that were measured before; none, if there is no such file."""
    if not path.exists():
        return pd.DataFrame({"step": [], "weights": [], "measured_as": []})

    types = {"layer": "Int64", "picture": "Int64", "weights": str, "measured_as": str}
    return pd.read_csv(path, dtype=types).fillna({"modality": ""})


def _measure_checkpoint(name: str, questions: Sequence[Question], **options: Any) -> pd.DataFrame:
    """A function of its own, so that no checkpoint stays in memory while the next one is loaded."""
    model, processor = load_model(name, **options)
    return measure_all(model, record_questions(model, processor, questions, (), name))


if __name__ == "__main__":
    main()
