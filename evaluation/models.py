"""The evaluated models: their files, fingerprints, and folders for results."""

from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download

from conversations.files import WEIGHT_FILES, fingerprint, hash_files
from evaluation.benchmarks import Benchmark


# What a model's answers depend on.
MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "*.py", "chat_template*", "tokenizer*", "vocab*",
    "merges.txt", "*_tokens*.json",
)  # fmt: skip


class Model(NamedTuple):
    """A model to evaluate.

    `name` is shown in tables, `source` in commands. The files are in `path`, `evaluation.json` and the tasks' results
    go to `results`. `fingerprint` is of all files that answers depend on, `weights` of the weights alone.
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
        return self.results / "evaluation" / (name if limit is None else f"{name}-first-{limit}")

    def command(self, benchmark: Benchmark, dtype: str) -> str:
        """The command that runs a task."""
        options = "" if dtype == "auto" else f" --dtype {dtype}"
        options += "" if self.path == self.results else " --output_dir results"
        return f"python -m evaluation {self.source} --tasks {benchmark.name}{options}"


def open_model(source: str, name: str | None, revision: str | None, output_dir: Path | None) -> Model:
    """A checkpoint folder, or a repository of the Hub, which is downloaded; arguments are the command's.

    Raises:
        ValueError: if it is neither, has no weights or only an adapter, or has no place for its results.
    """
    path = Path(source)
    if path.is_dir():
        source, path = path.name if path.is_absolute() else source.rstrip("/"), path.resolve()
    elif output_dir is None:
        raise ValueError(f"{source} is not a folder. For a model on the Hub, set --output_dir for its results.")
    else:
        path = Path(snapshot_download(source, revision=revision, allow_patterns=list(MODEL_FILES)))
        source += "" if revision is None else f" --revision {revision}"
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{source} is an adapter. Merge it first: python training/merge.py --adapter {source} ...")
    if not any(path.glob(WEIGHT_FILES)):
        raise ValueError(f"{source} has no {WEIGHT_FILES}: give the folder of a trained model.")
    name = name or source
    results = (path if output_dir is None else output_dir / name.strip("/").replace("/", "--")).resolve()
    if {",", "="} & {*str(path), *str(results)}:
        raise ValueError(f"{path}, {results}: the harnesses can't read paths with a comma or an equals sign.")
    hashes = hash_files(path, *MODEL_FILES)
    weights = {file: hashes[file] for file in hashes if fnmatch(file, WEIGHT_FILES)}
    return Model(name, source, path, results, fingerprint(hashes), fingerprint(weights))
