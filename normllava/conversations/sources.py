"""Finds out what the user's name for a dataset means: files, a folder, a saved dataset, or a dataset on the Hub."""

import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from normllava.errors import UserError


JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
# Suffixes of files of rows that a user can name.
ROW_FILE_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
# Suffixes of files that `load_dataset` reads. In a folder with such files, JSON files hold no rows.
DATASET_SUFFIXES = (".parquet", ".arrow", ".tar")
# Files that describe the pictures of their folder. `load_dataset` reads these files together with the pictures (as an
# `imagefolder`). In a folder with such a file, other JSON files hold no rows.
METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# JSON files that come with a saved dataset or a repository, and hold no rows.
FILES_WITHOUT_ROWS = ("dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json")
# `save_to_disk` writes dataset_dict.json for a dataset with splits, and state.json for a dataset without splits.
SAVED_FILES = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Source:
    """Where the rows of a dataset are.

    Attributes:
        name: The name that the user gave, with `~` replaced by the home folder.
        kind: `"json"` for JSON files, `"parquet"` for parquet files, `"saved"` for a folder that `save_to_disk` wrote,
            `"dataset"` for a folder or Hub id that `load_dataset` reads.
        files: The JSON or parquet files; empty for the other kinds.
    """

    name: str
    kind: Literal["json", "parquet", "saved", "dataset"]
    files: list[Path] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether the rows lie on this machine's disk."""
        return bool(self.files) or Path(self.name).exists()

    @property
    def folder(self) -> str:
        """The folder that paths of pictures are relative to, unless the user names another.

        For parquet files in several folders, this is the first of the folders.

        Raises:
            UserError: if there are JSON files in several folders.
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

    A folder with one JSON file beside its pictures, such as LLaVA's, means this file.

    Raises:
        UserError: if no file matches a pattern, a file doesn't exist or is of no known kind, or a folder holds several
            JSON files, whose fields may differ in type.
    """
    name = os.path.expanduser(name)
    # The name of an existing file or folder can contain a pattern's characters too, such as "[".
    if glob.has_magic(name) and not os.path.exists(name):
        matches = sorted(Path(match) for match in glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name}: no file matches.")
        return _source_of_files(name, matches)

    path = Path(name)
    # A name with the suffix of a file of rows means a file, even if the file is missing.
    if path.is_file() or path.suffix.lower() in ROW_FILE_SUFFIXES:
        return _source_of_files(name, [path])
    if any((path / file).exists() for file in SAVED_FILES):
        return Source(name, "saved")
    if path.is_dir():
        return _source_of_folder(name, path)
    return Source(name, "dataset")  # any other name is taken for a Hub id


def _source_of_files(name: str, files: list[Path]) -> Source:
    """The source of files, which must all be JSON files or all parquet files."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: there is no such file.")

    suffixes = {file.suffix.lower() for file in files}
    if suffixes <= set(JSON_SUFFIXES):
        return Source(name, "json", files)
    if suffixes == {".parquet"}:
        return Source(name, "parquet", files)
    suffix_list = ", ".join(ROW_FILE_SUFFIXES)
    raise UserError(f"{name}: rows are read from files that end with {suffix_list}, all of one kind.")


def _source_of_folder(name: str, folder: Path) -> Source:
    """The source of a folder: the folder's only JSON file, or a dataset if there are no JSON files.

    Raises:
        UserError: if there are several JSON files, or the only JSON file is in a subfolder.
    """
    files = _find_json_files(folder)
    if not files:
        return Source(name, "dataset")
    if len(files) == 1 and files[0].parent == folder:
        return Source(name, "json", files)

    named_files = files[:4]  # enough to recognize the folder
    names = ", ".join(str(file.relative_to(folder)) for file in named_files)
    if len(files) > len(named_files):
        names += " and more"
    raise UserError(
        f"{name} holds the JSON files {names}: name the one with the rows, or a pattern for several, and the "
        "image_folder of their pictures."
    )


def _find_json_files(folder: Path) -> list[Path]:
    """The JSON files in a folder that may hold rows.

    The list is empty if the folder has files of another kind that `load_dataset` reads, since these hold the rows.
    """
    json_files = []
    for file in sorted(folder.rglob("*")):
        if _is_hidden(file, folder) or file.name in FILES_WITHOUT_ROWS:
            continue
        if _is_dataset_file(file):
            return []
        if file.suffix.lower() in JSON_SUFFIXES:
            json_files.append(file)
    return json_files


def holds_dataset_files(folder: Path) -> bool:
    """Whether a folder has files with rows that `load_dataset` reads: loose parquet files, say, or a metadata file."""
    return any(_is_dataset_file(file) and not _is_hidden(file, folder) for file in folder.rglob("*"))


def _is_dataset_file(file: Path) -> bool:
    return file.suffix.lower() in DATASET_SUFFIXES or file.name in METADATA_FILES


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file in a folder, or a subfolder that it is in, is hidden."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
