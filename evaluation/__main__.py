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
from evaluation.benchmarks import OCRBENCH, OURS, PAPER, Benchmark, find_benchmark
from evaluation.figures import Figure, read_figures
from evaluation.harness import LOG_FILE, MODULES, Settings, TaskError, build_command, fixed_settings, run_harness
from evaluation.models import Model, open_model
from evaluation.record import write_evaluations
from evaluation.table import render


logger = logging.getLogger(__name__)

# In a task's folder, beside what the harness wrote: of which model and settings that is. Written last.
RESULT_FILE = "result.json"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, or `argv`. Raises `ValueError` that names the option and the fix."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="checkpoint folders or Hub ids; several are compared")
    parser.add_argument("--names", nargs="+", help="their names in tables (default: as given)")
    parser.add_argument("--revision", help="revision of models on the Hub (default: main)")
    parser.add_argument("--tasks", nargs="+", help="instead of the nine; others as lmms-eval:<task>, lm-eval:<task>")
    parser.add_argument("--limit", type=int, help="only the first rows of each task, for a quick test")
    parser.add_argument("--batch_size", type=int, default=8, help="rows per batch (default: 8)")
    parser.add_argument("--num_processes", type=int, default=1, help="processes that share the rows, one GPU each")
    parser.add_argument("--dtype", default="auto", help="dtype of the weights (default: the checkpoint's)")
    parser.add_argument("--output_dir", type=Path, help="where results go, a folder for each model")
    args = parser.parse_args(argv)
    if args.names and len(args.names) != len(args.models):
        raise ValueError("--names: give each model a name.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Start this once, without a launcher: --num_processes launches the harnesses.")
    return args


def choose_benchmarks(tasks: Sequence[str] | None, limit: int | None) -> list[Benchmark]:
    """The requested benchmarks, or all nine. Raises `ValueError` if a task is not known, or needs a Hub token."""
    chosen = list(dict.fromkeys(map(find_benchmark, tasks))) if tasks else list(PAPER)
    if limit is not None and OCRBENCH in chosen:
        logger.warning("ocrbench is left out under --limit: its score is divided by 1000, whatever the number of rows")
        chosen.remove(OCRBENCH)
    asking = [benchmark.name for benchmark in chosen if benchmark.harness == "lmms-eval" and benchmark not in OURS]
    if asking and get_token() is None and not (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE):
        raise ValueError(
            f"lmms-eval needs a Hub token even for public data ({', '.join(asking)}): hf auth login, or set HF_TOKEN."
        )
    return chosen


def run_task(benchmark: Benchmark, model: Model, settings: Settings) -> list[Figure]:
    """Run a task and keep what its harness wrote, unless that is there already for this model and these settings. Any
    other result is kept until there is a new one.

    Raises:
        TaskError: if the task fails; its log is then in `<folder>.unfinished`.
    """
    folder, fixed = model.task_folder(benchmark, settings.limit), fixed_settings(benchmark, settings)
    result = {"model": model.fingerprint, "task": benchmark.name, "settings": fixed}
    done = folder / RESULT_FILE
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == result:
        logger.info("%s: done already, in %s", benchmark.name, folder)
        return read_figures(folder, benchmark, fixed, model)
    aside = fresh_folder(folder.with_name(f"{folder.name}.unfinished"))
    run_harness(build_command(benchmark, model.path, settings, aside), aside / LOG_FILE)
    figures = read_figures(aside, benchmark, fixed, model)
    write_whole(aside / RESULT_FILE, json.dumps(result) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    return figures


def record(benchmark: Benchmark, model: Model, figures: Sequence[Figure]) -> None:
    """Write figures on a whole task for the card. A harness's earlier ones of it, or of other weights, are removed."""

    def is_replaced(row: dict[str, Any]) -> bool:
        is_harness = str(row.get("harness")).partition(" ")[0] in MODULES
        is_same_task = f"--tasks {benchmark.name} " in f"{row.get('command')} "
        return is_harness and (is_same_task or row.get("weights") != model.weights)

    write_evaluations(model.results, [figure.evaluation for figure in figures], is_replaced)


def evaluate(args: argparse.Namespace) -> list[str]:
    """Run all tasks on all models and print the table. Returns what failed."""
    benchmarks = choose_benchmarks(args.tasks, args.limit)
    settings = Settings(args.batch_size, args.num_processes, args.dtype, args.limit)
    names = args.names or [None] * len(args.models)
    models = [open_model(*given, args.revision, args.output_dir) for given in zip(args.models, names, strict=True)]
    results: dict[str, dict[str, list[Figure]]] = {model.name: {} for model in models}
    if len(results) < len(models):
        raise ValueError("--names: give each model a different name.")
    failed = []
    for model in models:
        for number, benchmark in enumerate(benchmarks, 1):
            logger.info("\n%s: %s (%d of %d)", model.name, benchmark.name, number, len(benchmarks))
            try:
                figures = results[model.name][benchmark.name] = run_task(benchmark, model, settings)
                if settings.limit is None:
                    record(benchmark, model, figures)
            except (TaskError, LookupError, TypeError, ValueError) as error:  # those of a report in an unknown form
                logger.error("%s: %s: %s", benchmark.name, type(error).__name__, error)
                failed.append(f"{model.name}: {benchmark.name}")
    sys.stdout.write(f"{render(benchmarks, results)}\n")
    return failed


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        failed = evaluate(parse_arguments(argv))
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} missing: pip install -e '.[evaluation]', in an environment of its own.")
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command continues with the missing tasks.")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The others' results are kept; the same command retries these.")


if __name__ == "__main__":
    main()
