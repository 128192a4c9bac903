"""Evaluate trained models on the nine benchmarks of the paper (arXiv 2512.08374), by lmms-eval and lm-eval.

    normllava evaluate runs/Qwen2.5-7B-Instruct/instruct --batch_size 32 --num_processes 8

Every task is one run of its harness. A task's logs and its result go to `evaluation/<task>` in the model's folder. The
scores of all tasks go to `evaluation.json` in the model's folder, which the model card reads. A task that has a result
already is skipped. With `--limit`, `evaluation.json` stays as it is.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

from normllava.errors import UserError
from normllava.evaluation.benchmarks import PAPER, Benchmark, read_own_benchmarks
from normllava.evaluation.harness import Model, Settings, build_command, describe_run, open_model, run_harness
from normllava.evaluation.record import write_evaluations
from normllava.evaluation.results import TaskResult, read_result
from normllava.evaluation.table import render
from normllava.files import fresh_folder, write_whole


logger = logging.getLogger(__name__)

# The file in a task's folder that says which model and which settings gave the result. The file is written last, so a
# folder with this file is complete.
RESULT_FILE = "result.json"


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="normllava evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="+", help="checkpoint folders; several are compared")
    paper_tasks = ", ".join(benchmark.task for benchmark in PAPER)
    add("--tasks", nargs="+", help=f"some of {paper_tasks}, or of --include_path (default: all of these or of those)")
    add("--include_path", type=Path, help="folder with tasks of one's own, and a benchmarks.json that lists them")
    add("--limit", type=int, help="only this many rows of each task, for a quick test")
    add("--batch_size", type=int, default=8, help="rows per batch (default: 8)")
    add("--num_processes", type=int, default=1, help="processes that share the rows, one GPU each (default: 1)")
    add("--dtype", default="auto", help="dtype of the weights (default: the checkpoint's)")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        failed = evaluate(parse(build_parser(), argv))
    except PackageNotFoundError as error:  # the harness is not installed
        install = "install the extra \"evaluate\" in an environment of its own, such as pip install '.[evaluate]'"
        raise UserError(f"{error.name} missing: {install}.") from error

    if failed:
        sys.exit(
            f"Failed: {', '.join(failed)}. The results of the other tasks are kept; the same command retries those "
            "that failed."
        )


def evaluate(args: argparse.Namespace) -> list[str]:
    """Run all tasks on all models, then print the table.

    Returns:
        The tasks that failed, each as `<model>: <task>`.
    """
    benchmarks = choose_benchmarks(args.tasks, args.include_path)
    settings = Settings(
        batch_size=args.batch_size, num_processes=args.num_processes, dtype=args.dtype, limit=args.limit
    )
    folders = dict.fromkeys(args.models)  # without folders that were given twice
    models = [open_model(folder) for folder in folders]

    results: dict[str, dict[str, TaskResult]] = {model.name: {} for model in models}
    failed = []
    for model in models:
        for number, benchmark in enumerate(benchmarks, start=1):
            logger.info("\n%s: %s (%d of %d)", model.name, benchmark.task, number, len(benchmarks))
            try:
                result = run_task(benchmark, model, settings)
            except UserError as error:  # a failed task doesn't stop the others
                logger.error("%s: %s", benchmark.task, error)
                failed.append(f"{model.name}: {benchmark.task}")
                continue

            results[model.name][benchmark.task] = result
            if settings.limit is None:
                write_evaluations(model.path, [result.evaluation])

    sys.stdout.write(f"{render(benchmarks, results)}\n")
    return failed


def choose_benchmarks(tasks: Sequence[str] | None, include_path: Path | None) -> Sequence[Benchmark]:
    """The benchmarks that `--tasks` names, each once; without `--tasks`, all of `--include_path` or the paper's nine.

    Raises:
        UserError: if `--tasks` names an unknown task, or the list in `--include_path` can't be read.
    """
    own = read_own_benchmarks(include_path) if include_path is not None else ()
    if not tasks:
        return own or PAPER

    known = {benchmark.task: benchmark for benchmark in [*PAPER, *own]}
    for task in tasks:
        if task not in known:
            raise UserError(f"--tasks {task}: there are {', '.join(known)}.")
    return [known[task] for task in dict.fromkeys(tasks)]


def run_task(benchmark: Benchmark, model: Model, settings: Settings) -> TaskResult:
    """Run a task, unless its folder holds a result of this model and these settings, and return the result.

    A result of another model or of other settings stays in the folder until the new run has succeeded.

    Raises:
        UserError: if the task fails; its log is then in `<task's folder>.unfinished`.
    """
    folder_name = benchmark.task
    if settings.limit is not None:
        folder_name += f"-first-{settings.limit}"
    folder = model.path / "evaluation" / folder_name

    description = describe_run(benchmark, model, settings)
    if read_description(folder) == description:
        logger.info("%s: done already, in %s", benchmark.task, folder)
        return read_result(folder, benchmark, settings, model)

    unfinished = fresh_folder(folder.with_name(f"{folder_name}.unfinished"))
    run_harness(build_command(benchmark, model.path, settings, unfinished), unfinished)
    result = read_result(unfinished, benchmark, settings, model)
    write_whole(unfinished / RESULT_FILE, json.dumps(description) + "\n")

    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return result


def read_description(folder: Path) -> Any:
    """The description that `describe_run` made of the result in a task's folder; `None` if there is no result."""
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))
