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

from collections.abc import Callable, Iterable
from typing import Any


IMAGE_MARK = "<image>"
# A row's columns by name; users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
# One turn: `from`, which is "human", "gpt" or "system", and `value`, its text with an `IMAGE_MARK` for each picture.
Turn = dict[str, Any]

PICTURE_COLUMNS = ("images", "image")
# LLaVA's names of the roles, by those that rows use.
ROLE_NAMES = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}
# Fields that say where a row comes from or how large its picture is: they hold nothing to learn.
IDENTIFYING = frozenset(
    {"id", "idx", "index", "uid", "uuid", "key", "source", "data_source", "dataset", "url", "license", "model", "lang"}
    | {"language", "height", "width", "hash", "split", "file_name"}
)
# Fields of a turn by which other trainers leave an answer out of the loss.
LOSS_FIELDS = ("weight", "loss", "train")
# What is read of a turn, of a message's parts, and of the_cauldron's pairs.
TURN_FIELDS = frozenset({"from", "value", "role", "content", *LOSS_FIELDS})
TEXT_FIELDS = frozenset({"type", "text"})
PICTURE_FIELDS = frozenset({"type", "image", "image_url", "path", "url"})
PAIR_FIELDS = frozenset({"user", "assistant"})


class LayoutError(ValueError):
    """A row that has content in a layout that can't be read as it stands."""


def has_content(value: Any) -> bool:
    """Whether a field holds something: no null, empty text, empty list or `False`."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(has_content(entry) for entry in value)
    if isinstance(value, dict):
        return any(has_content(entry) for entry in value.values())
    return value is not None and value is not False


def read_row(row: Row) -> Row:
    """A row of any layout as `images`, `conversations`, `problem` and `unread`.

    Returns:
        `images` holds the row's undecoded pictures in order, `conversations` LLaVA's turns, `problem` says why the row
        can't be read as it stands (`None` if it can), and `unread` names the fields that have content which no reader
        uses, as `field` or `messages[].field`.
    """
    unread = [name for name in row if name not in READ and name not in IDENTIFYING and has_content(row[name])]
    try:
        turns, pictures_inside, unread_inside = _read_turns(row)
        images = _choose_pictures(row, pictures_inside)
        turns = _add_system(turns, row.get("system"))
        if not _is_llava(row):
            turns = _mark_pictures(turns, len(images))
    except LayoutError as error:
        return {"images": [], "conversations": None, "problem": str(error), "unread": unread}
    return {"images": images, "conversations": turns, "problem": None, "unread": unread + unread_inside}


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


def unpack_turns(turns: Any) -> Any:
    """A list of turns. `datasets.Sequence` of a dict stores them as a dict of lists, which is turned back.

    Raises:
        LayoutError: if such lists differ in length.
    """
    if not isinstance(turns, dict) or not all(isinstance(column, list) for column in turns.values()):
        return turns
    lengths = {name: len(column) for name, column in turns.items()}
    if len(set(lengths.values())) > 1:
        raise LayoutError(f"turns are stored as lists of different lengths: {lengths}")
    return [dict(zip(turns, turn, strict=True)) for turn in zip(*turns.values(), strict=True)]


class _Reader:
    """Reads the turns of one row, and collects the pictures inside and the names of what it doesn't read."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.pictures: list[Any] = []
        self.unread: set[str] = set()
        self._placeholders = 0

    def turn(self, turn: Any) -> Turn:
        """A turn in LLaVA's form; a malformed one stays as it is, so that the row's check reports it."""
        if not isinstance(turn, dict):
            return turn
        role = turn["from"] if turn.get("from") is not None else turn.get("role")
        content = turn["value"] if turn.get("value") is not None else turn.get("content")
        if not isinstance(role, str) or role not in ROLE_NAMES:
            return turn

        role = ROLE_NAMES[role]
        self._refuse_what_changes_training(turn, role)
        self._note_unread(turn, TURN_FIELDS)
        if isinstance(content, list):
            content = "\n".join(self._parts(content, role))
        return {"from": role, "value": content}

    def _refuse_what_changes_training(self, turn: Turn, role: str) -> None:
        if has_content(turn.get("tool_calls")):
            raise LayoutError("a turn has `tool_calls`, which have no place in a training text here")
        for name in LOSS_FIELDS:
            if role == "gpt" and turn.get(name) is not None and not turn[name]:
                raise LayoutError(
                    f"an answer has `{name}`: {turn[name]!r}, but every answer is trained; remove the turn"
                )

    def _parts(self, parts: list[Any], role: str) -> Iterable[str]:
        """The text of a message's parts, a mark for each picture."""
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                self._note_unread(part, TEXT_FIELDS)
                yield part["text"]
            elif kind in ("image", "image_url"):
                if role == "gpt":
                    raise LayoutError("an assistant's message holds a picture")
                self._note_unread(part, PICTURE_FIELDS)
                self._picture(part)
                yield IMAGE_MARK
            else:
                raise LayoutError(f"a message has a part that is neither text nor picture: {str(part)[:100]}")

    def _picture(self, part: dict[str, Any]) -> None:
        """Keep the part's picture. A part without one stands for the next of the row's own."""
        linked = part.get("image_url")
        linked = linked.get("url") if isinstance(linked, dict) else linked
        payloads = [part.get("image"), linked, part.get("path"), part.get("url")]
        filled = [payload for payload in payloads if has_content(payload)]
        if filled:
            self.pictures.append(filled[0])
            return
        index = part.get("index")
        if index is not None and index != self._placeholders:
            raise LayoutError(f"a part stands for picture {index} where picture {self._placeholders} would come")
        self._placeholders += 1

    def _note_unread(self, fields: dict[str, Any], read: frozenset[str]) -> None:
        if fields.keys() <= read:
            return
        for name, value in fields.items():
            if name not in read and name not in IDENTIFYING and has_content(value):
                self.unread.add(f"{self.column}[].{name}")


