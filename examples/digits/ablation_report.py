"""Write up the ablation: tables in the shape of the paper's Tables 4 and 5, layer plots for each arm, and a page.

    python examples/digits/ablation_report.py

Reads the runs that `ablation.py` made, measures every trained model on the same questions, and writes
`benchmarks/results/ablation.json`, `examples/digits/ABLATION.md` and its plots. The numbers of the page are filled in
from the results; what they mean is written in `ablation_page.md`.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from ablation import ARMS, OPTIMIZER_ARMS, SEEDS, SGD_RATES, Arm, arm_folder, read_folder
from depth_plan import t_interval
from quickstart import RUN
from report import PROBE_SIZE, load_scene_questions, write_probe
from tqdm import tqdm

from conversations.files import write_whole
from diagnostics.dynamics import measure_point, measure_run
from diagnostics.loading import Question, load_model, load_questions
from diagnostics.plots import MODALITY_COLOURS, draw_curve, draw_layers, save
from diagnostics.report import table
from diagnostics.results import KEY, Curve, DynamicsPoint, Layers, ProjectorNorm, from_json, to_json
from diagnostics.samples import prepare_samples
from examples.steps import ROOT


logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("ablation_page.md")
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class StageNumbers:
    """The main numbers of a model."""

    visual_over_text_norm: float
    update_rate: dict[str, float]
    mean_gap: float
    projector_norm: ProjectorNorm | None


@dataclass(frozen=True)
class TrainedNumbers(StageNumbers):
    """The same after training, with the last logged loss, and the share of logged steps with a gradient over 1."""

    loss: float
    clipped: float


@dataclass(frozen=True)
class Accuracy:
    """Number of questions, and share of exact matches by kind, with the standard error over all kinds."""

    questions: int
    about_pictures: dict[str, float] = field(metadata={KEY: "image questions"})
    about_texts: dict[str, float] = field(metadata={KEY: "text-only questions"})


@dataclass(frozen=True)
class ArmRun:
    """Everything reported about one run; the last model's curves by layer are drawn, but not committed."""

    arm: str
    title: str
    seed: int
    composed: StageNumbers
    stage1: TrainedNumbers
    stage2: TrainedNumbers | None = None
    evaluation: Accuracy | None = None
    layers: Layers | None = None


@dataclass(frozen=True)
class AblationResults:
    """What `benchmarks/results/ablation.json` holds."""

    command: str
    seeds: list[int]
    runs: list[ArmRun]


Results = dict[str, list[ArmRun]]
"""The runs of each arm, one for each seed."""
Column = Callable[[list[ArmRun]], str]


def read_run(arm: Arm, seed: int, root: Path, questions: Sequence[Question]) -> ArmRun:
    """Everything reported about one run; cached in its folder, so that nothing is measured again."""
    folder = arm_folder(root, arm, seed)
    kept = folder / "measured.json"
    if kept.exists():
        return from_json(ArmRun, json.loads(kept.read_text(encoding="utf-8")), kept)
    first = measure_folder(folder / "stage1", questions)
    run = ArmRun(
        arm.name,
        arm.title,
        seed,
        composed=in_numbers(measure_folder(folder / "composed", questions)),
        stage1=trained_in_numbers(folder / "stage1", first),
        layers=first.layers,
    )
    if arm.stages == 2:
        last, path = measure_folder(folder / "stage2", questions), folder / "evaluation.json"
        run = replace(
            run,
            stage2=trained_in_numbers(folder / "stage2", last),
            evaluation=from_json(Accuracy, json.loads(path.read_text(encoding="utf-8")), path),
            layers=last.layers,
        )
    write_whole(kept, json.dumps(to_json(run)))
    return run


def measure_folder(folder: Path, questions: Sequence[Question]) -> DynamicsPoint:
    """Measure a model."""
    model, processor = load_model(str(folder))
    return measure_point(model, prepare_samples(model, processor, questions), step=0)


def in_numbers(point: DynamicsPoint) -> StageNumbers:
    """A model's numbers without the curves by layer."""
    return StageNumbers(
        visual_over_text_norm=point.interface.ratio.mean,
        update_rate={modality: point.layers.of(modality).update_rate.mean for modality in MODALITY_COLOURS},
        mean_gap=point.layers.gap.overall.mean,
        projector_norm=point.projector_norm,
    )


