"""Reads rows of several layouts, and returns them in LLaVA's layout, which the rest of the code uses.

| layout | column | turns |
|---|---|---|
| LLaVA, ShareGPT | `conversations` | `from` and `value`, or `role` and `content` |
| chat messages | `messages` | `role` and `content`, a text or a list of parts |
| TRL | `prompt`, `completion` | each is a text, or messages |
| the_cauldron | `texts` | pairs of `user` and `assistant` |

Pictures are in `image` or `images`, or in the parts of messages. A text in the field `system` becomes the first turn.
Rows of one file may have different layouts. Malformed turns are returned as they are: `check_row` of rows.py reports
them.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any

from normllava.errors import UserError


IMAGE_MARK = "<image>"
# A row's values by column. Users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
# One turn: `from`, which is "human", "gpt" or "system", and `value`, its text with an `IMAGE_MARK` for each picture.
Turn = dict[str, Any]

PICTURE_COLUMNS = ("images", "image")
# LLaVA's names of the roles, by the names that rows use.
LLAVA_ROLES = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}
# Names of columns of pictures, videos and sounds that nothing reads, such as `video`, `audios`, `image_path` or `img`.
# A row with one and without pictures is refused: the model wouldn't see or hear it.
MEDIA_NAME = re.compile(r"(image|img|picture|photo|video|audio|sound)s?(_(path|file|url)s?)?")
# Fields about a row as a whole, such as its source or its picture's size. They hold nothing to learn, so they aren't
# read, and no warning names them.
IDENTIFYING_FIELDS = frozenset({
    "id", "idx", "index", "uid", "uuid", "key", "hash", "__index_level_0__",
    "source", "data_source", "dataset", "split", "license", "model", "lang", "language",
    "height", "width",
})  # fmt: skip
# Fields of a turn by which other trainers weight an answer in the loss, or leave the answer out of the loss.
LOSS_FIELDS = ("weight", "loss", "train")
# The fields of a turn that are read.
TURN_FIELDS = frozenset({"from", "value", "role", "content", *LOSS_FIELDS})
# The fields of a message's part that can hold its picture.
PICTURE_FIELDS = ("image", "image_url", "path", "url")
# The fields of a message's part that are read.
PART_FIELDS = frozenset({"type", "text", *PICTURE_FIELDS})
# The fields of the_cauldron's pairs of question and answer that are read.
PAIR_FIELDS = frozenset({"user", "assistant"})


class LayoutError(UserError):
    """Says why a row can't be read, or can't be read without a change of its meaning."""


def read_row(row: Row, media_columns: Collection[str] = ()) -> Row:
    """Read a row of any layout.

    Args:
        row: The row.
        media_columns: The unread columns that hold pictures, videos or sounds by their type. A row that has one needs
            pictures too, and so does a row with a column that has a [`MEDIA_NAME`].

    Returns:
        A row with these fields:

        - `images`: the row's undecoded pictures in order.
        - `conversations`: LLaVA's turns.
        - `problem`: why the row can't be read; `None` for a row without problems.
        - `unread`: the names of fields that have content and that nothing reads. A field of a turn in `messages` is
          named `messages[].field`.
    """
    unread = _unread_fields(row, READ_COLUMNS)
    try:
        column = _find_turns_column(row)
        reader = _TurnReader(column)
        read_column = TURN_COLUMNS[column]
        turns = read_column(row, reader)
        pictures = _choose_pictures(row, reader.pictures)
        if not pictures:  # with pictures, the column may hold the video that they are the frames of
            _refuse_media(row, media_columns)
        turns = _add_system(turns, row.get("system"))
        if column != "conversations":  # in LLaVA's layout the turns mark their pictures already
            turns = _mark_pictures(turns, len(pictures))
    except LayoutError as error:
        return {"images": [], "conversations": None, "problem": str(error), "unread": unread}

    unread += sorted(reader.unread)
    return {"images": pictures, "conversations": turns, "problem": None, "unread": unread}


def _refuse_media(row: Row, media_columns: Collection[str]) -> None:
    for column, value in row.items():
        if (column in media_columns or names_media(column)) and has_content(value):
            raise LayoutError(media_problem(column))


def names_media(column: str) -> bool:
    """Whether an unread column holds pictures, videos or sounds, by its name."""
    return column not in PICTURE_COLUMNS and MEDIA_NAME.fullmatch(column) is not None


def media_problem(column: str) -> str:
    """What is wrong with a row that has a picture, video or sound in this column."""
    return (
        f"`{column}` isn't read, and the row has no picture: give pictures, or a video's frames, as `images`, or drop "
        "the row"
    )


def _unread_fields(fields: dict[str, Any], read_names: frozenset[str]) -> list[str]:
    """The names of fields that have content, but are neither in `read_names` nor in `IDENTIFYING_FIELDS`."""
    known_names = read_names | IDENTIFYING_FIELDS
    return [name for name, value in fields.items() if name not in known_names and has_content(value)]


def pictures_in_columns(row: Row) -> list[Any]:
    """The pictures in a row's column `images` or `image`. Each column holds a picture, a list of pictures, or nothing.

    Raises:
        LayoutError: if both `images` and `image` hold pictures.
    """
    filled_columns = [name for name in PICTURE_COLUMNS if has_content(row.get(name))]
    if len(filled_columns) > 1:
        raise LayoutError("both `image` and `images` hold pictures; keep one of them")
    if not filled_columns:
        return []
    pictures = row[filled_columns[0]]
    if not isinstance(pictures, list):
        pictures = [pictures]
    return [picture for picture in pictures if has_content(picture)]


def has_content(value: Any) -> bool:
    """Whether a value says something. Null, NaN, `False`, blank text, and lists or dicts of only these don't."""
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
    """The list of turns or of parts that is stored as a dict of lists or as JSON text.

    `datasets` stores a `Sequence` of dicts as a dict of lists. A value of any other form is returned as it is.

    Raises:
        LayoutError: if the lists of a dict differ in length.
    """
    if isinstance(entries, str):
        return _decode_list(entries)
    if isinstance(entries, dict) and all(isinstance(column, list) for column in entries.values()):
        return _join_columns(entries)
    return entries


