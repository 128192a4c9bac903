"""What the name of some rows means: files, a folder, a saved dataset, or a dataset on the Hub."""

import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import UserError


JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
# What `load_dataset` reads as a dataset, so that a JSON file beside it is something else.
DATASET_SUFFIXES = (".parquet", ".arrow", ".tar")
# The layout of a folder of pictures whose rows name their file (`imagefolder`), which `load_dataset` reads.
METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# Files that come with a saved dataset or a repository, and hold no rows.
NO_ROWS = ("dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json")
# By which a folder is known as one that `save_to_disk` wrote: a dataset of several splits, or of one.
SAVED_FILES = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Source:
    """Where some rows are.

    Attributes:
        name: What the user gave, with `~` replaced.
        kind: `"json"` for LLaVA's files, `"parquet"` for files of columns, `"saved"` for what `save_to_disk` writes,
            `"dataset"` for a folder or Hub id that `load_dataset` reads.
        files: The files of the first two kinds.
    """

    name: str
    kind: Literal["json", "parquet", "saved", "dataset"]
    files: list[Path] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether it lies on disk."""
        return bool(self.files) or Path(self.name).exists()

    @property
    def folder(self) -> str:
        """The folder that paths of pictures are relative to, unless the user names one.

        Raises:
            UserError: if its JSON files lie in several.
        """
        if not self.files:
            return os.path.abspath(self.name)
        folders = sorted({os.path.abspath(path.parent) for path in self.files})
        if self.kind == "json" and len(folders) > 1:
            raise UserError(
                f"{self.name} names files in several folders; give image_folder, the base of their pictures."
            )
        return folders[0]


def find_source(name: str) -> Source:
    """What `name` means: a file, a pattern such as `data/*.parquet`, a folder, or a Hub id.

    A folder that holds one JSON file, as LLaVA's does beside its pictures, means that file.

    Raises:
        UserError: if nothing matches a pattern, a path's file doesn't exist or is of no known kind, or a folder holds
            several JSON files: `load_dataset` would take the types of the first for all of them.
    """
    name = os.path.expanduser(name)
    if glob.has_magic(name) and not os.path.exists(name):
        matches = sorted(Path(match) for match in glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name}: no file matches.")
        return _source_of_files(name, matches)

    path = Path(name)
    if path.is_file() or path.suffix.lower() in (*JSON_SUFFIXES, ".parquet"):
        return _source_of_files(name, [path])
    if any((path / file).exists() for file in SAVED_FILES):
        return Source(name, "saved")
    if not path.is_dir():
        return Source(name, "dataset")
    return _source_of_folder(name, path)


def _source_of_files(name: str, files: list[Path]) -> Source:
    """Files of rows, all of one kind."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: there is no such file.")

    suffixes = {file.suffix.lower() for file in files}
    if suffixes <= set(JSON_SUFFIXES):
        return Source(name, "json", files)
    if suffixes == {".parquet"}:
        return Source(name, "parquet", files)
    readable = ", ".join((*JSON_SUFFIXES, ".parquet"))
    raise UserError(f"{name}: rows are read from files that end with {readable}, all of one kind.")


def _source_of_folder(name: str, folder: Path) -> Source:
    """The one JSON file in a folder, or else a dataset."""
    files = _find_json_files(folder)
    if not files:
        return Source(name, "dataset")
    if len(files) == 1 and files[0].parent == folder:
        return Source(name, "json", files)

    names = ", ".join(str(file.relative_to(folder)) for file in files[:4])
    more = " and more" if len(files) > 4 else ""
    raise UserError(
        f"{name} holds the JSON files {names}{more}: name the one with the rows, or a pattern for several, and the "
        "image_folder of their pictures."
    )


def _find_json_files(folder: Path) -> list[Path]:
    """The JSON files in a folder; none if it has a dataset, or pictures with metadata, which `load_dataset` reads."""
    json_files = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if is_hidden or file.name in NO_ROWS:
            continue
        suffix = file.suffix.lower()
        if suffix in DATASET_SUFFIXES or file.name in METADATA_FILES:
            return []
        if suffix in JSON_SUFFIXES:
            json_files.append(file)
    return json_files