def trained_in_numbers(folder: Path, point: DynamicsPoint) -> TrainedNumbers:
    """The same of a trained model, with what its run logged."""
    steps = [line for line in read_metrics(folder) if "loss" in line]
    clipped = mean(line["grad_norm"] > 1 for line in steps)
    return TrainedNumbers(**vars(in_numbers(point)), loss=steps[-1]["loss"], clipped=clipped)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """What a run logged, line by line."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def over_seeds(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Mean and half width of its 95% t interval over seeds; the value for one seed, a dash for none."""
    if len(values) < 2:
        return f"{factor * values[0]:.{digits}f}" if values else "–"
    center, low, _ = t_interval(values)
    return f"{factor * center:.{digits}f} ± {factor * (center - low):.{digits}f}"


def column(value: Callable[[ArmRun], float], digits: int, factor: float = 1.0) -> Column:
    """A column of a table: a number of each run, over the seeds of an arm."""
    return lambda runs: over_seeds([value(run) for run in runs], digits, factor)


def rows_of(arms: Sequence[Arm], results: Results, columns: Sequence[Column]) -> list[list[str]]:
    """A row of cells for each arm."""
    return [[arm.title, *(column(results[arm.name]) for column in columns)] for arm in arms]


def stage2(run: ArmRun) -> TrainedNumbers:
    """The model after the second stage, of an arm that has it."""
    assert run.stage2 is not None
    return run.stage2


def accuracy_of(run: ArmRun) -> Accuracy:
    """Accuracy of the model after the second stage."""
    assert run.evaluation is not None
    return run.evaluation


def norm_of(model: StageNumbers) -> ProjectorNorm:
    """Gain and bias, of an arm that has them."""
    assert model.projector_norm is not None
    return model.projector_norm


def benchmark_table(results: Results) -> str:
    """Exact match by kind of question, in percent (the shape of Table 4)."""

    def about_pictures(kind: str) -> Column:
        return column(lambda run: accuracy_of(run).about_pictures[kind], 1, 100)

    columns = [about_pictures(kind) for kind in ("digit", "colour", "both", "all")]
    columns.append(column(lambda run: accuracy_of(run).about_texts["all"], 1, 100))
    header = ["arm", "digit", "colour", "both", "all about pictures", "all about texts"]
    return table(header, rows_of(ARMS, results, columns))


def parameter_table(results: Results) -> str:
    """Gain and bias at the start and after both stages (the shape of Table 5)."""
    columns = [
        column(lambda run: norm_of(run.stage1).gain_start, 4),
        column(lambda run: norm_of(run.stage1).gain_mean_abs, 4),
        column(lambda run: norm_of(stage2(run)).gain_mean_abs, 4),
        column(lambda run: norm_of(run.stage1).gain_drift_relative, 3),
        column(lambda run: norm_of(stage2(run)).gain_drift_relative, 3),
        column(lambda run: norm_of(run.stage1).bias_mean_abs, 4),
        column(lambda run: norm_of(stage2(run)).bias_mean_abs, 4),
    ]
    header = ["arm", "gain at start", "mean abs. gain, stage 1", "stage 2", "relative drift of gain, stage 1",
              "stage 2", "mean abs. bias, stage 1", "stage 2"]  # fmt: skip
    return table(header, rows_of(ARMS[1:], results, columns))


def dynamics_table(results: Results) -> str:
    """Losses, norm ratio and gap of cosines (what Fig. 4 and 5 show)."""
    columns = [
        column(lambda run: run.stage1.loss, 3),
        column(lambda run: stage2(run).loss, 3),
        column(lambda run: run.composed.visual_over_text_norm, 2),
        column(lambda run: run.stage1.visual_over_text_norm, 2),
        column(lambda run: stage2(run).visual_over_text_norm, 2),
        column(lambda run: run.composed.mean_gap, 3),
        column(lambda run: run.stage1.mean_gap, 3),
        column(lambda run: stage2(run).mean_gap, 3),
    ]
    header = ["arm", "last loss, stage 1", "stage 2", "visual over text norm, composed", "stage 1", "stage 2",
              "gap of cosines, composed", "stage 1", "stage 2"]  # fmt: skip
    return table(header, rows_of(ARMS, results, columns))


