"""One task of a harness for one model: the command, in a process of its own, and what it wrote.

A process of its own, since OCRBench's scorer goes on counting where the task before it stopped, lmms-eval takes the
model apart after a run, and what fails then fails alone.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from conversations.files import write_whole
from diagnostics.results import from_json, to_json
from evaluation.benchmarks import Benchmark
from evaluation.record import Evaluation
from evaluation.scores import Row, Sample, read_rows, standard_error


logger = logging.getLogger(__name__)

TASKS = Path(__file__).parent / "tasks"
RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
# `samples_<task>_<date>`, the date with dashes for colons.
LM_EVAL_SAMPLES = re.compile(r"^samples_(.*)_\d{4}-\d{2}-\d{2}T[\d.-]+$")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# What a harness writes about a run.
Report = dict[str, Any]
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
        task: The task, or the one of its group, that it is of.
        metric: The harness's name of it.
        value: As a share of 1 where the benchmark's scale is known, else what the harness gives.
        standard_error: The harness's, or that of the rows; `None` where neither is known.
        n: Rows, or questions, that it is of.
        rows: Those that it is the mean of, if it is.
    """

    task: str
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
        task: As `--tasks` calls it.
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

    def evaluations(self, command: str, choice: str) -> list[Evaluation]:
        """Rows of `evaluation.json`."""
        return [
            Evaluation(
                task=figure.task,
                dataset=self.dataset,
                split=self.split,
                metric=figure.metric,
                value=figure.value,
                n=figure.n,
                standard_error=figure.standard_error,
                command=command,
                harness=self.harness,
                choice="; ".join(filter(None, [f"{self.shots}-shot", choice])),
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
    chosen = {"metric": benchmark.metric, "scale": benchmark.scale, "in_chat": benchmark.in_chat}
    return {"harness": harness_name(benchmark), "limit": settings.limit, "dtype": settings.dtype, **chosen}


def read_result(folder: Path) -> Result | None:
    """What an earlier run left in a task's folder, if it finished.

    Raises:
        ValueError: if it can't be read.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        return from_json(Result, json.loads(path.read_text(encoding="utf-8")), path)
    except ValueError as error:
        raise ValueError(f"{path} can't be read ({error}): take it away, and its task is run again.") from error


def build_command(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
    """The harness's command line."""
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
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as file:
        token = get_token()
        if token is not None:  # lmms-eval prints one that it finds in the environment
            path = Path(folder, "token")
            path.touch(mode=0o600)
            path.write_text(token, encoding="utf-8")
            environment = {name: environment[name] for name in environment if name not in TOKEN_VARIABLES}
            environment["HF_TOKEN_PATH"] = str(path)
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
        returned = process.wait()
    if returned != 0:
        raise TaskError(f"the harness ended with {returned}; see {log}")


def read_outputs(folder: Path, benchmark: Benchmark, model: str, settings: Settings, seconds: float) -> Result:
    """What a harness wrote into a folder.

    Raises:
        TaskError: if it wrote no figure; lmms-eval ends with 0 all the same.
    """
    is_lmms = benchmark.harness == "lmms-eval"
    reports = list(folder.glob("*/[0-9]*_results.json" if is_lmms else "*/results_*.json"))
    if len(reports) != 1:
        raise TaskError(f"the harness wrote no result; see {folder / LOG_FILE}")
    try:
        report = json.loads(reports[0].read_text(encoding="utf-8"))
        samples: dict[str, list[Sample]] = {}
        for path in sorted(folder.glob("*/[0-9]*_samples_*.jsonl" if is_lmms else "*/samples_*.jsonl")):
            task = path.stem.split("_samples_", 1)[1] if is_lmms else LM_EVAL_SAMPLES.sub(r"\1", path.stem)
            samples[task] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        figures = read_all_figures(benchmark, report, samples)
        dataset, split = name_rows(report, settings)
        shots = max((count for count in report["n-shot"].values() if isinstance(count, int)), default=0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{reports[0]} is not understood ({type(error).__name__}: {error})") from error
    if not figures:
        raise TaskError(f"the harness gave no {benchmark.metric or 'figure'}; see {reports[0]}")
    return Result(
        model=model,
        settings=fixed_settings(benchmark, settings),
        task=benchmark.name,
        harness=harness_name(benchmark),
        dataset=dataset,
        split=split,
        shots=shots,
        seconds=round(seconds, 1),
        figures=figures,
    )


def read_all_figures(benchmark: Benchmark, report: Report, samples: dict[str, list[Sample]]) -> list[Figure]:
    """The figure that counts, or all of them; of a group that has none of its own, those of its tasks."""
    everything = [sample for logged in samples.values() for sample in logged]
    figures = read_figures(benchmark, benchmark.task, report, everything)
    if figures or benchmark.metric is not None:
        return figures
    return [
        figure
        for task in report["n-samples"]
        for figure in read_figures(benchmark, task, report, samples.get(task, []))
    ]


def read_figures(benchmark: Benchmark, task: str, report: Report, samples: list[Sample]) -> list[Figure]:
    """The figures of one entry of a report."""
    given = report["results"].get(task, {})
    keys = [tuple(key.split(",", 1)) for key in given if "," in key and "_stderr" not in key]
    counts = report["n-samples"]  # of tasks, not of groups
    count = sum(rows["effective"] for rows in ([counts[task]] if task in counts else counts.values()))
    figures = []
    for metric, kind in keys:
        value = given[f"{metric},{kind}"]
        if benchmark.metric not in (None, metric) or not is_number(value):
            continue
        value /= benchmark.scale or 1.0
        is_repeated = [other for other, _ in keys].count(metric) > 1
        # lmms-eval does not say which filter a row's line is of.
        known = [] if is_repeated and benchmark.harness == "lmms-eval" else samples
        rows = read_rows(benchmark, metric, value, [row for row in known if row.get("filter", kind) == kind])
        clustered, error = (given.get(f"{metric}_stderr{ending},{kind}") for ending in ("_clustered", ""))
        if is_number(clustered):  # rows of one video are no pairs of their own
            rows, error = None, clustered
        if is_number(error):
            error = error / (benchmark.scale or 1.0) or None  # 0 where all rows are alike
        else:
            error = None if rows is None else standard_error(rows)
        name = f"{metric}, {kind}" if is_repeated else metric
        figures.append(Figure(task, name, value, error, count if rows is None else len(rows), rows))
    return figures


def is_number(value: Any) -> bool:
    """Whether a report's entry is a number, which some are not."""
    return isinstance(value, int | float) and isfinite(value)


def name_rows(report: Report, settings: Settings) -> tuple[str, str]:
    """The dataset, as the Hub knows it or by its files, and the split, with what was taken of it."""
    configs = list(report["configs"].values())
    config = configs[0]
    dataset = config.get("dataset_path") or "made by the task"
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if files:
        named = files.values() if isinstance(files, dict) else files if isinstance(files, list) else [files]
        dataset = ", ".join(map(str, named))
    elif len(configs) == 1 and config.get("dataset_name"):
        dataset += f", {config['dataset_name']}"
    split = config.get("test_split") or config.get("validation_split") or "all"
    return dataset, split if settings.limit is None else f"{split}[:{settings.limit}]"


def run_task(benchmark: Benchmark, model: Path, fingerprint: str, settings: Settings, folder: Path) -> Result:
    """Run a task and keep its result. An earlier one of this model with these settings is taken as it is; any other
    stays until there is a new one.

    Raises:
        TaskError: if the task fails; its log is then in `<folder>.unfinished`.
        ValueError: if what an earlier run left can't be read.
    """
    found = read_result(folder)
    if found is not None and (found.model, found.settings) == (fingerprint, fixed_settings(benchmark, settings)):
        logger.info("%s: there already, in %s", benchmark.name, folder)
        return found
    aside = folder.with_name(f"{folder.name}.unfinished")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    started = time.monotonic()
    run_harness(build_command(benchmark, model, settings, aside), aside / LOG_FILE)
    result = read_outputs(aside, benchmark, fingerprint, settings, time.monotonic() - started)
    write_whole(aside / RESULT_FILE, json.dumps(to_json(result)) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    return result
