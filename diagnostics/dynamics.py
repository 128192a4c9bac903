"""Training dynamics of a run, measured on a fixed set of pictures (Fig. 5 of "The Unseen Bias", arXiv 2512.08374).

    python -m diagnostics.dynamics --run runs/digits/stage1 --data questions.json

Measures every checkpoint of a run, and writes `dynamics.jsonl`, a line for each, and `dynamics.png` into its folder.
Checkpoints that are in the file already are skipped.
"""

import argparse
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from conversations.files import write_whole
from diagnostics.loading import Question, add_arguments, load_model, model_options, read_questions
from diagnostics.measures import measure_all
from diagnostics.model_report import record_samples
from diagnostics.plots import draw_dynamics, save
from diagnostics.results import from_json, to_json
from diagnostics.samples import Sample, prepare_samples
from diagnostics.table import Summary


logger = logging.getLogger(__name__)

FILE = "dynamics.jsonl"


@dataclass(frozen=True)
class DynamicsPoint:
    """The measures tracked during training, at one step.

    Attributes:
        step: Of the run.
        questions: Fingerprint of the questions.
        dtype: Of the model.
        summary: The numbers.
    """

    step: int
    questions: str
    dtype: str
    summary: Summary


def fingerprint(questions: Sequence[Question]) -> str:
    """Hash of the pictures and prompts, independent of where they are stored."""
    seen = hashlib.sha256()
    for question in questions:
        for message in question.prompt:
            texts = [part.get("text", "") for part in message["content"]]
            seen.update(repr((message["role"], texts)).encode())
        for image in question.images:
            seen.update(repr(image.size).encode() + image.tobytes())
    return seen.hexdigest()[:16]


def check_questions(points: Sequence[DynamicsPoint], questions: Sequence[Question], path: Path) -> None:
    """Raises `ValueError` if a file holds points on other questions."""
    expected = fingerprint(questions)
    if any(point.questions != expected for point in points):
        raise ValueError(
            f"{path} holds points that were measured on other questions: give the same ones (--data, --question, "
            "--num_samples), or move the file away."
        )


def measure_point(model: PreTrainedModel, samples: Sequence[Sample], step: int) -> DynamicsPoint:
    """The measures tracked during training: interface norms, norms and turning by layer, gain and bias."""
    records = record_samples(model, samples, layers=())
    return DynamicsPoint(
        step=step,
        questions=fingerprint([sample.question for sample in samples]),
        dtype=str(model.dtype).removeprefix("torch."),
        summary=Summary.of(measure_all(model, records)),
    )


def read_points(path: Path) -> list[DynamicsPoint]:
    """The points of a file by step; an incomplete last line, of a killed run, is left out."""
    if not path.exists():
        return []
    points = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            points.append(from_json(DynamicsPoint, json.loads(line), "point"))
        except ValueError as error:  # no JSON, or of another version
            raise ValueError(f"{path}, line {number}: {error} Move the file away to measure again.") from error
    return sorted(points, key=lambda point: point.step)


def write_points(points: Sequence[DynamicsPoint], path: Path) -> None:
    """Write the file atomically."""
    write_whole(path, "".join(json.dumps(to_json(point)) + "\n" for point in points))


def measure_run(
    run: Path, questions: Sequence[Question], start: str | None = None, **options: Any
) -> list[DynamicsPoint]:
    """Measure every checkpoint of a run that is not in its `dynamics.jsonl` yet, and add it there; all points by step.

    Args:
        run: Its `output_dir`.
        questions: What to measure on.
        start: The model that the run started from, measured as step 0.
        options: As for [`load_model`].
    """
    folders = [path for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    if not folders:
        raise ValueError(f"{run} has no {PREFIX_CHECKPOINT_DIR}-<step> folders; train with --save_strategy steps.")
    points = read_points(run / FILE)
    check_questions(points, questions, run / FILE)
    steps = {int(path.name.split("-")[-1]): str(path) for path in folders}
    if start is not None:
        steps[0] = start
    for step, name in sorted(steps.items()):
        if any(point.step == step for point in points):
            logger.info("step %d is in %s already; %s is not measured", step, run / FILE, name)
            continue
        logger.info("measuring %s", name)
        point = _measure_checkpoint(name, questions, step, **options)
        if other := {before.dtype for before in points} - {point.dtype}:
            logger.warning("%s is in %s, other points of %s in %s", name, point.dtype, run / FILE, ", ".join(other))
        points = sorted([*points, point], key=lambda point: point.step)
        write_points(points, run / FILE)
    return points


def _measure_checkpoint(name: str, questions: Sequence[Question], step: int, **options: Any) -> DynamicsPoint:
    """A function of its own, so that no checkpoint stays in memory while the next one is loaded."""
    model, processor = load_model(name, **options)
    return measure_point(model, prepare_samples(model, processor, questions), step)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.dynamics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, help="output_dir of a training run")
    add("--start", help="the model that the run started from, measured as step 0: folder or Hub id")
    add_arguments(parser, num_samples=16)
    args = parser.parse_args()
    questions = read_questions(args).questions
    try:
        points = measure_run(args.run, questions, args.start, **model_options(args))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from error
    save(draw_dynamics({point.step: point.summary for point in points}), args.run / "dynamics.png")
    frames = pd.concat([point.summary.frame.assign(step=point.step) for point in points])
    means = frames[frames["layer"].isna() & frames["measure"].isin(["at_decoder", "ratio", "turning"])]
    shown = means.pivot(index="step", columns=["measure", "modality"], values="mean")
    logger.info("%s", shown.to_string(float_format="{:.3f}".format))
    logger.info("Points and plot in %s", args.run)


if __name__ == "__main__":
    main()
