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
from diagnostics.comparison import record_questions
from diagnostics.loading import Question, add_arguments, load_model, model_options, read_questions
from diagnostics.measures import measure_all
from diagnostics.plots import draw_dynamics, save
from diagnostics.table import Summary


logger = logging.getLogger(__name__)

FILE = "dynamics.csv"


def measure_run(run: Path, questions: Sequence[Question], start: str | None = None, **options: Any) -> pd.DataFrame:
    """Measure every checkpoint of a run's folder that is not in its `dynamics.csv` yet, and add it there; all rows.

    `start` is the model that the run started from, measured as step 0; options are those of [`load_model`]. Raises
    `UserError` if there are no checkpoints, or the file's rows are of other questions or another `dtype`.
    """
    folders = [path for path in run.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    steps = {int(path.name.split("-")[1]): str(path) for path in folders}
    if not steps:
        raise UserError(f"{run} has no checkpoint-<step> folders; train with --save_strategy steps.")
    if start is not None:
        steps[0] = start
    asked = [(of.picture, [part.get("text") for turn in of.prompt for part in turn["content"]]) for of in questions]
    measured_as = hashlib.sha256(repr((asked, options.get("dtype"))).encode()).hexdigest()[:16]
    path = run / FILE
    table = pd.DataFrame({"step": [], "weights": [], "measured_as": []})
    if path.exists():
        kinds = {"layer": "Int64", "picture": "Int64", "weights": str, "measured_as": str}
        table = pd.read_csv(path, dtype=kinds).fillna({"modality": ""})
    if set(table["measured_as"]) - {measured_as}:
        raise UserError(f"{path} holds rows of other questions or another dtype: give the same, or move it away.")
    for step, name in sorted(steps.items()):
        weights = weights_fingerprint(Path(name)) or name
        if ((table["step"] == step) & (table["weights"] == weights)).any():
            logger.info("step %d is in %s already", step, path)
            continue
        rows = _measure_checkpoint(name, questions, **options).assign(step=step, weights=weights)
        table, rows = table[table["step"] != step], rows.assign(measured_as=measured_as)
        table = pd.concat([table, rows] if len(table) else [rows]).sort_values("step", kind="stable")
        write_whole(path, table.to_csv(index=False))
    return table.drop(columns=["weights", "measured_as"])


def _measure_checkpoint(name: str, questions: Sequence[Question], **options: Any) -> pd.DataFrame:
    """A function of its own, so that no checkpoint stays in memory while the next one is loaded."""
    model, processor = load_model(name, **options)
    return measure_all(model, record_questions(model, processor, questions, (), name))


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m diagnostics.dynamics", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="output_dir of a training run")
    parser.add_argument("--start", help="the model that the run started from, measured as step 0: folder or Hub id")
    add_arguments(parser, num_samples=16)
    return parser


@command()
def main() -> None:
    """Run the command line."""
    plt.switch_backend("agg")
    args = parse(build_parser())
    table = measure_run(args.run, read_questions(args).questions, args.start, **model_options(args))
    points = {step: Summary.of(rows.drop(columns="step")) for step, rows in table.groupby("step")}
    save(draw_dynamics(points), args.run / "dynamics.png")
    logger.info("%d steps in %s, drawn in %s", len(points), args.run / FILE, args.run / "dynamics.png")


if __name__ == "__main__":
    main()
