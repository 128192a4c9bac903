"""Write up the ablation: tables in the shape of the paper's Tables 4 and 5, layer plots for each arm, and a page.

    python examples/digits/ablation_report.py

Reads the runs that `ablation.py` made, measures every trained model on the same questions, and writes
`benchmarks/results/ablation.json`, `examples/digits/ABLATION.md` and its plots. The numbers of the page are filled in
from the results; what they mean is written in `ablation_page.md`.
"""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
from ablation import ARMS, OPTIMIZER_ARMS, SEEDS, SGD_RATES, Arm, arm_folder
from quickstart import ROOT, RUN
from report import PROBE_SIZE, load_questions, write_probe
from scipy.stats import t
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from conversations.files import write_whole
from diagnostics import loading
from diagnostics.dynamics import measure_point, measure_run
from diagnostics.plots import COLOURS, draw_curve, draw_layers
from diagnostics.report import table


logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("ablation_page.md")


def last_logged(run: Path) -> dict[str, float]:
    """Mean loss of a training run's last logged steps, and the share of logged steps with a gradient over 1."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "loss": steps[-1]["loss"],
        "clipped": mean(line["grad_norm"] > 1 for line in steps),
    }


def read_run(arm: Arm, seed: int, root: Path, questions: Sequence[loading.Question]) -> dict[str, Any]:
    """All that is reported of one run; what takes time is kept in its folder and not measured again."""
    folder = arm_folder(root, arm, seed)
    kept = folder / "measured.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    result: dict[str, Any] = {"arm": arm.name, "title": arm.title, "seed": seed}
    for stage in ("composed", "stage1", "stage2")[: arm.stages + 1]:
        model, processor = loading.load_model(str(folder / stage))
        result[stage] = measure_point(model, processor, questions, step=0)
        if stage != "composed":
            result[stage] |= last_logged(folder / stage)
    if arm.stages == 2:
        result["evaluation"] = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    write_whole(kept, json.dumps(result))
    return result


def interval(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Mean and half width of its 95% t interval over seeds."""
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f"{factor * mean(values):.{digits}f} ± {factor * half:.{digits}f}"


def rows_of(
    arms: Sequence[Arm],
    results: dict[str, list[dict[str, Any]]],
    columns: Sequence[Callable[[list[dict[str, Any]]], str]],
) -> list[list[str]]:
    """A row of cells for each arm."""
    return [[arm.title, *(column(results[arm.name]) for column in columns)] for arm in arms]


def summarize_run(run: dict[str, Any]) -> dict[str, Any]:
    """What is committed of a run: its numbers without the curves by layer."""
    summary: dict[str, Any] = {name: run[name] for name in ("arm", "title", "seed", "evaluation") if name in run}
    for stage in ("composed", "stage1", "stage2"):
        if stage in run:
            point = run[stage]
            summary[stage] = {
                "visual_over_text_norm": point["interface"]["ratio"]["mean"],
                "update_rate": {name: point["layers"][name]["update_rate"]["mean"] for name in COLOURS},
                "mean_gap": point["layers"]["mean_gap"]["mean"],
                "projector_norm": point["projector_norm"],
                **{name: point[name] for name in ("loss", "clipped") if name in point},
            }
    return summary


def benchmark_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Exact match by kind of question, in percent (the shape of Table 4)."""

    def score(group: str, kind: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda runs: interval([run["evaluation"][group][kind] for run in runs], 1, 100)

    about_pictures = [("image questions", kind) for kind in ("digit", "colour", "both", "all")]
    kinds = [*about_pictures, ("text-only questions", "all")]
    header = ["arm", "digit", "colour", "both", "all about pictures", "all about texts"]
    return table(header, rows_of(ARMS, results, [score(*kind) for kind in kinds]))


def parameter_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Gain and bias where they start and after both stages (the shape of Table 5)."""

    def value(stage: str, name: str, digits: int) -> Callable[[list[dict[str, Any]]], str]:
        return lambda runs: interval([run[stage]["projector_norm"][name] for run in runs], digits)

    columns = [
        value("stage1", "gain_start", 4),
        *(value(stage, "gain_mean_abs", 4) for stage in ("stage1", "stage2")),
        *(value(stage, "gain_drift_relative", 3) for stage in ("stage1", "stage2")),
        *(value(stage, "bias_mean_abs", 4) for stage in ("stage1", "stage2")),
    ]
    header = ["arm", "gain at start", "mean abs. gain, stage 1", "stage 2", "relative drift of gain, stage 1",
              "stage 2", "mean abs. bias, stage 1", "stage 2"]  # fmt: skip
    return table(header, rows_of(ARMS[1:], results, columns))


