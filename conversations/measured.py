"""Checks every row before training: its problems, its length in tokens, and a checksum.

Results for a row's text are cached between runs, keyed by its content and everything that it is read with. Names and
sizes of picture files are checked in every run; pictures are opened again only if path, size or time has changed.
"""

import hashlib
import json
import logging
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset

from conversations import checks, pictures, rows
from conversations.checks import Tokenize, count_marks, pictures_problem, text_problem
from conversations.files import sha256
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, is_embedded, picture_path, reason, row_images


logger = logging.getLogger(__name__)

# Rows per cache file: what a killed run has to repeat.
PIECE = 50_000
# Rows that are serialized at a time for a hash.
BATCH = 1000


@dataclass(frozen=True)
class MeasuredRows:
    """Results of checking every row."""

    problems: dict[int, str]
    """Why a row can't be trained on, by row number; good rows are absent."""
    lengths: np.ndarray
    """Tokens of each row, 0 for a bad one: int32 [rows]."""
    checksums: np.ndarray
    """Of each row's conversation and its pictures' names and sizes, 0 for a bad one: uint32 [rows]."""


def measure_rows(
    dataset: Dataset,
    control_tokens: frozenset[str],
    tokenize: Tokenize,
    open_pictures: bool,
    num_proc: int | None = None,
    identity: str | None = None,
) -> MeasuredRows:
    """Check every row: its text, its picture files, and with `open_pictures` the pictures themselves.

    Args:
        dataset: Rows of `conversations.rows`.
        control_tokens: Control tokens of the model's tokenizer; text must not contain them.
        tokenize: Tokenizes a row's `conversations`, the only column that it gets.
        open_pictures: Whether to decode the pictures too.
        num_proc: Processes that share the work.
        identity: Hash of everything that `tokenize` depends on. If given, results are cached in datasets' cache folder
            and reused as long as nothing has changed.

    Raises:
        BadRowError: if a picture is outside its row's folder.
    """
    texts = _read_texts(dataset, control_tokens, tokenize, num_proc, identity)
    files = _look_at_files(dataset, texts, open_pictures, num_proc)
    problems = _non_empty(texts["problem"]) | _non_empty(files["problem"])
    if open_pictures:
        problems |= _open_pictures(dataset, files, set(problems), num_proc, identity is not None)
    problems = _non_empty(texts["token_problem"]) | problems
    lengths, checksums = texts["length"].to_numpy().copy(), files["checksum"].to_numpy().copy()
    bad = np.fromiter(problems, dtype=np.int64, count=len(problems))
    lengths[bad] = checksums[bad] = 0
    return MeasuredRows(dict(sorted(problems.items())), lengths, checksums)


