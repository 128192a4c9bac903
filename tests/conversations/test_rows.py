"""What a row says: its turns as messages."""

from pathlib import Path

from conversations.loading import load_rows
from conversations.rows import to_messages
from row_files import GOOD_ROWS, write_json


def test_marks_become_parts_in_their_place(tmp_path: Path) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)))
    image = {"type": "image"}
    assert to_messages(rows[0])[0]["content"] == [image, {"type": "text", "text": "What?"}]
    assert to_messages(rows[2])[0]["content"] == [image, {"type": "text", "text": " and"}, image]
