"""Evaluate trained models on the paper's nine benchmarks, by lmms-eval and lm-eval.

    python -m evaluation runs/Qwen2.5-7B-Instruct/stage2 --batch_size 32 --num_processes 8

Every task is one run of its harness. Its logs and result go to `evaluation/<task>` in the model's folder, the figures
of all to `evaluation.json`, which the model card reads. Tasks that have a result are skipped. With `--limit` only the
task's folder is written.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError

from common.console import command, parse
from common.errors import UserError
from common.files import fresh_folder, write_whole
from evaluation.benchmarks import OURS, PAPER, Benchmark
from evaluation.figures import Figure, read_figure
from evaluation.harness import Model, Settings, TaskError, build_command, fixed_settings, open_model, run_harness
from evaluation.record import write_evaluations
from evaluation.table import render


logger = logging.getLogger(__name__)

BENCHMARKS = {benchmark.task: benchmark for benchmark in PAPER + OURS}
# In a task's folder, beside what the harness wrote: of which model and settings that is. Written last.
RESULT_FILE = "result.json"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, or `argv`."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="+", help="checkpoint folders; several are compared")
    add("--tasks", nargs="+", help=f"some of {', '.join(BENCHMARKS)} (default: the paper's nine)")
    add("--limit", type=int, help="only the first rows of each task, for a quick test")
    add("--batch_size", type=int, default=8, help="rows per batch (default: 8)")
    add("--num_processes", type=int, default=1, help="processes that share the rows, one GPU each; no other launcher")
    add("--dtype", default="auto", help="dtype of the weights (default: the checkpoint's)")
    return parse(parser, argv)


def run_task(benchmark: Benchmark, model: Model, settings: Settings) -> Figure:
    """Run a task, unless what its harness wrote is there already for this model and these settings; any other result
    is kept until there is a new one. Raises `TaskError` if it fails; its log is then in `<folder>.unfinished`."""
    name = benchmark.task if settings.limit is None else f"{benchmark.task}-first-{settings.limit}"
    folder = model.path / "evaluation" / name
    result = {"model": model.fingerprint, **fixed_settings(benchmark, settings)}
    done = folder / RESULT_FILE
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == result:
        logger.info("%s: done already, in %s", benchmark.task, folder)
        return read_figure(folder, benchmark, settings, model)
    aside = fresh_folder(folder.with_name(f"{name}.unfinished"))
    run_harness(build_command(benchmark, model.path, settings, aside), aside)
    figure = read_figure(aside, benchmark, settings, model)
    write_whole(aside / RESULT_FILE, json.dumps(result) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return figure


def evaluate(args: argparse.Namespace) -> list[str]:
    """Run all tasks on all models and print the table. Returns what failed."""
    if unknown := [task for task in args.tasks or () if task not in BENCHMARKS]:
        raise UserError(f"--tasks {unknown[0]}: there are {', '.join(BENCHMARKS)}.")
    benchmarks = [BENCHMARKS[task] for task in dict.fromkeys(args.tasks)] if args.tasks else PAPER
    settings = Settings(args.batch_size, args.num_processes, args.dtype, args.limit)
    models = [open_model(source) for source in dict.fromkeys(args.models)]
    results: dict[str, dict[str, Figure]] = {model.name: {} for model in models}
    failed = []
    for model in models:
        for number, benchmark in enumerate(benchmarks, 1):
            logger.info("\n%s: %s (%d of %d)", model.name, benchmark.task, number, len(benchmarks))
            try:
                figure = results[model.name][benchmark.task] = run_task(benchmark, model, settings)
                if settings.limit is None:
                    write_evaluations(model.path, [figure.evaluation])
            except (TaskError, LookupError, TypeError, ValueError) as error:  # those of a report in an unknown form
                logger.error("%s: %s: %s", benchmark.task, type(error).__name__, error)
                failed.append(f"{model.name}: {benchmark.task}")
    sys.stdout.write(f"{render(benchmarks, results)}\n")
    return failed


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        failed = evaluate(parse_arguments(argv))
    except PackageNotFoundError as error:
        install = "pip install -e '.[evaluation]', in an environment of its own"
        raise UserError(f"{error.name} missing: {install}.") from error
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The others' results are kept; the same command retries these.")


if __name__ == "__main__":
    main()
