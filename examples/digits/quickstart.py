"""The quickstart: from nothing to a small vision-language model that answers questions about unseen handwriting.

    python examples/digits/quickstart.py

Makes data, trains two small backbones, composes them, runs both stages through `accelerate launch training/sft.py`,
and reports. Every step writes a folder below `runs/digits` and is skipped where that folder is complete.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("runs/digits")  # relative to ROOT, as in the recipes
# Processes gain more than threads on models this small.
PROCESSES = min(2, os.cpu_count() or 1)


def launch(num_processes: int) -> list[str]:
    """How training is started on the cores of this machine."""
    threads = (os.cpu_count() or 1) // num_processes
    return [
        *("-m", "accelerate.commands.launch", "--config_file", "training/accelerate/cpu_ddp.yaml"),
        *("--num_processes", str(num_processes), "--num_cpu_threads_per_process", str(threads)),
    ]


def train(stage: str) -> list[str]:
    """The command of a stage, with the rows of a step divided among the processes."""
    recipe = f"training/recipes/digits/{stage}.yaml"
    global_batch_size = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))["global_batch_size"]
    rows = ("--per_device_train_batch_size", str(global_batch_size // PROCESSES))
    return [*launch(PROCESSES), "training/sft.py", "--config", recipe, *rows]


# Title, the files that a step writes last, and the command.
STEPS: list[tuple[str, list[Path], list[str]]] = [
    (
        "Scenes of handwritten digits",
        [RUN / "data" / "held_out.json"],
        ["examples/digits/scenes.py", "--output_dir", str(RUN / "data")],
    ),
    (
        "A vision encoder and a language model",
        [RUN / "vision" / "preprocessor_config.json", RUN / "text" / "tokenizer_config.json"],
        ["examples/digits/pretrain.py", "--data_dir", str(RUN / "data"), "--output_dir", str(RUN)],
    ),
    (
        "Composing",
        [RUN / "composed" / "processor_config.json"],
        [
            *("training/compose.py", "--vision_model", str(RUN / "vision"), "--text_model", str(RUN / "text")),
            *("--vision_feature_layer", "-1", "--output_dir", str(RUN / "composed")),
        ],
    ),
    (
        "Stage 1: projector and norm, on captions",
        [RUN / "stage1" / "trainer_state.json"],
        train("stage1"),
    ),
    (
        "Stage 2: everything, on questions",
        [RUN / "stage2" / "trainer_state.json"],
        train("stage2"),
    ),
    (
        "Questions about unseen handwriting",
        [RUN / "report.json"],
        ["examples/digits/report.py", "--run_dir", str(RUN)],
    ),
]


def check_order(steps: Sequence[Mapping[Path, Path]]) -> None:
    """Check that no step is missing whose result later ones were made from.

    Args:
        steps: What each step makes, in order, with the file of it that is written last.

    Raises:
        SystemExit: that names what is missing, and what was made from it.
    """
    done = [all(path.exists() for path in results.values()) for results in steps]
    if False in done and True in done[done.index(False) :]:
        missing = done.index(False)
        stale = [path for results in steps[missing + 1 :] for path in results if path.exists()]
        lacking = [path for path, last in steps[missing].items() if not last.exists()]
        raise SystemExit(
            f"Missing or incomplete: {', '.join(map(str, lacking))}. Made from an earlier one: "
            f"{', '.join(map(str, stale))}. Remove these to make them again."
        )


def main() -> None:
    """Run the missing steps; the report is always rebuilt."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # the same minutes and the same numbers with and without a GPU
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait starve each other on a busy machine
    }
    check_order([{(ROOT / path).parent: ROOT / path for path in results} for _, results, _ in STEPS[:-1]])
    started = time.monotonic()
    for number, (title, results, command) in enumerate(STEPS, start=1):
        logger.info("\n[%d/%d] %s", number, len(STEPS), title)
        if all((ROOT / path).exists() for path in results) and number < len(STEPS):
            logger.info("      done already: %s", results[0].parent)
            continue
        step_started = time.monotonic()
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
        logger.info("      %.0f s", time.monotonic() - step_started)
    logger.info("\nfigures: %s, %s", ROOT / RUN / "norms.png", ROOT / RUN / "answers.png")
    logger.info("model:   %s; %.0f s in all", ROOT / RUN / "stage2", time.monotonic() - started)


if __name__ == "__main__":
    main()