def optimizer_table(results: Results) -> str:
    """Stage 1 with and without compensation under each optimizer."""
    groups = [("AdamW, clipped at 1", "")]
    groups += [("AdamW, no clipping", "-adamw-unclipped")]
    groups += [(f"SGD with momentum 0.9, rate {rate}", f"-sgd-{rate}") for rate in SGD_RATES]
    loss, gain = column(lambda run: run.stage1.loss, 3), column(lambda run: norm_of(run.stage1).gain_mean_abs, 3)
    rows = []
    for title, suffix in groups:
        plain, compensated = arms = [results[norm + suffix] for norm in ("layernorm", "gwc")]
        differences = [b.stage1.loss - a.stage1.loss for a, b in zip(plain, compensated, strict=True)]
        clipped = [f"{100 * mean(run.stage1.clipped for run in runs):.0f}%" for runs in arms]
        rows.append([title, *map(loss, arms), over_seeds(differences, 3), *map(gain, arms), *clipped])
    header = ["optimizer, stage 1", "last loss, plain", "GWC", "GWC less plain", "mean abs. gain, plain", "GWC",
              "steps with gradient over 1, plain", "GWC"]  # fmt: skip
    return table(header, rows)


def draw_arms(results: Results, path: Path) -> None:
    """Norm and cosine by layer of each arm after stage 2, first seed (Fig. 4)."""
    curves = {arm.title: results[arm.name][0].layers for arm in ARMS}
    save(draw_layers(list(curves), [layers for layers in curves.values() if layers is not None]), path)


def draw_training(root: Path, questions: Sequence[Question], path: Path) -> None:
    """Visual over text norm, and update rates, through stage 1 of each arm, first seed (Fig. 5)."""
    figure, axes = plt.subplots(
        2, len(ARMS), figsize=(3.2 * len(ARMS), 5), sharey="row", sharex=True, layout="constrained"
    )
    for number, arm in enumerate(ARMS):
        folder = arm_folder(root, arm, SEEDS[0])
        points = measure_run(folder / "stage1", questions, start=str(folder / "composed"))
        steps = [point.step for point in points]
        for modality, colour in MODALITY_COLOURS.items():
            norms = Curve.through([point.interface.at_decoder(modality) for point in points])
            rates = Curve.through([point.layers.of(modality).update_rate for point in points])
            for row, curve in enumerate((norms, rates)):
                draw_curve(axes[row, number], steps, curve, color=colour, label=modality)
        axes[0, number].set(title=arm.title, yscale="log")
        axes[0, number].title.set_fontsize(9)
        axes[1, number].set_xlabel("step of stage 1")
    axes[0, 0].set_ylabel("norm at the decoder")
    axes[1, 0].set_ylabel("update rate, 1 - cosine")
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def load_probe() -> list[Question]:
    """The questions that every model is measured on: the first about each of the first pictures."""
    probe = ROOT / RUN / "data" / "probe.json"
    write_probe(load_scene_questions(probe.parent), probe)
    return load_questions(str(probe), PROBE_SIZE).questions


def write_results(summary: Any, texts: Mapping[str, str], template: Path, page: Path, results: Path) -> None:
    """The results as JSON, and the page: a template with a text in place of each `{name}`."""
    text = template.read_text(encoding="utf-8")
    for name, filled_in in texts.items():
        text = text.replace("{" + name + "}", filled_in)
    write_whole(page, text)
    write_whole(results, json.dumps(to_json(summary), indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    root = read_folder(__doc__, "--run_dir", "ablation")
    plt.switch_backend("agg")
    questions = load_probe()
    jobs = [(arm, seed) for arm in ARMS + OPTIMIZER_ARMS for seed in SEEDS]
    results: Results = {}
    for arm, seed in tqdm(jobs, desc="Measuring", unit="run"):
        results.setdefault(arm.name, []).append(read_run(arm, seed, root, questions))
    folder = Path(__file__).parent
    draw_arms(results, folder / "ablation_layers.png")
    draw_training(root, questions, folder / "ablation_training.png")
    tables = {
        "benchmarks": benchmark_table(results),
        "parameters": parameter_table(results),
        "dynamics": dynamics_table(results),
        "optimizers": optimizer_table(results),
    }
    runs = [replace(run, layers=None) for of_arm in results.values() for run in of_arm]
    write_results(
        AblationResults("make ablation", list(SEEDS), runs),
        tables,
        PAGE,
        folder / "ABLATION.md",
        RESULTS / "ablation.json",
    )
    logger.info("%s", "\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
