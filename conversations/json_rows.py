"""Rows of LLaVA's JSON files: read once, in chunks, and cached as Arrow files that every process memory-maps."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError

from conversations.files import lies_in, open_text, sha256
from conversations.rows import Row, picture_path


FEATURES = Features(
    {
        "images": List(Value("string")),
        "image_folder": Value("string"),
        "conversations": Value("string"),
        "source": Value("string"),
    }
)
# Characters that are read at a time.
PIECE = 1 << 20
# An error this close to the end of a chunk may be a token cut in two: "-Infinity", "1e+", "\ud83d\ude00".
CUT = 16
# Characters that a message shows on either side of an error.
NEAR = 30


def open_json(path: Path, image_folder: str) -> Dataset:
    """The rows of a JSON or JSONL file, memory-mapped from datasets' cache folder.

    The first process writes them there; others wait. The cache key is the file's content and name, the image folder
    and this code. The cache file is renamed into place when it is complete, so a killed process leaves nothing that
    would be used, and the next one starts over.

    Raises:
        ValueError: if the file is not UTF-8, not JSON or not a list of rows.
        BadRowError: if a row names a picture outside the folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it.")
    content = sha256(path)
    key = json.dumps([content, str(path), image_folder, sha256(Path(__file__))])
    try:
        return Dataset.from_generator(
            iterate_rows,
            features=FEATURES,
            gen_kwargs={"name": str(path), "image_folder": image_folder, "content": content},
            fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def iterate_rows(name: str, image_folder: str, content: str) -> Iterator[Row]:
    """The rows of a file with the columns of `conversations.rows`; only a chunk of the file is in memory at a time.

    Raises:
        ValueError, BadRowError: as `open_json` does; and if the file's hash is no longer `content`.
    """
    path, number = Path(name), -1
    for number, (place, row) in enumerate(read_json(path)):
        if not isinstance(row, dict):
            raise ValueError(
                f'{path}, {place} is not a row like {{"image": ..., "conversations": [...]}}: {json.dumps(row)[:60]}'
            )
        source = f"{path}, row {number}"
        given = row.get("image") if row.get("images") is None else row["images"]
        given = [] if given is None else given if isinstance(given, list) else [given]
        images = [_picture_name(image) for image in given]
        for image in images:
            # Resolving links takes disk access, so it waits for the row's check; here only if the path looks outside.
            if not lies_in(os.path.normpath(os.path.join(image_folder, image)), image_folder):
                picture_path({"image_folder": image_folder, "source": source}, image)
        # Only the fields that are used: LLaVA's `id` is a number in some rows and a string in others, which Arrow
        # rejects.
        conversations = json.dumps(row.get("conversations"))
        yield {"images": images, "image_folder": image_folder, "conversations": conversations, "source": source}
    if number < 0:
        raise ValueError(f"{path} has no rows.")
    if sha256(path) != content:
        raise ValueError(f"{path} changed while it was read; start again when it is complete.")


def _picture_name(image: Any) -> str:
    """A picture's path. Anything else becomes text that names no file, so that the row's check reports it."""
    try:
        if isinstance(image, str) and image.encode():
            return image
    except UnicodeEncodeError:  # an unpaired surrogate, which Arrow can't store
        pass
    return f"{json.dumps(image)} (not a path)"


def read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON list or of JSON lines, each with its place in the file."""
    with open_text(path) as file:
        if path.suffix.lower() == ".json":
            for number, row in enumerate(_read_list(_JsonText(file, f"{path} is not valid JSON"), path)):
                yield f"row {number}", row
            return
        is_empty = True
        for number, line in enumerate(file, 1):  # line feeds only: strings may contain Unicode line separators
            if line.strip():
                is_empty = False
                text = _JsonText(file, f"{path} is not valid JSONL: line {number}", line.removesuffix("\n"))
                yield f"line {number}", text.only_value()
        if is_empty:
            raise ValueError(f"{path} is empty.")


def _read_list(text: "_JsonText", path: Path) -> Iterator[Any]:
    character = text.next_character()
    if not character:
        raise ValueError(f"{path} is empty.")
    if character != "[":
        text.only_value()  # if there is no value, or several, its error says more
        raise ValueError(
            f'{path} is not a list of rows. LLaVA\'s layout is [{{"image": ..., "conversations": [...]}}].'
        )
    text.position += 1
    character = text.next_character()
    while character != "]":
        yield text.value()
        character = text.next_character()
        if character not in ("]", ","):
            text.fail("Expecting ',' delimiter", text.position)
        if character == ",":
            text.position += 1
            text.next_character()
    text.position += 1
    text.end()


class _JsonText:
    """JSON text that is read on demand; text before the current position is dropped.

    Args:
        file: Where more text is read from, unless `text` is given.
        complaint: What error messages start with.
        text: The whole text.

    Error messages are those of `json`, with positions in the whole text.
    """

    _decode = json.JSONDecoder().raw_decode
    _blanks = re.compile(r"[ \t\n\r]*")

    def __init__(self, file: TextIO, complaint: str, text: str | None = None) -> None:
        self._file = None if text is not None else file
        self._complaint = complaint
        self._text = text or ""
        self.position = 0
        # Of the dropped text: characters, line feeds, and characters after the last line feed.
        self._characters = self._lines = self._since_line = 0

    def _read(self, size: int) -> bool:
        """Read more; returns whether there was any."""
        piece = "" if self._file is None else self._file.read(size)
        if not piece:
            return False
        gone = self._text[: max(self.position - NEAR, 0)]
        self._characters += len(gone)
        self._lines += gone.count("\n")
        self._since_line = len(gone) - gone.rfind("\n") - 1 if "\n" in gone else self._since_line + len(gone)
        self._text = self._text[len(gone) :] + piece
        self.position -= len(gone)
        return True

    def next_character(self) -> str:
        """Move to the next character that is not blank and return it; an empty string at the end."""
        while True:
            self.position = self._blanks.match(self._text, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self._text) or not self._read(PIECE):
                return self._text[self.position : self.position + 1]

    def value(self) -> Any:
        """The value at the current position."""
        size = PIECE
        while True:
            try:
                value, end = self._decode(self._text, self.position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - CUT
                if not (is_cut and self._read(size)):
                    self.fail(error.msg, error.pos)
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
                raise ValueError(f"{self._complaint}: {error}.") from error
            else:
                if end < len(self._text) - CUT or not self._read(size):  # a number may go on, as 1 in 1.5
                    self.position = end
                    return value
            size *= 2  # so that the time for one long value is not quadratic

    def only_value(self) -> Any:
        """The text's only value; raises `ValueError` if there is more."""
        self.next_character()
        value = self.value()
        self.end()
        return value

    def end(self) -> None:
        """Raise `ValueError` if more follows."""
        if self.next_character():
            self.fail("Extra data", self.position)

    def fail(self, cause: str, position: int) -> NoReturn:
        """Raise `ValueError` with the cause and the position, given within the text in memory."""
        before = self.position
        self._read(NEAR)
        position += self.position - before
        line_feed = self._text.rfind("\n", 0, position)
        line = self._lines + self._text.count("\n", 0, position) + 1
        column = position - line_feed if line_feed >= 0 else self._since_line + position + 1
        near = self._text[max(position - NEAR, 0) : position + NEAR]
        hint = " If each line is a row, name the file .jsonl." if cause == "Extra data" else ""
        raise ValueError(
            f"{self._complaint}: {cause}: line {line} column {column} (char {self._characters + position}), "
            f"near {near!r}.{hint}"
        )
