"""Evaluate trained models on the paper's nine benchmarks, or on any task of lmms-eval and lm-eval.

    python -m evaluation runs/Qwen2.5-7B-Instruct/stage2 --batch_size 32 --num_processes 8

Every task is one run of its harness. Its logs and result go to `evaluation/<task>` in the model's folder, the figures
of all to `evaluation.json`, which the model card reads, and to `evaluation.md`. Tasks that have a result are skipped.
With `--limit` only the task's folder is written.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from datasets.config import HF_DATASETS_OFFLINE
from huggingface_hub import get_token
from huggingface_hub.constants import HF_HUB_OFFLINE

from conversations.files import fresh_folder, write_whole
from diagnostics.results import to_json
from evaluation.benchmarks import KNOWN, PAPER, PICTURES, TEXT, Benchmark, find_benchmark
from evaluation.harness import LOG_FILE, MODULES, Settings, TaskError, build_command, run_harness
from evaluation.models import Model, open_model
from evaluation.reports import read_outputs
from evaluation.results import RESULT_FILE, Result, fixed_settings, read_result
from evaluation.table import render


logger = logging.getLogger(__name__)

TABLE_FILE = "evaluation.md"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, or `argv`."""
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
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises `ValueError` that names the option and the fix."""
    for name in ("limit", "batch_size", "num_processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    names = [name.strip("/") for name in args.names or args.models]
    if len(names) != len(args.models) or len(set(names)) < len(names):
        raise ValueError("--names: give each model a different name.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("Start this once, without a launcher: --num_processes launches the harnesses.")


def choose_benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    """The requested benchmarks, without those that are meaningless under `--limit`."""
    chosen = list(dict.fromkeys(map(find_benchmark, args.tasks))) if args.tasks else list(PAPER)
    if args.images_only or args.text_only:
        chosen = list(PICTURES if args.images_only else TEXT)
    for benchmark in chosen:
        if args.limit is not None and benchmark.whole_only:
            logger.warning("%s is left out under --limit: %s.", benchmark.task, benchmark.whole_only)
    return [benchmark for benchmark in chosen if args.limit is None or not benchmark.whole_only]


def check_installed(benchmarks: Sequence[Benchmark]) -> None:
    """Raises `ValueError`, with the command that fixes it, if a harness is missing or torchvision can't be loaded."""
    missing = sorted({MODULES[of.harness] for of in benchmarks if not importlib.util.find_spec(MODULES[of.harness])})
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: pip install -e '.[evaluation]', in an environment of its own."
        )
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(
            f"torchvision is installed but can't be loaded ({error}): PyPI's build is for CUDA. With a CPU build of "
            "torch: pip uninstall torchvision."
        ) from error


def check_data(benchmarks: Sequence[Benchmark]) -> None:
    """Check for what would stop a task after its download, or be read instead of it.

    Raises:
        ValueError: that names the fix.
    """
    offline = HF_HUB_OFFLINE or HF_DATASETS_OFFLINE
    asking = [benchmark.name for benchmark in benchmarks if benchmark.needs_token]
    if asking and not offline and get_token() is None:
        raise ValueError(
            f"lmms-eval needs a Hub token even for public data ({', '.join(asking)}): hf auth login, or set HF_TOKEN."
        )
    for benchmark in benchmarks:
        if Path(benchmark.task).exists():
            raise ValueError(
                f"{benchmark.task} is in the working directory, and the harness would read it as the task: run this "
                "from another folder."
            )


def run_task(benchmark: Benchmark, model: Path, fingerprint: str, settings: Settings, folder: Path) -> Result:
    """Run a task and save its result. An earlier result of this model with the same settings is reused; any other is
    kept until there is a new one.

    Raises:
        TaskError: if the task fails; its log is then in `<folder>.unfinished`.
        ValueError: if an earlier result can't be read.
    """
    found = read_result(folder)
    if found is not None and (found.model, found.settings) == (fingerprint, fixed_settings(benchmark, settings)):
        logger.info("%s: done already, in %s", benchmark.name, folder)
        return found
    aside = fresh_folder(folder.with_name(f"{folder.name}.unfinished"))
    started = time.monotonic()
    run_harness(build_command(benchmark, model, settings, aside), aside / LOG_FILE)
    result = read_outputs(aside, benchmark, fingerprint, settings, time.monotonic() - started)
    write_whole(aside / RESULT_FILE, json.dumps(to_json(result)) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    return result


def evaluate(model: Model, benchmarks: Sequence[Benchmark], settings: Settings) -> tuple[dict[str, Result], list[str]]:
    """Results by task, and the failed tasks. `evaluation.json` and `evaluation.md` are updated after every task, and
    left as they are under `--limit`."""
    results: dict[str, Result] = {}
    failed: list[str] = []
    if settings.limit is None:
        record(model)  # removes results of other weights, even if all tasks fail
    for number, benchmark in enumerate(benchmarks, 1):
        logger.info("\n%s: %s (%d of %d)", model.name, benchmark.name, number, len(benchmarks))
        folder = model.task_folder(benchmark, settings.limit)
        try:
            results[benchmark.name] = run_task(benchmark, model.path, model.fingerprint, settings, folder)
        except TaskError as error:
            logger.error("%s: %s", benchmark.name, error)
            failed.append(f"{model.name}: {benchmark.name}")
            continue
        if settings.limit is None:
            record(model)
    return results, failed


def record(model: Model) -> None:
    """Write a model's results, for the card and as a table."""
    results = model.read_results()
    model.write_evaluations(results)
    if results:
        known = [find_benchmark(task) for task in results]
        order = sorted(known, key=lambda of: KNOWN.index(of) if of in KNOWN else len(KNOWN))
        write_whole(model.results / TABLE_FILE, f"{render(order, {model.name: results})}\n")
    else:
        (model.results / TABLE_FILE).unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_arguments(argv)
    try:
        check_arguments(args)
        benchmarks = choose_benchmarks(args)
        check_installed(benchmarks)
        check_data(benchmarks)
        names = args.names or [None] * len(args.models)
        models = [
            open_model(source, name, args.revision, args.output_dir)
            for source, name in zip(args.models, names, strict=True)
        ]
        if len({model.name for model in models}) < len(models):
            raise ValueError("--names: folders of the same name need different names.")
        settings = Settings(args.batch_size, args.num_processes, args.dtype, args.limit)
        results: dict[str, dict[str, Result]] = {}
        failed: list[str] = []
        for model in models:
            results[model.name], now_failed = evaluate(model, benchmarks, settings)
            failed += now_failed
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command continues with the missing tasks.")
    sys.stdout.write(f"{render(benchmarks, results)}\n")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The others' results are kept; the same command retries these.")


if __name__ == "__main__":
    main()