def _join_columns(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The list of dicts that is stored as a dict of lists: entry 0 has the first value of each list, and so on."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise LayoutError(f"turns are stored as lists of different lengths: {lengths}")

    num_entries = max(lengths.values(), default=0)  # all lengths are equal
    entries = []
    for index in range(num_entries):
        entries.append({name: column[index] for name, column in columns.items()})
    return entries


def _decode_list(text: str) -> Any:
    """The list of mappings that a text holds as JSON; any other text is returned as it is."""
    if not text.lstrip().startswith("["):
        return text
    try:
        decoded = json.loads(text)
    except ValueError:  # an ordinary text that begins with a bracket
        return text
    if all(isinstance(entry, dict) for entry in decoded):
        return decoded
    return text


class _TurnReader:
    """Reads the turns of one row.

    Attributes:
        column: The column that holds the turns.
        pictures: The pictures inside the messages that have been read so far.
        unread: The names of fields inside the turns that have content and that nothing reads.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.pictures: list[Any] = []
        self.unread: set[str] = set()
        self._num_placeholders = 0  # parts read so far that stand for a picture in the row's picture columns

    def read_turns(self, entries: Any) -> Any:
        """The turns in LLaVA's form. Entries that are no list are returned as they are."""
        entries = unpack_list(entries)
        if not isinstance(entries, list):
            return entries
        return [self.read_turn(entry) for entry in entries]

    def read_turn(self, turn: Any) -> Turn:
        """The turn in LLaVA's form. A malformed turn is returned as it is."""
        if not isinstance(turn, dict):
            return turn
        role = _filled_field(turn, "from", "role")
        content = _filled_field(turn, "value", "content")
        if not isinstance(role, str) or role not in LLAVA_ROLES:
            return turn

        llava_role = LLAVA_ROLES[role]
        _refuse_what_changes_training(turn, llava_role)
        self.note_unread(turn, TURN_FIELDS)
        # A text isn't decoded: a JSON list may be what the turn says.
        if not isinstance(content, str):
            content = unpack_list(content)
        if isinstance(content, list):
            content = self._join_parts(content, llava_role)
        return {"from": llava_role, "value": content}

    def note_unread(self, fields: dict[str, Any], read_names: frozenset[str]) -> None:
        """Add to `unread` the names of fields that have content, but aren't in `read_names`."""
        for name in _unread_fields(fields, read_names):
            self.unread.add(f"{self.column}[].{name}")

    def _join_parts(self, parts: list[Any], llava_role: str) -> str:
        """Join the parts of a message into one text, with a mark for each picture.

        Each part is a line of its own, as the chat template writes a message whose parts it is given.
        """
        pieces = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                _check_text_part(part)
                pieces.append(part["text"] if llava_role == "gpt" else part["text"].strip("\n"))
            elif kind in ("image", "image_url"):
                _check_picture_part(part, llava_role)
                self._take_picture(part)
                pieces.append(IMAGE_MARK)
            else:
                raise LayoutError(f"a message has a part that is neither text nor picture: {str(part)[:100]}")
            self.note_unread(part, PART_FIELDS)
        if llava_role == "gpt":  # an answer stays as it is written
            return "\n".join(pieces)
        return "\n".join(piece for piece in pieces if piece)

    def _take_picture(self, part: dict[str, Any]) -> None:
        """Add the picture of a part to `pictures`.

        A part without a picture is a placeholder for the next picture in the row's picture columns.
        """
        pictures = _part_pictures(part)
        if len(pictures) > 1:
            raise LayoutError("a part names its picture twice")
        if pictures:
            self.pictures.append(pictures[0])
            return

        # Some datasets number their placeholders from 0. The columns' pictures are taken in order, so the numbers must
        # be in order too.
        expected_index = self._num_placeholders
        index = part.get("index")
        if index not in (None, expected_index):
            raise LayoutError(f"a part stands for picture {index} where picture {expected_index} would come")
        self._num_placeholders += 1


def _refuse_what_changes_training(turn: dict[str, Any], llava_role: str) -> None:
    """Refuse a turn that other trainers would train otherwise: a turn with tool calls, or an answer with a weight."""
    if has_content(turn.get("tool_calls")):
        raise LayoutError("a turn has `tool_calls`, which have no place in a training text here")
    if llava_role != "gpt":
        return
    for name in LOSS_FIELDS:
        if turn.get(name) not in (None, True):  # a weight of 1 is accepted too, since 1 equals True
            raise LayoutError(f"an answer has `{name}`: {turn[name]!r}, but all are trained alike; remove the turn")


def _check_text_part(part: dict[str, Any]) -> None:
    if any(has_content(part.get(name)) for name in PICTURE_FIELDS):
        raise LayoutError("a part of text holds a picture too; make them two parts")
    if IMAGE_MARK in part["text"]:
        raise LayoutError(f"a part of text contains {IMAGE_MARK}, where parts mark the pictures")


def _check_picture_part(part: dict[str, Any], llava_role: str) -> None:
    if llava_role == "gpt":
        raise LayoutError("an assistant's message holds a picture")
    if has_content(part.get("text")):
        raise LayoutError("a picture's part holds text too; make them two parts")


def _part_pictures(part: dict[str, Any]) -> list[Any]:
    """The undecoded pictures of a part, each of which is a path, or a mapping with a path or bytes."""
    pictures = []
    for name in PICTURE_FIELDS:
        picture = part.get(name)
        if name == "image_url" and isinstance(picture, dict):  # OpenAI's form: {"image_url": {"url": ...}}
            picture = picture.get("url")
        if isinstance(picture, bytes):
            picture = {"bytes": picture, "path": None}
        if has_content(picture):
            pictures.append(picture)
    return pictures


def _filled_field(turn: dict[str, Any], name: str, other_name: str) -> Any:
    """The value of whichever of two fields has content. If neither has content, the first value that isn't null.

    Raises:
        LayoutError: if both fields have content.
    """
    value = turn.get(name)
    other_value = turn.get(other_name)
    if has_content(value) and has_content(other_value):
        raise LayoutError(f"a turn has both `{name}` and `{other_name}`; keep one of them")
    if has_content(other_value) or value is None:
        return other_value
    return value


def _read_conversations(row: Row, reader: _TurnReader) -> Any:
    """The turns of `conversations`. A row without any turns may lack this column."""
    return reader.read_turns(row.get("conversations"))


def _read_messages(row: Row, reader: _TurnReader) -> Any:
    return reader.read_turns(row["messages"])


def _read_prompt(row: Row, reader: _TurnReader) -> list[Turn]:
    """The turns of a prompt and its completion.

    Only the completion may hold answers, since every answer is trained.
    """
    prompt = _read_text_or_messages(row, "prompt", "user", reader)
    if any(isinstance(turn, dict) and turn.get("from") == "gpt" for turn in prompt):
        raise LayoutError("`prompt` holds an answer, which would be trained too; give such rows as `messages`")
    return prompt + _read_text_or_messages(row, "completion", "assistant", reader)


def _read_text_or_messages(row: Row, column: str, role: str, reader: _TurnReader) -> list[Turn]:
    """The turns of a column that holds messages, or a text, which becomes one turn with the given role."""
    content = row.get(column)
    if isinstance(content, str) and not _are_messages(unpack_list(content)):
        content = [{"role": role, "content": content}]

    turns = reader.read_turns(content)
    if not isinstance(turns, list):
        raise LayoutError(f"`{column}` is neither a text nor a list of messages")
    return turns


def _are_messages(entries: Any) -> bool:
    """Whether `entries`, decoded from a text, are messages, which have roles. Any other list can be an answer."""
    if not isinstance(entries, list) or not entries:
        return False
    return all("role" in entry or "from" in entry for entry in entries)


def _read_texts(row: Row, reader: _TurnReader) -> list[Turn]:
    """The turns of pairs of question and answer, as the_cauldron stores them."""
    pairs = unpack_list(row["texts"])
    if not isinstance(pairs, list):
        return []  # `check_row` reports that there are no turns

    turns: list[Turn] = []
    for pair in pairs:
        if not isinstance(pair, dict) or "user" not in pair or "assistant" not in pair:
            raise LayoutError(f'an entry of `texts` is not {{"user": ..., "assistant": ...}}: {str(pair)[:100]}')
        turns.append(reader.read_turn({"role": "user", "content": pair["user"]}))
        turns.append(reader.read_turn({"role": "assistant", "content": pair["assistant"]}))
        reader.note_unread(pair, PAIR_FIELDS)
    return turns


# The columns that can hold a row's turns, each with the function that reads them.
TURN_COLUMNS: dict[str, Callable[[Row, _TurnReader], Any]] = {
    "conversations": _read_conversations,
    "messages": _read_messages,
    "prompt": _read_prompt,
    "texts": _read_texts,
}
# All columns that are read.
READ_COLUMNS = frozenset({*TURN_COLUMNS, "completion", "system", *PICTURE_COLUMNS})


def _find_turns_column(row: Row) -> str:
    """The column that holds a row's turns.

    If no column of turns has content, this is `"conversations"`, and `check_row` reports that there are no turns.

    Raises:
        LayoutError: if two columns of turns have content, or there is a completion without a prompt.
    """
    columns = [column for column in TURN_COLUMNS if has_content(row.get(column))]
    # In UltraChat, `prompt` repeats the first message of `messages`.
    if columns == ["messages", "prompt"] and _is_first_message(row["prompt"], row["messages"]):
        columns = ["messages"]
    if has_content(row.get("completion")) and "prompt" not in columns:
        raise LayoutError("there is a `completion` without a `prompt`")
    if len(columns) > 1:
        raise LayoutError(f"`{columns[0]}` and `{columns[1]}` both have content; keep one of them")
    if not columns:
        return "conversations"
    return columns[0]


def _is_first_message(prompt: Any, messages: Any) -> bool:
    """Whether a prompt is the text of the first message."""
    messages = unpack_list(messages)
    if not isinstance(messages, list) or not messages:
        return False
    first_message = messages[0]
    return isinstance(first_message, dict) and first_message.get("content") == prompt


def _choose_pictures(row: Row, pictures_in_messages: list[Any]) -> list[Any]:
    """The row's pictures, which are either in its picture columns or inside its messages."""
    in_columns = pictures_in_columns(row)
    if in_columns and pictures_in_messages:
        raise LayoutError("there are pictures both in the messages and beside them; keep one of these")
    return in_columns + pictures_in_messages  # at most one of the two has pictures


def _add_system(turns: Any, system: Any) -> Any:
    """The turns, after a system turn if the field `system` has a text."""
    if not has_content(system) or not isinstance(turns, list):
        return turns
    if any(isinstance(turn, dict) and turn.get("from") == "system" for turn in turns):
        raise LayoutError("there is both a field `system` and a system turn; keep one of them")
    return [{"from": "system", "value": system}, *turns]


def _mark_pictures(turns: Any, num_pictures: int) -> Any:
    """Put marks for all pictures before the first question, as TRL does, unless a turn already has a mark.

    Returns:
        The turns, which are unchanged if one is malformed.
    """
    if not num_pictures or not isinstance(turns, list):
        return turns
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            return turns  # `check_row` reports the malformed turn
        if IMAGE_MARK in turn["value"]:
            return turns

    marked_turns = list(turns)
    for number, turn in enumerate(marked_turns):
        if turn["from"] == "human":
            marks = f"{IMAGE_MARK}\n" * num_pictures
            marked_turns[number] = turn | {"value": marks + turn["value"]}
            break
    return marked_turns
