"""Every row is checked before training: what is wrong with it, how many tokens it has, and what all of them hold."""

import hashlib
import json
import logging
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from conversations.pictures import open_images
from conversations.rows import IMAGE_MARK, ROLES, BadRowError, row_images, row_turns


logger = logging.getLogger(__name__)


def row_problem(row: dict[str, Any], image_token: str = IMAGE_MARK, needs_answer: bool = True) -> str | None:
    """Why a row can't be trained on, or `None`. Looks at everything but the pixels.

    Args:
        row: A row of this module.
        image_token: What the processor's tokenizer reads as a picture; text must not hold it.
        needs_answer: Whether a row without an answer is a problem; it is where the row is to be trained on.
    """
    try:
        turns, images = row_turns(row), row_images(row)
    except json.JSONDecodeError:
        return "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        return "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or turn.get("from") not in ROLES or not isinstance(turn.get("value"), str):
            return f'turn {number} is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {turn!r}'
        if image_token != IMAGE_MARK and image_token in turn["value"]:
            return f"turn {number} holds {image_token}, which this model's tokenizer reads as a picture"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn holds {IMAGE_MARK}"
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        if isinstance(image, str) and not Path(image).is_file():
            return f"image file {image} is missing"
    return None


@dataclass(frozen=True)
class MeasuredRows:
    """What a look at every row found."""

    problems: list[str]
    """Why a row can't be trained on; empty for a good one."""
    lengths: list[int]
    """Tokens of each row."""
    checksums: list[int]
    """Of each row's conversation."""


def measure_rows(
    dataset: Dataset,
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    open_pictures: bool,
    num_proc: int | None = None,
) -> MeasuredRows:
    """Look at every row: at its text, at its pictures' files, and inside these only with `open_pictures`."""

    def measure(table: pa.Table) -> dict[str, list[Any]]:
        columns = {name: table[name].to_pylist() for name in ("conversations", "source")}
        images = _picture_references(table["images"], with_bytes=open_pictures)
        measured: dict[str, list[Any]] = {"problem": [], "length": [], "checksum": []}
        for turns, source, pictures in zip(columns["conversations"], columns["source"], images, strict=True):
            row = {"conversations": turns, "source": source, "images": pictures}
            problem, length = _measure_row(row, image_token, tokenize, open_pictures)
            measured["problem"].append(problem)
            measured["length"].append(length)
            measured["checksum"].append(zlib.crc32(json.dumps(turns).encode()))
        return measured

    # Not from the cache: files may have come or gone since. As Arrow, since pictures of hundreds of gigabytes would be
    # read otherwise.
    measured = dataset.with_format("arrow").map(
        measure,
        batched=True,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        load_from_cache_file=False,
        new_fingerprint=uuid.uuid4().hex,
        desc="Checking rows",
    )
    return MeasuredRows(
        *(measured.with_format("arrow")[name].to_pylist() for name in ("problem", "length", "checksum"))
    )


def keep_good_rows(
    dataset: Dataset, measured: MeasuredRows, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The dataset without its bad rows and with a column `length`, in tokens; and a fingerprint of what it says.

    Bad rows go to `report_file`, a line of JSON each; `None` for a process that should not write it.

    Raises:
        BadRowError: with `"error"`, if there is a bad row; with `"skip"`, if there is no other.
    """
    bad = [number for number, problem in enumerate(measured.problems) if problem]
    good = [number for number, problem in enumerate(measured.problems) if not problem]
    if bad:
        sources = dataset.select_columns("source")
        examples = [{"source": sources[number]["source"], "problem": measured.problems[number]} for number in bad]
        if bad_rows == "error" or not good:
            first = examples[0]
            raise BadRowError(
                f"{first['source']}: {first['problem']}. {len(bad)} of {len(dataset)} rows are bad; mend the data, or "
                "leave them out with --bad_rows skip."
            )
        if report_file is not None:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(example) + "\n" for example in examples]
            report_file.write_text("".join(lines), encoding="utf-8")
            logger.warning("Left out %d of %d rows; listed with reasons in %s", len(bad), len(dataset), report_file)
    dataset = dataset.add_column("length", measured.lengths)
    content = [(measured.lengths[number], measured.checksums[number]) for number in good]
    fingerprint = hashlib.sha256(np.array(content, dtype=np.int64).tobytes()).hexdigest()
    return (dataset.select(good) if bad else dataset), fingerprint


def check_stream(
    dataset: IterableDataset,
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    bad_rows: Literal["error", "skip"],
    report_file: Path,
) -> IterableDataset:
    """The same for data that is read as it comes: rows are looked at, and get their `length`, when they are reached.

    Bad rows are added to `report_file` as they are met, by each process that meets them.
    """

    def is_good(row: dict[str, Any]) -> bool:
        if row["problem"] and bad_rows == "error":
            raise BadRowError(f"{row['source']}: {row['problem']}.")
        if row["problem"]:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            with report_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"source": row["source"], "problem": row["problem"]}) + "\n")
        return not row["problem"]

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        problem, length = _measure_row(row, image_token, tokenize, open_pictures=bad_rows == "skip")
        return {"problem": problem, "length": length}

    return dataset.map(measure).filter(is_good).remove_columns("problem")


def _measure_row(
    row: dict[str, Any],
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    open_pictures: bool,
) -> tuple[str, int]:
    """Why a row can't be trained on, or nothing; and its length in tokens."""
    problem = row_problem(row, image_token)
    if problem is not None:
        return problem, 0
    try:
        if open_pictures:
            open_images(row)
        return "", len(tokenize(row)[0])
    except BadRowError as error:
        return str(error).removeprefix(f"{row['source']}: "), 0


def _picture_references(column: pa.ChunkedArray, with_bytes: bool) -> list[Any]:
    """A column of pictures as Python values, the bytes of encoded ones left where they are unless asked for."""
    if with_bytes:
        return column.to_pylist()
    references: list[Any] = []
    for chunk in column.chunks:
        kind = chunk.type.value_type if pa.types.is_list(chunk.type) else chunk.type
        if not pa.types.is_struct(kind):  # paths
            references += chunk.to_pylist()
            continue
        pictures = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        leaves = [
            {"bytes": None, "path": path} if there else None
            for path, there in zip(pictures.field("path").to_pylist(), pictures.is_valid().to_pylist(), strict=True)
        ]
        if pa.types.is_list(chunk.type):
            remaining = iter(leaves)
            counts = chunk.value_lengths().fill_null(0).to_pylist()
            references += [[next(remaining) for _ in range(count)] for count in counts]
        else:
            references += leaves
    return references
