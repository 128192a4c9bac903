"""The models that are evaluated: where their files lie, what they are told apart by, and where their results go."""

import hashlib
from dataclasses import dataclass
from math import inf
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from evaluation.harness import Result, read_result
from evaluation.record import write_evaluations


# What a model's answers depend on.
MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "*.py", "chat_template*", "tokenizer*", "vocab*",
    "merges.txt", "*_tokens*.json",
)  # fmt: skip
RESULTS_FOLDER = "evaluation"


@dataclass(frozen=True)
class Model:
    """A model to evaluate.

    Attributes:
        name: What tables call it.
        source: What a command calls it: no more of a path on this machine than its end.
        path: Folder of its files.
        results: Folder that `evaluation.json` and the tasks' results go to.
        fingerprint: Of the files that its answers depend on.
    """

    name: str
    source: str
    path: Path
    results: Path
    fingerprint: str

    def task_folder(self, task: str, limit: int | None) -> Path:
        """Where a task's result and logs are; part of its rows is kept apart from the whole."""
        name = task if limit is None else f"{task}-first-{limit}"
        return self.results / RESULTS_FOLDER / name.replace("/", "--")

    def write_evaluations(self) -> None:
        """Write `evaluation.json`: of each task that this model was asked, the result of the most rows."""
        best: dict[str, Result] = {}
        for folder in sorted((self.results / RESULTS_FOLDER).iterdir()):
            result = read_result(folder)
            if result is not None and result.model == self.fingerprint:
                best[result.task] = max(result, best.get(result.task, result), key=num_rows)
        rows = []
        for result in best.values():
            limit = "" if result.settings["limit"] is None else f" --limit {result.settings['limit']}"
            rows += result.evaluations(f"python -m evaluation {self.source} --tasks {result.task}{limit}")
        write_evaluations(self.results, rows)


def num_rows(result: Result) -> float:
    """How many rows a result is of at most."""
    limit = result.settings["limit"]
    return inf if limit is None else limit


def open_model(source: str, name: str, revision: str | None, output_dir: Path | None) -> Model:
    """A checkpoint folder, or a repository of the Hub, which is downloaded.

    Raises:
        ValueError: if it is neither, holds no weights or an adapter alone, or has no place for its results.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a folder, which has no revisions: leave --revision out.")
        source, path = path.name if path.is_absolute() else source, path.resolve()
    elif output_dir is None:
        raise ValueError(
            f"{source} is no folder here. For a model of the Hub, say where its results go: --output_dir."
        )
    else:
        try:
            path = Path(snapshot_download(source, revision=revision, allow_patterns=list(MODEL_FILES)))
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
            raise ValueError(f"{source} is no folder here, and can't be had from the Hub: {error}") from error
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{source} holds an adapter. Merge it first: python training/merge.py --adapter {source} ...")
    files = sorted({file for pattern in MODEL_FILES for file in path.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{source} holds no *.safetensors: give the folder of a trained model.")
    results = path if output_dir is None else output_dir / name.strip("/").replace("/", "--")
    return Model(name, source, path, results.resolve(), fingerprint(files))


def fingerprint(files: list[Path]) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