def dynamics_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Losses, norm ratio and gap of cosines (what Fig. 4 and 5 show)."""
    columns = [
        lambda runs: interval([run["stage1"]["loss"] for run in runs], 3),
        lambda runs: interval([run["stage2"]["loss"] for run in runs], 3),
        *(
            (lambda runs, stage=stage: interval([run[stage]["interface"]["ratio"]["mean"] for run in runs], 2))
            for stage in ("composed", "stage1", "stage2")
        ),
        *(
            (lambda runs, stage=stage: interval([run[stage]["layers"]["mean_gap"]["mean"] for run in runs], 3))
            for stage in ("composed", "stage1", "stage2")
        ),
    ]
    header = ["arm", "last loss, stage 1", "stage 2", "visual over text norm, composed", "stage 1", "stage 2",
              "gap of cosines, composed", "stage 1", "stage 2"]  # fmt: skip
    return table(header, rows_of(ARMS, results, columns))


def optimizer_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Stage 1 with and without compensation under each optimizer."""
    groups = [("AdamW, clipped at 1", "")]
    groups += [("AdamW, no clipping", "-adamw-unclipped")]
    groups += [(f"SGD with momentum 0.9, rate {rate}", f"-sgd-{rate}") for rate in SGD_RATES]
    rows = []
    for title, suffix in groups:
        plain, compensated = (results[norm + suffix] for norm in ("layernorm", "gwc"))
        differences = [b["stage1"]["loss"] - a["stage1"]["loss"] for a, b in zip(plain, compensated, strict=True)]
        clipped = [f"{100 * mean(run['stage1']['clipped'] for run in runs):.0f}%" for runs in (plain, compensated)]
        rows.append(
            [
                title,
                *(interval([run["stage1"]["loss"] for run in runs], 3) for runs in (plain, compensated)),
                interval(differences, 3),
                *(
                    interval([r["stage1"]["projector_norm"]["gain_mean_abs"] for r in runs], 3)
                    for runs in (plain, compensated)
                ),
                *clipped,
            ]
        )
    header = ["optimizer, stage 1", "last loss, plain", "GWC", "GWC less plain", "mean abs. gain, plain", "GWC",
              "steps with gradient over 1, plain", "GWC"]  # fmt: skip
    return table(header, rows)


def draw_arms(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Norm and cosine by layer of each arm after stage 2, first seed (Fig. 4)."""
    models = [
        {"name": arm.title, "num_layers": len(run["stage2"]["layers"]["gap"]["mean"]), **run["stage2"]}
        for arm in ARMS
        for run in results[arm.name][:1]
    ]
    draw_layers(models, path)


def draw_training(root: Path, questions: Sequence[loading.Question], path: Path) -> None:
    """Visual over text norm, and update rates, through stage 1 of each arm, first seed (Fig. 5)."""
    figure, axes = plt.subplots(
        2, len(ARMS), figsize=(3.2 * len(ARMS), 5), sharey="row", sharex=True, layout="constrained"
    )
    for column, arm in enumerate(ARMS):
        folder = arm_folder(root, arm, SEEDS[0])
        points = measure_run(folder / "stage1", questions, start=str(folder / "composed"))
        steps = [point["step"] for point in points]
        for modality, colour in COLOURS.items():
            for row, of in ((0, lambda p, m=modality: p["interface"][f"{m}_at_decoder"]),
                            (1, lambda p, m=modality: p["layers"][m]["update_rate"])):  # fmt: skip
                values = [of(point) for point in points]
                curve = {"mean": [v["mean"] for v in values], "interval": [v["interval"] for v in values]}
                draw_curve(axes[row, column], steps, curve, color=colour, label=modality)
        axes[0, column].set(title=arm.title, yscale="log")
        axes[0, column].title.set_fontsize(9)
        axes[1, column].set_xlabel("step of stage 1")
    axes[0, 0].set_ylabel("norm at the decoder")
    axes[1, 0].set_ylabel("update rate, 1 - cosine")
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=ROOT / "runs" / "ablation", help="where the runs are")
    root = parser.parse_args().run_dir.resolve()
    probe = ROOT / RUN / "data" / "probe.json"
    write_probe(load_questions(probe.parent), probe)
    questions, _ = loading.load_questions(str(probe), PROBE_SIZE)
    jobs = [(arm, seed) for arm in ARMS + OPTIMIZER_ARMS for seed in SEEDS]
    results: dict[str, list[dict[str, Any]]] = {}
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
    page = PAGE.read_text(encoding="utf-8")
    for name, text in tables.items():
        page = page.replace("{" + name + "}", text)
    (folder / "ABLATION.md").write_text(page, encoding="utf-8")
    runs = [summarize_run(run) for of_arm in results.values() for run in of_arm]
    report = {"command": "make ablation", "seeds": SEEDS, "runs": runs}
    (ROOT / "benchmarks" / "results" / "ablation.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    logger.info("%s", "\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
