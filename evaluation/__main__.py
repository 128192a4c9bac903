"""Evaluate trained models on the paper's nine benchmarks, or on any task of lmms-eval and lm-eval.

    python -m evaluation runs/Qwen2.5-7B-Instruct/stage2 --batch_size 32 --num_processes 8

Every task is one run of its harness. Its logs and result go to `evaluation/<task>` in the model's folder, the figures
of all to `evaluation.json`, which the model card reads. Tasks that have a result are skipped. With `--limit` only the
task's folder is written.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from datasets.config import HF_DATASETS_OFFLINE
from huggingface_hub import get_token
from huggingface_hub.constants import HF_HUB_OFFLINE

from conversations.files import fresh_folder, write_whole
from evaluation.benchmarks import OCRBENCH, OURS, PAPER, PICTURES, TEXT, Benchmark, find_benchmark
from evaluation.figures import Figure, read_figures
from evaluation.harness import LOG_FILE, MODULES, Settings, TaskError, build_command, fixed_settings, run_harness
from evaluation.models import RESULTS_FOLDER, Model, open_model
from evaluation.record import write_evaluations
from evaluation.table import render


logger = logging.getLogger(__name__)

# In a task's folder, beside what the harness wrote: of which model and settings that is. Written last.
RESULT_FILE = "result.json"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, or `argv`.

    Raises:
        ValueError: that names the option and the fix.
    """
    parser = argparse.ArgumentParser(
        prog="python -m evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="checkpoint folders or Hub ids; several are compared")
    parser.add_argument("--names", nargs="+", help="their names in tables (default: as given)")
    parser.add_argument("--revision", help="revision of models on the Hub (default: main)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tasks", nargs="+", help="instead of the nine; others as lmms-eval:<task>, lm-eval:<task>")
    which.add_argument("--images_only", action="store_true", help="only the seven with pictures")
    which.add_argument("--text_only", action="store_true", help="only HellaSwag and MMLU")
    parser.add_argument("--limit", type=int, help="only the first rows of each task, for a quick test")
    parser.add_argument("--batch_size", type=int, default=8, help="rows per batch (default: 8)")
    parser.add_argument("--num_processes", type=int, default=1, help="processes that share the rows, one GPU each")
    parser.add_argument("--dtype", default="auto", help="dtype of the weights (default: the checkpoint's)")
    parser.add_argument("--output_dir", type=Path, help="where results go, a folder for each model")
    args = parser.parse_args(argv)
    for name in ("limit", "batch_size", "num_processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    if args.names and len(args.names) != len(args.models):
        raise ValueError("--names: give each model a name.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Start this once, without a launcher: --num_processes launches the harnesses.")
    return args


def choose_benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    """The requested benchmarks, under `--limit` without OCRBench.

    Raises:
        ValueError: if a task is not known, or needs a Hub token.
    """
    chosen = list(dict.fromkeys(map(find_benchmark, args.tasks))) if args.tasks else list(PAPER)
    if args.images_only or args.text_only:
        chosen = list(PICTURES if args.images_only else TEXT)
    if args.limit is not None and OCRBENCH in chosen:
        logger.warning(
            "ocrbench is left out under --limit: its score is divided by 1000, whatever the number of rows."
        )
        chosen.remove(OCRBENCH)
    asking = [benchmark.name for benchmark in chosen if benchmark.harness == "lmms-eval" and benchmark not in OURS]
    if asking and get_token() is None and not (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE):
        raise ValueError(
            f"lmms-eval needs a Hub token even for public data ({', '.join(asking)}): hf auth login, or set HF_TOKEN."
        )
    return chosen


def read_result(folder: Path) -> dict[str, Any]:
    """Model, task and settings of the run in a task's folder; empty if there is none that finished.

    Raises:
        ValueError: if its file can't be read.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("model", "task", "settings")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error!r}): remove it to run its task again.") from error


def run_task(benchmark: Benchmark, model: Model, settings: Settings) -> None:
    """Run a task and keep what its harness wrote, unless that is there already for this model and these settings. Any
    other result is kept until there is a new one.

    Raises:
        TaskError: if the task fails; its log is then in `<folder>.unfinished`.
    """
    folder, fixed = model.task_folder(benchmark, settings.limit), fixed_settings(benchmark, settings)
    result = {"model": model.fingerprint, "task": benchmark.name, "settings": fixed}
    if read_result(folder) == result:
        logger.info("%s: done already, in %s", benchmark.name, folder)
        return
    aside = fresh_folder(folder.with_name(f"{folder.name}.unfinished"))
    run_harness(build_command(benchmark, model.path, settings, aside), aside / LOG_FILE)
    read_figures(aside, benchmark, fixed, model)
    write_whole(aside / RESULT_FILE, json.dumps(result) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def read_results(model: Model, limit: int | None = None) -> dict[str, list[Figure]]:
    """A model's figures by task, of this or earlier runs; those of other weights are left out.

    Args:
        model: Of which.
        limit: Number of first rows that were used; `None` for all.
    """
    found = {}
    for folder in sorted((model.results / RESULTS_FOLDER).glob("*/")):
        result = read_result(folder)
        if result and (result["model"], result["settings"]["limit"]) == (model.fingerprint, limit):
            found[result["task"]] = read_figures(folder, find_benchmark(result["task"]), result["settings"], model)
    return found


def record(model: Model) -> None:
    """Write a model's figures on whole tasks for the card. A harness's figures of other weights are removed."""
    rows = [figure.evaluation for figures in read_results(model).values() for figure in figures]
    write_evaluations(model.results, rows, lambda row: str(row.get("harness")).partition(" ")[0] in MODULES)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results: dict[str, dict[str, list[Figure]]] = {}
    failed = []
    try:
        args = parse_arguments(argv)
        benchmarks = choose_benchmarks(args)
        settings = Settings(args.batch_size, args.num_processes, args.dtype, args.limit)
        names = args.names or [None] * len(args.models)
        models = [open_model(*given, args.revision, args.output_dir) for given in zip(args.models, names, strict=True)]
        if len({model.name.strip("/") for model in models}) < len(models):
            raise ValueError("--names: give each model a different name.")
        for model in models:
            for number, benchmark in enumerate(benchmarks, 1):
                logger.info("\n%s: %s (%d of %d)", model.name, benchmark.name, number, len(benchmarks))
                try:
                    run_task(benchmark, model, settings)
                except TaskError as error:
                    logger.error("%s: %s", benchmark.name, error)
                    failed.append(f"{model.name}: {benchmark.name}")
                if args.limit is None:
                    record(model)
            results[model.name] = read_results(model, args.limit)
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} missing: pip install -e '.[evaluation]', in an environment of its own.")
    except (ValueError, OSError, TaskError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command continues with the missing tasks.")
    sys.stdout.write(f"{render(benchmarks, results)}\n")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The others' results are kept; the same command retries these.")


if __name__ == "__main__":
    main()
