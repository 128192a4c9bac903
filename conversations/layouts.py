"""The layouts that rows come in, and how each is read into the one row that all else uses.

| layout | column | turns |
|---|---|---|
| LLaVA, ShareGPT | `conversations` | `from` and `value`, or `role` and `content` |
| chat messages | `messages` | `role` and `content`, a text or a list of parts |
| TRL | `prompt`, `completion` | a text each, or messages |
| the_cauldron | `texts` | `user` and `assistant` |

Pictures are in `image` or `images`, or in the parts of messages. A text in `system` is the first turn. Which layout a
row has is decided row by row.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from common.errors import UserError


IMAGE_MARK = "<image>"
# A row's columns by name; users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
# One turn: `from`, which is "human", "gpt" or "system", and `value`, its text with an `IMAGE_MARK` for each picture.
Turn = dict[str, Any]

PICTURE_COLUMNS = ("images", "image")
# LLaVA's names of the roles, by those that rows use.
ROLE_NAMES = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}
# Fields that say where a row comes from or how large its picture is: they hold nothing to learn.
IDENTIFYING = frozenset({
    "id", "idx", "index", "uid", "uuid", "key", "hash", "__index_level_0__",
    "source", "data_source", "dataset", "split", "license", "model", "lang", "language",
    "height", "width",
})  # fmt: skip
# Fields of a turn by which other trainers weigh an answer in the loss, or leave it out.
LOSS_FIELDS = ("weight", "loss", "train")
# What is read of a turn, of a message's parts, and of the_cauldron's pairs.
TURN_FIELDS = frozenset({"from", "value", "role", "content", *LOSS_FIELDS})
PAYLOAD_FIELDS = ("image", "image_url", "path", "url")
PART_FIELDS = frozenset({"type", "text", *PAYLOAD_FIELDS})
PAIR_FIELDS = frozenset({"user", "assistant"})


class LayoutError(UserError):
    """A row that has content in a layout that can't be read as it stands."""


def read_row(row: Row) -> Row:
    """A row of any layout as `images`, `conversations`, `problem` and `unread`.

    Returns:
        `images` holds the row's undecoded pictures in order, `conversations` LLaVA's turns, `problem` says why the row
        can't be read as it stands (`None` if it can), and `unread` names the fields that have content which no reader
        uses, as `field` or `messages[].field`.
    """
    unread = _unread_fields(row, READ_COLUMNS)
    try:
        layout = _find_layout(row)
        reader = _Reader(layout)
        turns = READERS[layout](row, reader)
        images = _choose_pictures(row, reader.pictures)
        turns = _add_system(turns, row.get("system"))
        if layout != "conversations":  # whose turns mark their pictures themselves
            turns = _mark_pictures(turns, len(images))
    except LayoutError as error:
        return {"images": [], "conversations": None, "problem": str(error), "unread": unread}

    unread += sorted(reader.unread)
    return {"images": images, "conversations": turns, "problem": None, "unread": unread}


def _unread_fields(fields: dict[str, Any], read: frozenset[str]) -> list[str]:
    """The names of the fields that have content, are not among those that are read, and don't only identify."""
    names = []
    for name, value in fields.items():
        if name not in read and name not in IDENTIFYING and has_content(value):
            names.append(name)
    return names


def beside_pictures(row: Row) -> list[Any]:
    """The pictures in a row's own columns: `images` or `image`, each one picture, a list, or nothing.

    Raises:
        LayoutError: if both columns hold some.
    """
    filled = [name for name in PICTURE_COLUMNS if has_content(row.get(name))]
    if len(filled) > 1:
        raise LayoutError("both `image` and `images` hold pictures; keep one of them")
    if not filled:
        return []
    column = row[filled[0]]
    entries = column if isinstance(column, list) else [column]
    return [entry for entry in entries if has_content(entry)]