def keep_good_rows(
    dataset: Dataset, measured: MeasuredRows, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The dataset without its bad rows and with a column `length`, in tokens; and a fingerprint of its content.

    Bad rows are added to `report_file`, a line of JSON each; `None` for a process that should not write it.

    Raises:
        BadRowError: with `"error"`, if there is a bad row; with `"skip"`, if all are bad.
    """
    problems = measured.problems
    is_good = np.ones(len(dataset), dtype=bool)
    is_good[list(problems)] = False
    if problems:
        sources = dataset.select_columns("source")
        if bad_rows == "skip" and report_file is not None:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            with report_file.open("a", encoding="utf-8") as file:
                for number, problem in problems.items():
                    file.write(json.dumps({"source": sources[number]["source"], "problem": problem}) + "\n")
            logger.warning(
                "Left out %d of %d rows; listed with reasons in %s", len(problems), len(dataset), report_file
            )
        if bad_rows == "error" or not is_good.any():
            number, problem = next(iter(problems.items()))
            advice = "leave them out with --bad_rows skip" if is_good.any() else "no row is left to train on"
            raise BadRowError(
                f"{sources[number]['source']}: {problem}. {len(problems)} of {len(dataset)} rows are bad; fix the "
                f"data, {'or ' if is_good.any() else ''}{advice}."
            )
    dataset = dataset.add_column("length", measured.lengths)
    content = np.stack([measured.lengths, measured.checksums], axis=1, dtype=np.int64)[is_good]
    fingerprint = hashlib.sha256(content.tobytes()).hexdigest()
    return (dataset.select(np.flatnonzero(is_good)) if problems else dataset), fingerprint


def row_lengths(dataset: Dataset) -> np.ndarray:
    """The column `length` of checked rows: int64 [rows]."""
    return dataset.with_format("numpy", columns=["length"])["length"][:]


def _non_empty(column: pa.ChunkedArray) -> dict[int, str]:
    numbers = np.flatnonzero(pc.not_equal(column, "").to_numpy())
    return dict(zip(numbers.tolist(), column.take(numbers).to_pylist(), strict=True))


def _read_texts(
    dataset: Dataset,
    control_tokens: frozenset[str],
    tokenize: Tokenize,
    num_proc: int | None,
    identity: str | None,
) -> pa.Table:
    """Checks of each row's conversation: `problem`, `token_problem` (empty for none), `marks` (its `<image>`s),
    `length`, and `checksum`, to be extended by the names and sizes of its pictures."""

    def read(table: pa.Table) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in schema.names}
        for conversations in table["conversations"].to_pylist():
            row = {"conversations": conversations, "images": [], "source": ""}
            problem, token_problem, marks, length = text_problem(row, control_tokens) or "", "", 0, 0
            if not problem:
                marks = count_marks(row)
                try:
                    length = len(tokenize(row)[0])
                except BadRowError as error:
                    token_problem = reason(error, row)
            checksum = 0 if problem else zlib.crc32(f"[{json.dumps(conversations, default=str)}, ".encode())
            for name, value in zip(schema.names, (problem, token_problem, marks, length, checksum), strict=True):
                found[name].append(value)
        return found

    schema = pa.schema(
        {"problem": pa.string(), "token_problem": pa.string(), "marks": pa.int32(), "length": pa.int32(),
         "checksum": pa.uint32()}
    )  # fmt: skip
    code = [sha256(Path(str(module.__file__))) for module in (checks, rows)]
    key = [identity, sorted(control_tokens), code, sha256(Path(__file__))]
    tables = []
    for start in range(0, len(dataset), PIECE):
        piece = dataset.select(range(start, min(start + PIECE, len(dataset)))).select_columns("conversations")
        kept = None if identity is None else _kept_file("text", [*key, _content(piece)])
        table = None if kept is None else _read_kept(kept, schema)
        if table is None:
            desc = f"Checking rows {start:,} to {start + len(piece):,} of {len(dataset):,}"
            table = _map(piece, read, schema, num_proc, desc)
            if kept is not None:
                _keep(kept, table)
        tables.append(table)
    return pa.concat_tables(tables)


def _look_at_files(dataset: Dataset, texts: pa.Table, with_state: bool, num_proc: int | None) -> pa.Table:
    """Checks of each row's picture files: `problem`, the row's `checksum`, and `state`, a hash that changes with them.

    Never cached: files may have been added or removed since.
    """
    has_text_problem = pc.not_equal(texts["problem"], "").to_numpy()
    marks, checksums = texts["marks"].to_numpy(), texts["checksum"].to_numpy()

    def look(table: pa.Table, numbers: list[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in schema.names}
        images = _picture_references(table["images"], with_bytes=with_state)
        folders, sources = table["image_folder"].to_pylist(), table["source"].to_pylist()
        for number, *values in zip(numbers, images, folders, sources, strict=True):
            row = dict(zip(("images", "image_folder", "source"), values, strict=True))
            problem, checksum, state = "", 0, 0
            if not has_text_problem[number]:
                problem = pictures_problem(row, int(marks[number])) or ""
                if not problem:
                    checksum = _checksum(row, int(checksums[number]))
                    state = _state(row) if with_state else 0
            for name, value in zip(schema.names, (problem, checksum, state), strict=True):
                found[name].append(value)
        return found

    schema = pa.schema({"problem": pa.string(), "checksum": pa.uint32(), "state": pa.int64()})
    columns = dataset.select_columns(["images", "image_folder", "source"])
    return _map(columns, look, schema, num_proc, "Looking for pictures", with_indices=True)


def _open_pictures(
    dataset: Dataset, files: pa.Table, bad: set[int], num_proc: int | None, is_kept: bool
) -> dict[int, str]:
    """Open the pictures of rows that are not bad, except those whose state is unchanged since they were opened before.
    What could not be opened is tried again: the cause may have been the disk, or a Pillow without that format.

    Returns:
        The rows with a picture that can't be opened, and why.
    """

    def open_all(table: pa.Table) -> dict[str, list[str]]:
        columns = {name: table[name].to_pylist() for name in ("images", "image_folder", "source")}
        found = []
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            try:
                open_images(row)
                found.append("")
            except BadRowError as error:
                found.append(reason(error, row))
        return {"problem": found}

    schema = pa.schema({"state": pa.int64(), "problem": pa.string()})
    columns = dataset.select_columns(["images", "image_folder", "source"])
    code = [sha256(Path(str(module.__file__))) for module in (pictures, rows)]
    problems: dict[int, str] = {}
    for start in range(0, len(dataset), PIECE):
        states = files["state"].slice(start, PIECE)
        stop = start + len(states)
        found = pa.array([""] * len(states))
        is_due = np.array([number not in bad for number in range(start, stop)], dtype=bool)
        kept = None
        if is_kept:
            kept = _kept_file("pictures", [columns[start]["source"], start, stop, code])
            before = _read_kept(kept, schema)
            if before is not None and len(before) == len(states):
                is_due &= ~pc.and_(pc.equal(before["state"], states), pc.equal(before["problem"], "")).to_numpy()
        due = np.flatnonzero(is_due)
        if len(due):
            desc = f"Opening pictures of rows {start:,} to {stop:,} of {len(dataset):,}"
            opened = _map(columns.select(due + start), open_all, pa.schema({"problem": pa.string()}), num_proc, desc)
            found = pc.replace_with_mask(found, pa.array(is_due), opened["problem"].combine_chunks())
            if kept is not None:
                _keep(kept, pa.table({"state": states, "problem": found}, schema=schema))
        problems |= {start + number: problem for number, problem in _non_empty(pa.chunked_array([found])).items()}
    return {number: problem for number, problem in problems.items() if number not in bad}


def _map(
    dataset: Dataset,
    function: Callable[..., Any],
    schema: pa.Schema,
    num_proc: int | None,
    desc: str,
    with_indices: bool = False,
) -> pa.Table:
    """Map a function over a dataset's batches in Arrow format; other formats would read the encoded pictures."""
    with tempfile.TemporaryDirectory() as folder:
        found = dataset.with_format("arrow").map(
            function,
            batched=True,
            with_indices=with_indices,
            num_proc=num_proc,
            remove_columns=dataset.column_names,
            features=datasets.Features.from_arrow_schema(schema),
            cache_file_name=os.path.join(folder, "found.arrow"),
            new_fingerprint=uuid.uuid4().hex,
            desc=desc,
        )
        # Copied into memory before the files are deleted.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_table(found.with_format("arrow")[:].cast(schema))
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _content(dataset: Dataset) -> str:
    """Hash of a dataset's content, independent of the file that it is in."""
    found = hashlib.sha256(str(dataset.features).encode())
    for table in dataset.with_format("arrow").iter(BATCH):
        for batch in table.combine_chunks().to_batches():
            found.update(batch.serialize())
    return found.hexdigest()


def _kept_file(kind: str, key: list[Any]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Path(datasets.config.HF_DATASETS_CACHE) / "normllava" / f"{kind}-{name}.parquet"


def _read_kept(path: Path, schema: pa.Schema) -> pa.Table | None:
    """A cached table; `None` if there is none, or if a crash left the file damaged."""
    try:
        return pq.read_table(path, memory_map=True).cast(schema)
    except (OSError, ValueError):
        return None


def _keep(path: Path, table: pa.Table) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        try:
            pq.write_table(table, aside)
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("The checks of the rows can't be cached for the next run: %s", error)


def _checksum(row: Row, checksum: int) -> int:
    """The checksum of a row's conversation, extended by its pictures' names and sizes; independent of where the folder
    is."""
    folder, described = row["image_folder"], []
    for image in row_images(row):
        name = image["path"] if isinstance(image, dict) else image
        if isinstance(image, dict) and is_embedded(image):
            described.append((name, image["size"]))
        else:
            path = os.path.normpath(os.path.join(folder, name))
            described.append((path.removeprefix(folder), os.path.getsize(path)))
    return zlib.crc32(f"{json.dumps(described)}]".encode(), checksum)


def _state(row: Row) -> int:
    """Hash of the paths, sizes and modification times of a row's picture files, and of embedded bytes."""
    state = hashlib.blake2b(digest_size=8)
    for image in row_images(row):
        path = picture_path(row, image)
        if path is None and isinstance(image, dict):
            state.update(image["bytes"])
        else:
            found = os.stat(str(path))
            state.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return int.from_bytes(state.digest(), "big", signed=True)


def _picture_references(column: pa.ChunkedArray, with_bytes: bool) -> list[Any]:
    """A column of pictures as Python values, with the size of encoded ones; their bytes are read only
    `with_bytes`."""
    references: list[Any] = []
    for chunk in column.chunks:
        kind = chunk.type.value_type if pa.types.is_list(chunk.type) else chunk.type
        if not pa.types.is_struct(kind):  # paths
            references += chunk.to_pylist()
            continue
        pictures = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        encoded = pictures.field("bytes")
        columns = {
            "bytes": encoded.to_pylist() if with_bytes else [None] * len(encoded),
            "path": pictures.field("path").to_pylist(),
            "size": pc.binary_length(encoded).to_pylist(),
        }
        leaves = [
            dict(zip(columns, values, strict=True)) if there else None
            for there, *values in zip(pictures.is_valid().to_pylist(), *columns.values(), strict=True)
        ]
        if pa.types.is_list(chunk.type):
            remaining = iter(leaves)
            counts = chunk.value_lengths().fill_null(0).to_pylist()
            references += [[next(remaining) for _ in range(count)] for count in counts]
        else:
            references += leaves
    return references
