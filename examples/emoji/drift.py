"""Measures how long a projector that was scaled once keeps image embeddings at the norm of text embeddings.

    python -m examples.emoji.drift

The command scales the emoji example's untrained projector once, and trains it alone for 60 steps (stage 1, on captions
of drawings) at each of several constant learning rates. It writes the ratio of norms in each step into drift.csv, and
draws drift.png from it. The backbones and drawings are those that the first two steps of `examples.emoji.run` make.
"""

import argparse
import logging
import subprocess
import sys
from pathlib import Path

from normllava.command_line import command, parse

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from examples.emoji.parts import RUN
from examples.steps import ROOT
from normllava.diagnostics.plots import FAINT, save_figure, styled


logger = logging.getLogger(__name__)

WORK = RUN / "drift"
TABLE = Path(__file__).with_name("drift.csv")
FIGURE = Path(__file__).with_name("drift.png")
RATES = (1e-5, 5e-5, 2e-4, 1e-3, 3e-3)
NUM_STEPS = 60


def compose_scaled(folder: Path) -> None:
    """Compose a model whose projector is scaled once, and not aligned."""
    arguments = [
        f"--vision_model={RUN}/vision",
        f"--text_model={RUN}/text",
        "--vision_feature_layer=-1",  # the last layer, as in the example
        "--projector_norm=none",
        "--scale_projector",
        f"--output_dir={folder}",
    ]
    subprocess.run([sys.executable, "training/compose.py", *arguments], cwd=ROOT, check=True)


def train(model: Path, rate: float, output_dir: Path) -> pd.DataFrame:
    """Train the projector at a constant learning rate. Returns the ratio of norms in each step."""
    fields = {
        "model_name_or_path": model,
        "dataset_name": RUN / "pictures" / "captions.json",
        "output_dir": output_dir,
        "stage": "align",
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 16,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": "false",
        "report_to": "none",
    }
    arguments = [f"--{name}={value}" for name, value in fields.items()]
    subprocess.run([sys.executable, "training/sft.py", *arguments], cwd=ROOT, check=True)
    steps = pd.read_json(output_dir / "metrics.jsonl", lines=True).dropna(subset="loss")
    return pd.DataFrame({"rate": rate, "step": steps["step"], "ratio": steps["norm/ratio"].round(3)})


@styled
def draw(table: pd.DataFrame) -> Figure:
    """Draw the ratio of norms over steps, a curve for each learning rate."""
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    colours = plt.colormaps["viridis"]
    for number, (rate, rows) in enumerate(table.groupby("rate")):
        colour = colours(0.9 * number / (len(RATES) - 1))
        axis.plot(rows["step"], rows["ratio"], color=colour, marker="", label=f"{rate:g}")
    axis.set(yscale="log", xlabel="steps of stage 1 after scaling once", ylabel="image norm over text norm")
    axis.legend(title="learning rate", reverse=True)
    return figure


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main() -> None:
    """Train at each rate, and write the table and the figure."""
    parse(build_parser())
    model = WORK / "scaled"
    if not (model / "adapt.yaml").exists():  # the file that compose.py writes last
        compose_scaled(model)

    table = pd.concat([train(model, rate, WORK / f"rate-{rate:g}") for rate in RATES])
    table.to_csv(TABLE, index=False)
    save_figure(draw(table), FIGURE)
    ends = table[table["step"].isin([1, 10, NUM_STEPS])]
    logger.info("%s", ends.pivot(index="rate", columns="step", values="ratio").to_string())


if __name__ == "__main__":
    main()
