"""Train every arm of the ablation on the digits, with several seeds, through the real scripts.

    make ablation

Each arm is a line of options for composing and for the two stages; everything else, including the projector's initial
weights and the order of the rows, is the same for arms of the same seed. Finished steps are skipped, and a stopped run
resumes from its last checkpoint. `ablation_report.py` writes up the results.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart import RUN, launch
from report import accuracy, answer, load_scene_questions, with_image, with_text
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging as transformers_logging

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from conversations.files import write_whole
from examples.steps import ROOT, check_order


logger = logging.getLogger(__name__)

SEEDS = (42, 1, 2)
SGD_RATES = ("0.0003", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3")
SGD = ("--optim", "sgd", "--optim_args", "momentum=0.9", "--max_grad_norm", "0")


@dataclass(frozen=True)
class Arm:
    """One line of the ablation.

    Attributes:
        name: Folder, and key in the results.
        title: Its name in tables.
        compose: Options of `training/compose.py`.
        train: Options of both stages.
        stages: How many of the two stages are run.
        script: The training script.
    """

    name: str
    title: str
    compose: tuple[str, ...]
    train: tuple[str, ...] = ()
    stages: int = 2
    script: str = "training/sft.py"


LAYERNORM, GWC = ("--projector_norm", "layernorm"), ("--projector_norm", "gwc")
ARMS = [
    Arm("none", "no norm", ("--projector_norm", "none")),
    Arm("gain1", "LayerNorm, gain 1", (*LAYERNORM, "--align_norm", "false")),
    Arm("gain1-bf16", "LayerNorm, gain 1, bfloat16 weights", (*LAYERNORM, "--align_norm", "false"),
        script="examples/digits/bf16_weights.py"),
    Arm("layernorm", "LayerNorm at T", LAYERNORM),
    Arm("gwc", "LayerNorm at T, compensated (GWC)", GWC),
]  # fmt: skip
# Where the compensation acts: stage 1 only, where all trained weights are at or before the norm.
OPTIMIZER_ARMS = [
    Arm(f"{norm}-{name}", f"{optimizer}, {norm}", options, train, stages=1)
    for name, optimizer, train in (
        ("adamw-unclipped", "AdamW, no clipping", ("--max_grad_norm", "0")),
        *((f"sgd-{rate}", f"SGD with momentum, {rate}", (*SGD, "--learning_rate", rate)) for rate in SGD_RATES),
    )
    for norm, options in (("layernorm", LAYERNORM), ("gwc", GWC))
]


def arm_folder(root: Path, arm: Arm, seed: int) -> Path:
    """Where the composed model, the stages and the evaluation of one run are."""
    return root / arm.name / f"seed{seed}"


def commands(arm: Arm, seed: int, folder: Path) -> list[tuple[Path, list[str]]]:
    """The steps to run, in order: the file that a step writes last, and its command."""
    compose = ["training/compose.py", "--vision_model", str(RUN / "vision"), "--text_model", str(RUN / "text")]
    compose += ["--vision_feature_layer", "-1", "--seed", str(seed), *arm.compose]
    steps = [(folder / "composed" / "processor_config.json", [*compose, "--output_dir", str(folder / "composed")])]
    before = "composed"
    for stage in ("stage1", "stage2")[: arm.stages]:
        train = [*launch(1), arm.script, "--config", f"training/recipes/digits/{stage}.yaml"]
        train += ["--model_name_or_path", str(folder / before), "--output_dir", str(folder / stage)]
        train += ["--seed", str(seed), "--resume_from_checkpoint", "true", *arm.train]
        if stage == "stage1":
            train += ["--save_strategy", "steps", "--save_steps", "100"]
        steps.append((folder / stage / "trainer_state.json", train))
        before = stage
    return steps


def score(model_dir: Path) -> dict[str, Any]:
    """Exact match of a model on the held-out questions about pictures and about descriptions."""
    questions = load_scene_questions(ROOT / RUN / "data")
    model = AutoModelForImageTextToText.from_pretrained(model_dir).eval()
    processor = AutoProcessor.from_pretrained(model_dir)
    scores = {
        name: accuracy(questions, answer(model, processor, [prompt(row) for row in questions], name))
        for name, prompt in (("image questions", with_image), ("text-only questions", with_text))
    }
    return {"questions": len(questions), **scores}


def evaluate(model_dir: Path, path: Path) -> None:
    """Write the result of [`score`] to a JSON file."""
    write_whole(path, json.dumps(score(model_dir), indent=1))


def run_steps(steps: Sequence[tuple[Path, list[str]]], folder: Path, measures: Iterable[str]) -> None:
    """Run commands one after the other, skipping those whose result, the file that they write last, exists.

    Args:
        steps: The result and the command of each.
        folder: Where the log goes.
        measures: Files in it that are made from the last step's result.

    Raises:
        SystemExit: if a result is missing that later ones were made from.
        subprocess.CalledProcessError: if a command fails; its output is in `log.txt`.
    """
    made = [{result.parent: result} for result, _ in steps]
    check_order(made + [{folder / name: folder / name} for name in measures])
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
    }
    for result, command in steps:
        if result.exists():
            continue
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ python {' '.join(command)}\n")
            log.flush()
            try:
                subprocess.run(
                    [sys.executable, *command], cwd=ROOT, env=environment, check=True, stdout=log, stderr=log
                )
            except subprocess.CalledProcessError:
                logger.error("Failed; see %s", folder / "log.txt")
                raise


def run_arm(arm: Arm, seed: int, root: Path) -> None:
    """Compose, train and evaluate one arm with one seed, skipping finished steps.

    Raises:
        subprocess.CalledProcessError: if a command fails; its output is in `log.txt`.
    """
    folder = arm_folder(root, arm, seed)
    measures = (["evaluation.json"] if arm.stages == 2 else []) + ["measured.json"]
    run_steps(commands(arm, seed, folder), folder, measures)
    if arm.stages == 2 and not (folder / "evaluation.json").exists():
        evaluate(folder / "stage2", folder / "evaluation.json")


def check_parts() -> None:
    """Raises `SystemExit` if the quickstart's parts are missing."""
    for part in ("vision", "text", "data"):
        if not (ROOT / RUN / part).is_dir():
            raise SystemExit(f"{ROOT / RUN / part} is missing: run `make quickstart` first, which makes it.")


def read_folder(description: str | None, option: str, name: str) -> Path:
    """Set up logging and return the folder of runs, the command line's only option (default: `runs/<name>`)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, type=Path, default=ROOT / "runs" / name, dest="folder", help="where the runs are")
    return parser.parse_args().folder.resolve()


def main() -> None:
    """Run the command line."""
    root = read_folder(__doc__, "--output_dir", "ablation")
    check_parts()
    jobs = [(arm, seed) for seed in SEEDS for arm in ARMS + OPTIMIZER_ARMS]
    for arm, seed in tqdm(jobs, desc="Ablation", unit="run"):
        started = time.monotonic()
        run_arm(arm, seed, root)
        tqdm.write(f"{arm.title}, seed {seed}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
