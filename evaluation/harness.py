"""One task of a harness for one model, in a process of its own.

Separate processes, since OCRBench's scorer goes on from the counts of the task before it, lmms-eval takes the model
apart after a run, and a failure then affects one task only.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import get_token

from conversations.files import fingerprint, hash_files
from evaluation.benchmarks import Benchmark


TASKS = Path(__file__).parent / "tasks"
LOG_FILE = "log.txt"
MODULES = {"lmms-eval": "lmms_eval", "lm-eval": "lm_eval"}
# Raise it when a change of the command or the plug-in changes answers: results of another number are not reused.
REVISION = 1


class Settings(NamedTuple):
    """How tasks are run: options of the command line."""

    batch_size: int
    num_processes: int
    dtype: str
    limit: int | None


class TaskError(RuntimeError):
    """A task gave no figure; the message says why, or where its log is."""


def fixed_settings(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """The settings that a figure depends on.

    Raises:
        importlib.metadata.PackageNotFoundError: if the harness is not installed.
    """
    fixed = {
        "harness": f"{benchmark.harness} {version(MODULES[benchmark.harness])}",
        "limit": settings.limit,
        "dtype": settings.dtype,
        "metric": benchmark.metric,
        "scale": benchmark.scale,
        "in_chat": benchmark.in_chat,
        "revision": REVISION,
    }
    if (TASKS / f"{benchmark.task}.yaml").exists():  # ours, which no harness's version covers
        fixed["task_files"] = fingerprint(hash_files(TASKS, "[!.]*"))
    return fixed


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
        command += ["--apply_chat_template"] if benchmark.in_chat else []
    command += ["--tasks", benchmark.task, "--include_path", str(TASKS), "--batch_size", str(settings.batch_size)]
    command += ["--output_path", str(output), "--log_samples"]
    return command if settings.limit is None else [*command, "--limit", str(settings.limit)]


def run_harness(command: list[str], log: Path) -> None:
    """Run a harness; its output goes to the terminal and to a file.

    Raises:
        TaskError: if it fails.
    """
    # lmms-eval prints a token that is in the environment.
    environment = {name: os.environ[name] for name in os.environ.keys() - {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}}
    # Without the working directory on the path, where a folder or an old egg-info would shadow installed packages.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.NamedTemporaryFile("w") as token_file, log.open("wb") as file:
        if (token := get_token()) is not None:
            token_file.write(token)
            token_file.flush()
            environment["HF_TOKEN_PATH"] = token_file.name
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            try:
                while piece := process.stdout.read1():  # type: ignore[attr-defined]
                    file.write(piece)
                    sys.stderr.buffer.write(piece)
                    sys.stderr.flush()
            except BaseException:
                process.terminate()
                raise
    if process.returncode != 0:
        raise TaskError(f"the harness exited with {process.returncode}; see {log}")
