"""The harnesses: one task for one model, in a process of its own.

Separate processes, since OCRBench's scorer goes on from the counts of the task before it, lmms-eval takes the model
apart after a run, and a failure then affects one task only.
"""

import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import get_token

from common.errors import UserError
from common.files import WEIGHT_FILES, fingerprint, hash_files
from evaluation.benchmarks import OURS, Benchmark


TASKS = Path(__file__).parent / "tasks"
LOG_FILE = "log.txt"
# What a model's answers depend on.
MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "*.py",
    "chat_template*",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*_tokens*.json",
)
MODULES = {"lmms-eval": "lmms_eval", "lm-eval": "lm_eval"}
# lmms-eval and lm-eval read `pretrained=<folder>,dtype=<dtype>` from one string. They split it at commas, except
# inside quotes and brackets, and the quotes stay in the path.
SPLIT_BY_HARNESSES = ",\"'[]{}"
# Raise it when a change of the command or the plug-in changes answers: results of another number are not used again.
REVISION = 1


class Settings(NamedTuple):
    """How tasks are run: options of the command line."""

    batch_size: int
    num_processes: int
    dtype: str
    limit: int | None


class Model(NamedTuple):
    """A model to evaluate.

    Attributes:
        name: Its folder, as it was given.
        path: The same as a path.
        fingerprint: Of all files that answers depend on.
        weights: Fingerprint of the weights alone.
    """

    name: str
    path: Path
    fingerprint: str
    weights: str


def open_model(folder: str) -> Model:
    """The model in a checkpoint folder.

    Raises:
        UserError: if it holds no weights, or the harnesses would not read its path as it is.
    """
    for character in SPLIT_BY_HARNESSES:
        if character in folder:
            raise UserError(
                f"{folder}: lmms-eval and lm-eval can't take a path with {character} in it: rename the folder, or "
                "give the path of a link to it."
            )

    path = Path(folder)
    hashes = hash_files(path, *MODEL_FILES)
    weights = {name: hashes[name] for name in hashes if fnmatch(name, WEIGHT_FILES)}
    if not weights:
        raise UserError(
            f"{folder}: no folder with {WEIGHT_FILES}. Give that of a trained model, an adapter's after merging; one "
            "on the Hub is downloaded by: hf download <id> --local-dir <folder>"
        )
    return Model(folder.rstrip("/"), path, fingerprint(hashes), fingerprint(weights))


def harness_version(benchmark: Benchmark) -> str:
    """Name and version of a task's harness.

    Raises:
        importlib.metadata.PackageNotFoundError: if it is not installed.
    """
    return f"{benchmark.harness} {version(MODULES[benchmark.harness])}"


def describe_run(benchmark: Benchmark, model: Model, settings: Settings) -> dict[str, Any]:
    """What a score depends on: a result is used again while all of it is the same.

    Raises:
        importlib.metadata.PackageNotFoundError: if the harness is not installed.
    """
    # No harness's version covers our own tasks.
    task_files = fingerprint(hash_files(TASKS, "[!.]*")) if benchmark in OURS else False
    return {
        "model": model.fingerprint,
        "harness": harness_version(benchmark),
        "task_files": task_files,
        "limit": settings.limit,
        "dtype": settings.dtype,
        "revision": REVISION,
    }


def build_command(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
    """The harness's command line."""
    command = [sys.executable, "-m"]
    if settings.num_processes > 1:
        # Not `accelerate launch`, which fails with timm but without torchvision.
        command += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(settings.num_processes), "-m"]

    model_args = f"pretrained={model},dtype={settings.dtype}"
    if benchmark.harness == "lmms-eval":
        command += ["evaluation.lmms_eval_model", "--model", "image_text_to_text", "--model_args", model_args]
    else:
        model_args += ",trust_remote_code=True"
        command += ["lm_eval", "run", "--model", "hf-multimodal", "--model_args", model_args]
        # Whatever the checkpoint's generation config says; the plug-in of lmms-eval does the same.
        command += ["--gen_kwargs", "num_beams=1", "repetition_penalty=1.0", "no_repeat_ngram_size=0"]
        if benchmark in OURS:
            command.append("--apply_chat_template")

    command += ["--tasks", benchmark.task, "--include_path", str(TASKS), "--batch_size", str(settings.batch_size)]
    command += ["--output_path", str(output), "--log_samples"]
    if settings.limit is not None:
        command += ["--limit", str(settings.limit)]
    return command


def run_harness(command: list[str], folder: Path) -> None:
    """Run a harness; its output goes to the terminal and to `LOG_FILE` in a folder.

    Raises:
        UserError: if it fails; the message names the log.
    """
    # lmms-eval prints a token that is in the environment.
    environment = {name: os.environ[name] for name in os.environ.keys() - {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}}
    # Without the working directory on the path, where a folder or an old egg-info would shadow installed packages.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}

    with tempfile.NamedTemporaryFile("w") as token_file, (folder / LOG_FILE).open("wb") as log:
        token = get_token()
        if token is not None:
            token_file.write(token)
            token_file.flush()
            environment["HF_TOKEN_PATH"] = token_file.name

        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            while piece := process.stdout.read1():  # type: ignore[attr-defined]
                log.write(piece)
                sys.stderr.buffer.write(piece)
                sys.stderr.flush()

    if process.returncode != 0:
        raise UserError(f"the harness exited with {process.returncode}; see {folder / LOG_FILE}")