def _read_list(row: Row, column: str, reader: _Reader) -> Any:
    """The turns in a column; what is no list stays as it is, so that the row's check reports it."""
    turns = unpack_turns(row.get(column))
    if not isinstance(turns, list):
        return turns
    return [reader.turn(turn) for turn in turns]


def _read_prompt(row: Row, reader: _Reader) -> list[Turn]:
    """The turns of a prompt and its completion, each a text or messages; only the completion is trained."""
    turns: list[Turn] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        content = row.get(column)
        messages = [{"role": role, "content": content}] if isinstance(content, str) else unpack_turns(content)
        if not isinstance(messages, list):
            raise LayoutError(f"`{column}` is neither a text nor a list of messages")
        read = [reader.turn(message) for message in messages]
        if column == "prompt" and any(isinstance(turn, dict) and turn.get("from") == "gpt" for turn in read):
            raise LayoutError("`prompt` holds an answer, which would be trained too; give such rows as `messages`")
        turns += read
    return turns


def _read_texts(row: Row, reader: _Reader) -> list[Turn]:
    """The turns of questions and answers as the_cauldron stores them."""
    pairs = unpack_turns(row["texts"])
    turns: list[Turn] = []
    for pair in pairs if isinstance(pairs, list) else []:
        if not isinstance(pair, dict) or "user" not in pair or "assistant" not in pair:
            raise LayoutError(f'an entry of `texts` is not {{"user": ..., "assistant": ...}}: {str(pair)[:100]}')
        turns += [reader.turn({"role": role, "content": pair[role]}) for role in ("user", "assistant")]
        reader._note_unread(pair, PAIR_FIELDS)
    return turns


READERS: dict[str, Callable[[Row, _Reader], Any]] = {
    "conversations": lambda row, reader: _read_list(row, "conversations", reader),
    "messages": lambda row, reader: _read_list(row, "messages", reader),
    "prompt": _read_prompt,
    "texts": _read_texts,
}
# All columns that are read.
READ = frozenset({*READERS, "completion", "system", *PICTURE_COLUMNS})


def _layouts_of(row: Row) -> list[str]:
    return [column for column in READERS if has_content(row.get(column))]


def _is_llava(row: Row) -> bool:
    """Whether a row's turns mark their pictures themselves."""
    return _layouts_of(row) in ([], ["conversations"])


def _read_turns(row: Row) -> tuple[Any, list[Any], list[str]]:
    """A row's turns, the pictures inside them, and the names of the fields inside them that nobody reads."""
    layouts = _layouts_of(row)
    if len(layouts) > 1:
        raise LayoutError(
            f"`{layouts[0]}` and `{layouts[1]}` both have content; keep the column that is to be trained"
        )
    column = layouts[0] if layouts else "conversations"
    reader = _Reader(column)
    turns = READERS[column](row, reader)
    return turns, reader.pictures, sorted(reader.unread)


def _choose_pictures(row: Row, pictures_inside: list[Any]) -> list[Any]:
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
        if isinstance(turn, dict) and IMAGE_MARK in str(turn.get("value")):
            return turns

    marked = list(turns)
    for place, turn in enumerate(marked):
        if isinstance(turn, dict) and turn.get("from") == "human":
            marked[place] = turn | {"value": f"{IMAGE_MARK}\n" * num_images + str(turn["value"])}
            break
    return marked
