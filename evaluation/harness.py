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
    "*.safetensors", "*.safetensors.index.json", "*config.json", "*.py", "chat_template*", "tokenizer*", "vocab*",
    "merges.txt", "*_tokens*.json",
)  # fmt: skip
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
    """A model to evaluate: its folder, by the name that it was given and as a path.

    `fingerprint` is of all files that answers depend on, `weights` of the weights alone.
    """

    name: str
    path: Path
    fingerprint: str
    weights: str


class TaskError(UserError):
    """A task gave no figure; the message says why, or where its log is."""


def open_model(folder: str) -> Model:
    """The model in a checkpoint folder.

    Raises:
        UserError: if it holds no weights, or the harnesses would not read its path as it is.
    """
    path = Path(folder)
    for character in SPLIT_BY_HARNESSES:
        if character in folder:
            raise UserError(
                f"{folder}: lmms-eval and lm-eval can't take a path with {character} in it: rename the folder, or "
                "give the path of a link to it."
            )
    hashes = hash_files(path, *MODEL_FILES)
    weights = {name: hashes[name] for name in hashes if fnmatch(name, WEIGHT_FILES)}
    if not weights:
        raise UserError(
            f"{folder}: no folder with {WEIGHT_FILES}. Give that of a trained model, an adapter's after merging; one "
            "on the Hub is downloaded by: hf download <id> --local-dir <folder>"
        )
    return Model(folder.rstrip("/"), path, fingerprint(hashes), fingerprint(weights))


def fixed_settings(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """What a figure of a model depends on. Raises `importlib.metadata.PackageNotFoundError` without the harness."""
    return {
        "harness": f"{benchmark.harness} {version(MODULES[benchmark.harness])}",
        "task_files": benchmark in OURS and fingerprint(hash_files(TASKS, "[!.]*")),  # no harness's version covers
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
    arguments = f"pretrained={model},dtype={settings.dtype}"
    if benchmark.harness == "lmms-eval":
        command += ["evaluation.lmms_eval_model", "--model", "image_text_to_text", "--model_args", arguments]
    else:
        arguments += ",trust_remote_code=True"
        command += ["lm_eval", "run", "--model", "hf-multimodal", "--model_args", arguments]
        # Whatever the checkpoint's generation config says; the plug-in of lmms-eval does the same.
        command += ["--gen_kwargs", "num_beams=1", "repetition_penalty=1.0", "no_repeat_ngram_size=0"]
        command += ["--apply_chat_template"] if benchmark in OURS else []
    command += ["--tasks", benchmark.task, "--include_path", str(TASKS), "--batch_size", str(settings.batch_size)]
    command += ["--output_path", str(output), "--log_samples"]
    return command if settings.limit is None else [*command, "--limit", str(settings.limit)]


def run_harness(command: list[str], folder: Path) -> None:
    """Run a harness; its output goes to the terminal and to `LOG_FILE`. Raises `TaskError` if it fails."""
    # lmms-eval prints a token that is in the environment.
    environment = {name: os.environ[name] for name in os.environ.keys() - {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}}
    # Without the working directory on the path, where a folder or an old egg-info would shadow installed packages.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.NamedTemporaryFile("w") as token_file, (folder / LOG_FILE).open("wb") as log:
        if (token := get_token()) is not None:
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
        raise TaskError(f"the harness exited with {process.returncode}; see {folder / LOG_FILE}")
