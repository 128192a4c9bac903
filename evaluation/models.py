"""The evaluated models: their files, fingerprints, and folders for results."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from conversations.files import WEIGHT_FILES, fingerprint, hash_files
from evaluation.benchmarks import Benchmark


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
        name: Its name in tables.
        source: Its name in a command; of an absolute path only the last part.
        path: Folder of its files.
        results: Folder that `evaluation.json` and the tasks' results go to.
        fingerprint: Of the files that its answers depend on.
        weights: Of its weights alone.
    """

    name: str
    source: str
    path: Path
    results: Path
    fingerprint: str
    weights: str

    def task_folder(self, benchmark: Benchmark, limit: int | None) -> Path:
        """Where a task's result and logs are; limited runs have their own folder."""
        name = benchmark.name.replace(":", "--")
        return self.results / RESULTS_FOLDER / (name if limit is None else f"{name}-first-{limit}")

    def command(self, benchmark: Benchmark, dtype: str) -> str:
        """The command that runs a task."""
        options = "" if dtype == "auto" else f" --dtype {dtype}"
        options += "" if self.path == self.results else " --output_dir results"
        return f"python -m evaluation {self.source} --tasks {benchmark.name}{options}"


def open_model(source: str, name: str | None, revision: str | None, output_dir: Path | None) -> Model:
    """A checkpoint folder, or a repository of the Hub, which is downloaded.

    Args:
        source: Path or Hub id.
        name: Its name in tables; `source` by default.
        revision: Of a repository.
        output_dir: Where results go, in a folder with that name; the model's own folder by default.

    Raises:
        ValueError: if it is neither, has no weights or only an adapter, or has no place for its results.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a folder, which has no revisions: leave --revision out.")
        source, path = path.name if path.is_absolute() else source.rstrip("/"), path.resolve()
    elif output_dir is None:
        raise ValueError(f"{source} is not a folder. For a model on the Hub, set --output_dir for its results.")
    else:
        try:
            path = Path(snapshot_download(source, revision=revision, allow_patterns=list(MODEL_FILES)))
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
            raise ValueError(f"{source} is not a folder, and can't be downloaded from the Hub: {error}") from error
        source += "" if revision is None else f" --revision {revision}"
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{source} is an adapter. Merge it first: python training/merge.py --adapter {source} ...")
    if not any(path.glob(WEIGHT_FILES)):
        raise ValueError(f"{source} has no {WEIGHT_FILES}: give the folder of a trained model.")
    name = name or source
    results = (path if output_dir is None else output_dir / name.strip("/").replace("/", "--")).resolve()
    for place in (path, results):
        if "," in str(place) or "=" in str(place):
            raise ValueError(f"{place}: the harnesses can't read a path with a comma or an equals sign; rename it.")
    hashes = hash_files(path, *MODEL_FILES)
    weights = {file: hashes[file] for file in hashes if fnmatch(file, WEIGHT_FILES)}
    return Model(name, source, path, results, fingerprint(hashes), fingerprint(weights))