def has_content(value: Any) -> bool:
    """Whether a field holds something: no null or NaN, empty text, empty list or `False`."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(has_content(entry) for entry in value)
    if isinstance(value, dict):
        return any(has_content(entry) for entry in value.values())
    if isinstance(value, float) and math.isnan(value):
        return False
    return value is not None and value is not False


def unpack_list(entries: Any) -> Any:
    """A list of turns or parts, where it is stored otherwise.

    `datasets.Sequence` of a dict stores it as a dict of lists, and some data sets store it as JSON text.

    Raises:
        LayoutError: if such lists differ in length.
    """
    if isinstance(entries, str):
        return _decode_list(entries)
    if not isinstance(entries, dict) or not all(isinstance(column, list) for column in entries.values()):
        return entries

    lengths = {name: len(column) for name, column in entries.items()}
    if len(set(lengths.values())) > 1:
        raise LayoutError(f"turns are stored as lists of different lengths: {lengths}")
    return [dict(zip(entries, entry, strict=True)) for entry in zip(*entries.values(), strict=True)]


def _decode_list(text: str) -> Any:
    """The list of mappings that a text holds as JSON; the text itself if it is no such list."""
    if not text.lstrip().startswith("["):
        return text
    try:
        decoded = json.loads(text)
    except ValueError:  # a text that begins with a bracket
        return text
    return decoded if all(isinstance(entry, dict) for entry in decoded) else text


class _Reader:
    """Reads the turns of one row, and collects the pictures inside and the names of what it doesn't read."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.pictures: list[Any] = []
        self.unread: set[str] = set()
        self._placeholders = 0

    def turns(self, entries: Any) -> Any:
        """Turns in LLaVA's form; what is no list stays as it is, so that the row's check reports it."""
        entries = unpack_list(entries)
        if not isinstance(entries, list):
            return entries
        return [self.turn(entry) for entry in entries]

    def turn(self, turn: Any) -> Turn:
        """A turn in LLaVA's form; a malformed one stays as it is, so that the row's check reports it."""
        if not isinstance(turn, dict):
            return turn
        role = _filled_one(turn, "from", "role")
        content = _filled_one(turn, "value", "content")
        if not isinstance(role, str) or role not in ROLE_NAMES:
            return turn

        role = ROLE_NAMES[role]
        _refuse_what_changes_training(turn, role)
        self.note_unread(turn, TURN_FIELDS)
        parts = None if isinstance(content, str) else unpack_list(content)
        if isinstance(parts, list):
            content = self._join_parts(parts, role)
        return {"from": role, "value": content}

    def note_unread(self, fields: dict[str, Any], read: frozenset[str]) -> None:
        """Keep the names of the fields that have content and that nothing reads."""
        self.unread.update(f"{self.column}[].{name}" for name in _unread_fields(fields, read))

    def _join_parts(self, parts: list[Any], role: str) -> str:
        """The text of a message's parts as one, with a mark for each picture."""
        pieces = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                _check_text_part(part)
                pieces.append(part["text"])
            elif kind in ("image", "image_url"):
                _check_picture_part(part, role)
                self._take_picture(part)
                pieces.append(f"{IMAGE_MARK}\n")
            else:
                raise LayoutError(f"a message has a part that is neither text nor picture: {str(part)[:100]}")
            self.note_unread(part, PART_FIELDS)
        return "".join(pieces)

    def _take_picture(self, part: dict[str, Any]) -> None:
        """Keep the part's picture. A part without one stands for the next of the row's own."""
        payloads = _picture_payloads(part)
        if len(payloads) > 1:
            raise LayoutError("a part names its picture twice")
        if payloads:
            self.pictures.append(payloads[0])
            return

        index = part.get("index")
        if index is not None and index != self._placeholders:
            raise LayoutError(f"a part stands for picture {index} where picture {self._placeholders} would come")
        self._placeholders += 1


def _refuse_what_changes_training(turn: Turn, role: str) -> None:
    """Refuse a turn that would have to be trained otherwise than all are."""
    if has_content(turn.get("tool_calls")):
        raise LayoutError("a turn has `tool_calls`, which have no place in a training text here")
    if role != "gpt":
        return
    for name in LOSS_FIELDS:
        if turn.get(name) not in (None, True):  # 1 equals True
            raise LayoutError(f"an answer has `{name}`: {turn[name]!r}, but all are trained alike; remove the turn")


def _check_text_part(part: dict[str, Any]) -> None:
    if any(has_content(part.get(name)) for name in PAYLOAD_FIELDS):
        raise LayoutError("a part of text holds a picture too; make them two parts")
    if IMAGE_MARK in part["text"]:
        raise LayoutError(f"a part of text contains {IMAGE_MARK}, where parts mark the pictures")


def _check_picture_part(part: dict[str, Any], role: str) -> None:
    if role == "gpt":
        raise LayoutError("an assistant's message holds a picture")
    if has_content(part.get("text")):
        raise LayoutError("a picture's part holds text too; make them two parts")


def _picture_payloads(part: dict[str, Any]) -> list[Any]:
    """The undecoded pictures that a part names: a path, or a mapping with a path or bytes."""
    payloads = []
    for name in PAYLOAD_FIELDS:
        payload = part.get(name)
        if name == "image_url" and isinstance(payload, dict):
            payload = payload.get("url")
        if isinstance(payload, bytes):
            payload = {"bytes": payload, "path": None}
        if has_content(payload):
            payloads.append(payload)
    return payloads


