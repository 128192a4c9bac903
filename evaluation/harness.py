"""One task of a harness for one model: the command, in a process of its own, and what it wrote.

A process of its own, since OCRBench's scorer goes on counting where the task before it stopped, lmms-eval takes the
model apart after a run, and what fails then fails alone.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from conversations.files import write_whole
from diagnostics.results import from_json, to_json
from evaluation.benchmarks import Benchmark
from evaluation.record import Evaluation
from evaluation.scores import Row, Sample, estimate, read_rows


logger = logging.getLogger(__name__)

TASKS = Path(__file__).parent / "tasks"
RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
MODULES = {"lmms-eval": "lmms_eval", "lm-eval": "lm_eval"}


@dataclass(frozen=True)
class Settings:
    """How tasks are run.

    Attributes:
        batch_size: Rows of a batch.
        num_processes: Processes that share the rows, a device each.
        dtype: Of the weights, as `from_pretrained` takes it.
        limit: Take the first rows alone.
    """

    batch_size: int
    num_processes: int
    dtype: str
    limit: int | None


@dataclass(frozen=True)
class Figure:
    """One figure of a task.

    Attributes:
        metric: The harness's name of it.
        value: As a share of 1, where the benchmark's scale is known.
        standard_error: The harness's, or that of the rows; `None` where neither is known.
        n: Rows, or questions, that it is of.
        rows: Those that it is the mean of, if it is.
    """

    metric: str
    value: float
    standard_error: float | None
    n: int
    rows: list[Row] | None


@dataclass(frozen=True)
class Result:
    """What a harness said of a model on one task.

    Attributes:
        model: Fingerprint of the model.
        settings: Those that figures depend on.
        harness: Its name and version.
        dataset, split: Of the rows.
        shots: Examples before each question.
        seconds: That the harness took, loading included.
        figures: One or more.
    """

    model: str
    settings: dict[str, Any]
    task: str
    harness: str
    dataset: str
    split: str
    shots: int
    seconds: float
    figures: list[Figure]

    def evaluations(self, command: str) -> list[Evaluation]:
        """Rows of `evaluation.json`."""
        return [
            Evaluation(
                task=self.task,
                dataset=self.dataset,
                split=self.split,
                metric=figure.metric,
                value=figure.value,
                n=figure.n,
                standard_error=figure.standard_error,
                command=command,
                harness=self.harness,
            )
            for figure in self.figures
        ]


class TaskError(RuntimeError):
    """A task that gave no figure; the message says why, or where its log is."""


def harness_name(benchmark: Benchmark) -> str:
    """The harness with its version."""
    return f"{benchmark.harness} {version(MODULES[benchmark.harness])}"


def fixed_settings(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """What a figure depends on beside the model."""
    return {"harness": harness_name(benchmark), "limit": settings.limit, "dtype": settings.dtype}


def read_result(folder: Path) -> Result | None:
    """What an earlier run left in a task's folder, if it finished."""
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    return from_json(Result, json.loads(path.read_text(encoding="utf-8")), path)


def build_command(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
    """The harness's command line.

    Raises:
        ValueError: if a path can't be handed to the harnesses, which split their arguments at commas.
    """
    for path in (model, output):
        if "," in str(path) or "=" in str(path):
            raise ValueError(f"{path}: the harnesses read no path with a comma or an equals sign; rename it.")
    launcher = [sys.executable, "-m"]
    if settings.num_processes > 1:
        # Not `accelerate launch`, which fails beside timm without torchvision.
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(settings.num_processes), "-m"]
    arguments = f"pretrained={model},dtype={settings.dtype}"
    if benchmark.harness == "lmms-eval":
        command = [*launcher, "lmms_eval", "--model", "image_text_to_text", "--model_args", arguments]
    else:
        arguments += ",trust_remote_code=True"
        command = [*launcher, "lm_eval", "run", "--model", "hf-multimodal", "--model_args", arguments]
        command += ["--apply_chat_template"] if benchmark.in_chat else []
    command += ["--tasks", benchmark.task, "--include_path", str(TASKS), "--batch_size", str(settings.batch_size)]
    command += ["--output_path", str(output), "--log_samples"]
    return command if settings.limit is None else [*command, "--limit", str(settings.limit)]


