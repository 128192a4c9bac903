"""Run a harness for one task and one model, in a process of its own.

In a process that all tasks share, one failure would end all tasks. Also, OCRBench's scorer would add to the counts of
an earlier model, and lmms-eval takes the model apart after the first task.
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

from normllava.errors import UserError
from normllava.evaluation.benchmarks import Benchmark
from normllava.files import WEIGHT_FILES, fingerprint, hash_files


LOG_FILE = "log.txt"
# The files in a model's folder that the model's answers depend on.
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
# The Python module of each harness. The harness's version is looked up by the module's name.
MODULES = {"lmms-eval": "lmms_eval", "lm-eval": "lm_eval"}

# Characters that a model's path must not contain. lmms-eval and lm-eval read the folder from the string
# `pretrained=<folder>,dtype=<dtype>`. They split this string at commas, but not within quotes and brackets, and they
# take quotes as part of the path.
REFUSED_CHARACTERS = ",\"'[]{}"

# Raise this number when a change of `build_command` or of lmms_eval_model.py changes answers. Results that were
# recorded with another number are then measured again.
REVISION = 2


class Settings(NamedTuple):
    """How tasks are run. The fields are options of the command line."""

    batch_size: int
    num_processes: int
    dtype: str
    limit: int | None


class Model(NamedTuple):
    """A model to evaluate.

    Attributes:
        name: The model's folder, as the user gave it, without a slash at the end.
        path: The model's folder.
        fingerprint: Fingerprint of all files that the model's answers depend on.
        weights: Fingerprint of the weight files alone.
    """

    name: str
    path: Path
    fingerprint: str
    weights: str


def open_model(folder: str) -> Model:
    """The model in a checkpoint folder.

    Raises:
        UserError: if the folder holds no weights, or its path holds a character that harnesses misread.
    """
    for character in REFUSED_CHARACTERS:
        if character in folder:
            raise UserError(
                f"{folder}: lmms-eval and lm-eval can't take a path with {character} in it: rename the folder, or "
                "give the path of a link to it."
            )

    path = Path(folder)
    hashes = hash_files(path, *MODEL_FILES)
    weight_hashes = {name: hashes[name] for name in hashes if fnmatch(name, WEIGHT_FILES)}
    if not weight_hashes:
        raise UserError(
            f"{folder}: no folder with {WEIGHT_FILES}. Give the folder of a trained model. Merge an adapter first; "
            "download a model on the Hub by: hf download <id> --local-dir <folder>"
        )
    return Model(
        name=folder.rstrip("/"), path=path, fingerprint=fingerprint(hashes), weights=fingerprint(weight_hashes)
    )


def harness_version(benchmark: Benchmark) -> str:
    """Name and version of a task's harness.

    Raises:
        importlib.metadata.PackageNotFoundError: if the harness is not installed.
    """
    return f"{benchmark.harness} {version(MODULES[benchmark.harness])}"


def describe_run(benchmark: Benchmark, model: Model, settings: Settings) -> dict[str, Any]:
    """All that a score depends on, but the batch size. An earlier result with the same description is used again.

    Raises:
        importlib.metadata.PackageNotFoundError: if the harness is not installed.
    """
    # One's own task files can change at any time. The harness's tasks change only with its version.
    task_files: str | bool = False  # the benchmark has none here
    if benchmark.include_path is not None:
        task_files = fingerprint(hash_files(benchmark.include_path, "[!.]*"))  # all but hidden files

    return {
        "model": model.fingerprint,
        "harness": harness_version(benchmark),
        "task_files": task_files,
        "limit": settings.limit,
        "dtype": settings.dtype,
        "revision": REVISION,
    }


def build_command(benchmark: Benchmark, model_folder: Path, settings: Settings, output: Path) -> list[str]:
    """The command that runs a benchmark's harness."""
    command = [sys.executable, "-m"]
    if settings.num_processes > 1:
        # torchrun instead of `accelerate launch`, which fails where timm is installed and torchvision is not.
        command += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(settings.num_processes), "-m"]

    model_args = f"pretrained={model_folder},dtype={settings.dtype}"
    if benchmark.harness == "lmms-eval":
        command += ["lmms_eval", "--model", "image_text_to_text", "--model_args", model_args]
    else:
        model_args += ",trust_remote_code=True"
        command += ["lm_eval", "run", "--model", "hf-multimodal", "--model_args", model_args]
        # Override the checkpoint's generation config, as our lmms-eval plug-in does.
        command += ["--gen_kwargs", "num_beams=1", "repetition_penalty=1.0", "no_repeat_ngram_size=0"]
        if benchmark.include_path is not None:
            command.append("--apply_chat_template")

    command += ["--tasks", benchmark.task, "--batch_size", str(settings.batch_size)]
    if benchmark.include_path is not None:
        command += ["--include_path", str(benchmark.include_path)]
    command += ["--output_path", str(output), "--log_samples"]
    if settings.limit is not None:
        command += ["--limit", str(settings.limit)]
    return command


def run_harness(command: list[str], folder: Path) -> None:
    """Run a harness. Its output goes to the terminal, and to `log.txt` in the folder.

    Raises:
        UserError: if the harness fails; the message names the log.
    """
    environment = dict(os.environ)
    # Keep the working directory off Python's path: a folder or an old egg-info there would shadow installed packages.
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"  # so that output arrives as soon as it is printed
    # lmms-eval prints the user's Hub token if it is in the environment, so the token goes to the harness in a file.
    environment.pop("HF_TOKEN", None)
    environment.pop("HUGGING_FACE_HUB_TOKEN", None)

    with tempfile.NamedTemporaryFile("w") as token_file, (folder / LOG_FILE).open("wb") as log:
        token = get_token()
        if token is not None:
            token_file.write(token)
            token_file.flush()
            environment["HF_TOKEN_PATH"] = token_file.name

        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            # `read1` returns the output that is there, without waiting for more. So the terminal shows progress bars
            # as they move.
            while output := process.stdout.read1():  # type: ignore[attr-defined]
                log.write(output)
                sys.stderr.buffer.write(output)
                sys.stderr.flush()

    if process.returncode != 0:
        raise UserError(f"the harness exited with {process.returncode}; see {folder / LOG_FILE}")