def _filled_one(turn: dict[str, Any], name: str, other: str) -> Any:
    """The one of two fields that says something.

    Raises:
        LayoutError: if both do.
    """
    if has_content(turn.get(name)) and has_content(turn.get(other)):
        raise LayoutError(f"a turn has both `{name}` and `{other}`; keep one of them")
    return turn[name] if turn.get(name) is not None else turn.get(other)


def _read_prompt(row: Row, reader: _Reader) -> list[Turn]:
    """The turns of a prompt and its completion, each a text or messages; only the completion is trained."""
    prompt = _read_text_or_messages(row, "prompt", "user", reader)
    if any(isinstance(turn, dict) and turn.get("from") == "gpt" for turn in prompt):
        raise LayoutError("`prompt` holds an answer, which would be trained too; give such rows as `messages`")
    return prompt + _read_text_or_messages(row, "completion", "assistant", reader)


def _read_text_or_messages(row: Row, column: str, role: str, reader: _Reader) -> list[Turn]:
    """The turns of a column: a text is one turn with this role."""
    content = row.get(column)
    is_text = isinstance(content, str) and not isinstance(unpack_list(content), list)
    if is_text:
        content = [{"role": role, "content": content}]

    turns = reader.turns(content)
    if not isinstance(turns, list):
        raise LayoutError(f"`{column}` is neither a text nor a list of messages")
    return turns


def _read_texts(row: Row, reader: _Reader) -> list[Turn]:
    """The turns of questions and answers as the_cauldron stores them."""
    pairs = unpack_list(row["texts"])
    if not isinstance(pairs, list):
        return []  # no turns, which the row's check reports

    turns: list[Turn] = []
    for pair in pairs:
        if not isinstance(pair, dict) or "user" not in pair or "assistant" not in pair:
            raise LayoutError(f'an entry of `texts` is not {{"user": ..., "assistant": ...}}: {str(pair)[:100]}')
        turns.append(reader.turn({"role": "user", "content": pair["user"]}))
        turns.append(reader.turn({"role": "assistant", "content": pair["assistant"]}))
        reader.note_unread(pair, PAIR_FIELDS)
    return turns


# By column that holds the turns of a layout, what reads them.
READERS: dict[str, Callable[[Row, _Reader], Any]] = {
    "conversations": lambda row, reader: reader.turns(row.get("conversations")),
    "messages": lambda row, reader: reader.turns(row["messages"]),
    "prompt": _read_prompt,
    "texts": _read_texts,
}
# All columns that have a reader.
READ_COLUMNS = frozenset({*READERS, "completion", "system", *PICTURE_COLUMNS})


def _find_layout(row: Row) -> str:
    """The column of the layout that a row has; `"conversations"` if it has none, which the row's check reports.

    Raises:
        LayoutError: if it has content in two, or a completion without a prompt.
    """
    filled = [column for column in READERS if has_content(row.get(column))]
    if filled == ["messages", "prompt"] and _is_first_text(row["prompt"], row["messages"]):
        filled = ["messages"]  # UltraChat repeats the first question
    if has_content(row.get("completion")) and "prompt" not in filled:
        raise LayoutError("there is a `completion` without a `prompt`")
    if len(filled) > 1:
        raise LayoutError(f"`{filled[0]}` and `{filled[1]}` both have content; keep one of them")
    return filled[0] if filled else "conversations"


def _is_first_text(prompt: Any, messages: Any) -> bool:
    """Whether a prompt only repeats the first message."""
    first = messages[0] if isinstance(messages, list) else None
    return isinstance(first, dict) and first.get("content") == prompt


def _choose_pictures(row: Row, pictures_inside: list[Any]) -> list[Any]:
    """The row's pictures, which are either in its columns or inside its messages."""
    beside = beside_pictures(row)
    if beside and pictures_inside:
        raise LayoutError("there are pictures both in the messages and beside them; keep one of these")
    return beside or pictures_inside


def _add_system(turns: Any, system: Any) -> Any:
    """The turns with the text of the field `system` before them."""
    if not has_content(system) or not isinstance(turns, list):
        return turns
    if any(isinstance(turn, dict) and turn.get("from") == "system" for turn in turns):
        raise LayoutError("there is both a field `system` and a system turn; keep one of them")
    return [{"from": "system", "value": system}, *turns]


def _mark_pictures(turns: Any, num_images: int) -> Any:
    """Turns that mark no picture get the marks of all before their first question, as TRL does it."""
    if not num_images or not isinstance(turns, list):
        return turns
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            return turns  # malformed, which the row's check reports
        if IMAGE_MARK in turn["value"]:
            return turns

    marked = list(turns)
    for place, turn in enumerate(marked):
        if turn["from"] == "human":
            marked[place] = turn | {"value": f"{IMAGE_MARK}\n" * num_images + turn["value"]}
            break
    return marked