def run_harness(command: list[str], log: Path) -> None:
    """Run a harness, its output at the terminal and in a file.

    Raises:
        TaskError: if it fails.
    """
    # Without the working directory on the path, where a folder or an old egg-info would hide what is installed.
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        try:
            while piece := os.read(process.stdout.fileno(), 65536):
                file.write(piece)
                sys.stderr.buffer.write(piece)
                sys.stderr.flush()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.wait() != 0:
        raise TaskError(f"the harness ended with {process.returncode}; see {log}")


def read_outputs(folder: Path, benchmark: Benchmark, model: str, settings: Settings, seconds: float) -> Result:
    """What a harness wrote into a folder.

    Raises:
        TaskError: if it wrote no figure; lmms-eval ends with 0 all the same.
    """
    is_lmms = benchmark.harness == "lmms-eval"
    reports = list(folder.glob("*/[0-9]*_results.json" if is_lmms else "*/results_*.json"))
    if len(reports) != 1:
        raise TaskError(f"the harness wrote no result; see {folder / LOG_FILE}")
    report = json.loads(reports[0].read_text(encoding="utf-8"))
    samples: list[Sample] = []
    for path in sorted(folder.glob("*/[0-9]*_samples_*.jsonl" if is_lmms else "*/samples_*.jsonl")):
        samples += [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    figures = read_figures(benchmark, report, samples)
    if not figures:
        raise TaskError(f"the harness gave no {benchmark.metric or 'figure'}; see {reports[0]}")
    dataset, split = name_rows(report, settings)
    shots = max((count for count in report["n-shot"].values() if isinstance(count, int)), default=0)
    return Result(
        model=model,
        settings=fixed_settings(benchmark, settings),
        task=benchmark.task,
        harness=harness_name(benchmark),
        dataset=dataset,
        split=split,
        shots=shots,
        seconds=round(seconds, 1),
        figures=figures,
    )


def read_figures(benchmark: Benchmark, report: dict[str, Any], samples: list[Sample]) -> list[Figure]:
    """The figure that counts, or all that a task gives."""
    given = report["results"].get(benchmark.task, {})
    keys = [key.split(",", 1) for key in given if "," in key and "_stderr" not in key]
    repeated = {metric for metric, _ in keys if [other for other, _ in keys].count(metric) > 1}
    figures = []
    for metric, kind in keys:
        value = given[f"{metric},{kind}"]
        if benchmark.metric not in (None, metric) or not isinstance(value, int | float) or not isfinite(value):
            continue
        chosen = [sample for sample in samples if sample.get("filter", kind) == kind]
        rows = read_rows(benchmark.task, metric, value / benchmark.scale, chosen)
        error = given.get(f"{metric}_stderr,{kind}")
        if isinstance(error, int | float):
            error = error / benchmark.scale
        else:
            error = None if rows is None else estimate(rows)[1]
        figures.append(
            Figure(
                metric=f"{metric}, {kind}" if metric in repeated else metric,
                value=value / benchmark.scale,
                standard_error=error,
                n=len(chosen) if rows is None else len(rows),
                rows=rows,
            )
        )
    return figures


def name_rows(report: dict[str, Any], settings: Settings) -> tuple[str, str]:
    """The dataset, as the Hub knows it or by its files, and the split, with what was taken of it."""
    configs = list(report["configs"].values())
    config = configs[0]
    dataset, files = config["dataset_path"], (config.get("dataset_kwargs") or {}).get("data_files")
    if files:
        dataset = files if isinstance(files, str) else ", ".join(map(str, files.values()))
    elif len(configs) == 1 and config.get("dataset_name"):
        dataset += f", {config['dataset_name']}"
    split = config.get("test_split") or config.get("validation_split") or config.get("training_split")
    return dataset, split if settings.limit is None else f"{split}[:{settings.limit}]"


def run_task(benchmark: Benchmark, model: Path, fingerprint: str, settings: Settings, folder: Path) -> Result:
    """Run a task and keep its result; an earlier one of this model with these settings is taken as it is.

    Raises:
        TaskError: if the task fails.
        ValueError: if what an earlier run left can't be read.
    """
    found = read_result(folder)
    if found is not None and (found.model, found.settings) == (fingerprint, fixed_settings(benchmark, settings)):
        logger.info("%s: there already, in %s", benchmark.task, folder)
        return found
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    command = build_command(benchmark, model, settings, folder)
    started = time.monotonic()
    run_harness(command, folder / LOG_FILE)
    result = read_outputs(folder, benchmark, fingerprint, settings, time.monotonic() - started)
    write_whole(folder / RESULT_FILE, json.dumps(to_json(result)) + "\n")
    return result
