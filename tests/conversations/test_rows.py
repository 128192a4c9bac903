"""What a row says, and telling people which row is bad and why."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage
from torch._utils import ExceptionWrapper
from transformers import AutoProcessor

from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, check_row, control_tokens, to_messages
from row_files import GOOD_ROWS, turns, write_json


ASKED = turns("<image>\nWhat?", "A dog.")


def test_marks_become_parts_in_their_place(tmp_path: Path) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)))
    image = {"type": "image"}
    assert to_messages(rows[0])[0]["content"] == [image, {"type": "text", "text": "What?"}]
    assert to_messages(rows[2])[0]["content"] == [image, {"type": "text", "text": " and"}, image]


BAD_ROWS: dict[str, dict[str, Any]] = {
    "image file .* is missing": {"image": "gone.png"},
    "1 <image> marks but 0 image": {"image": None},
    "0 <image> marks but 1 images": {"image": "a.png", "conversations": turns("What?", "A dog.")},
    "no assistant turn": {"image": "a.png", "conversations": turns("<image>\nWhat?")},
    "empty or not a list of turns": {"conversations": None},
    "turn 0 is not": {"conversations": [{"from": "robot", "value": "Hi."}]},
    "an assistant turn contains <image>": {"conversations": turns("What?", "<image>")},
    r"turn 1 contains <\|image_pad\|>": {"conversations": turns("What?", "I say <|image_pad|>.")},
    "1 <image> marks but 0 images": {"image": ""},
    "image file .*/https:/example.com/a.png is missing": {"image": "https://example.com/a.png"},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_named_with_the_reason(tmp_path: Path, message: str) -> None:
    path = write_json(tmp_path, [GOOD_ROWS[1], {"conversations": ASKED, **BAD_ROWS[message]}])
    good, row = load_rows(str(path), str(tmp_path / "pictures"))
    check_row(good)
    with pytest.raises(BadRowError) as error:
        check_row(row, re.compile(re.escape("<|image_pad|>")))
    assert error.value.source == f"{path}, row 1"
    assert re.search(message, error.value.problem)
    assert str(error.value) == f"{error.value.source}: {error.value.problem}."


def test_a_bad_row_is_one_too_where_another_process_found_it() -> None:
    try:
        raise BadRowError("data.json, row 1", "broken")
    except BadRowError:
        wrapped = ExceptionWrapper(where="in a worker")  # as a data loader hands it over
    with pytest.raises(BadRowError, match=r"data.json, row 1: broken\."):
        wrapped.reraise()


@pytest.mark.parametrize("text", ["qwen2", "llama", "gemma3", "vicuna"])
def test_text_that_would_become_a_control_token_is_refused(text: str, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed(text=text))
    tokenizer = processor.tokenizer
    tokens = control_tokens(tokenizer, processor.image_token)
    special_ids = {*tokenizer.all_special_ids, processor.image_token_id}
    special_tokens = set(tokenizer.convert_ids_to_tokens(list(special_ids)))

    for token in special_tokens - {"<image>"}:
        asked = turns(f"Say {token}.", "No.")
        answered = turns("Say it.", f"It is{token}")
        for number, conversation in enumerate((asked, answered)):
            message = rf"turn {number} contains {re.escape(token)}, which this model's tokenizer reads as a control"
            with pytest.raises(BadRowError, match=message):
                check_row({"images": [], "conversations": conversation, "source": "row"}, tokens)

    harmless = "if a < b: print('<b>|end|</b>', im_end, '</ s>', '<|im_end>', '< image_pad>')"
    check_row({"images": [], "conversations": turns(harmless, harmless), "source": "row"}, tokens)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "../pictures2/secret.png"])
def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, [{"image": name, "conversations": ASKED}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    for look in (check_row, open_images):
        with pytest.raises(BadRowError, match=r"row 0: image .* is outside the image folder .*pictures; set one that"):
            look(row)


def test_paths_inside_the_folder_may_be_links_to_other_disks(tmp_path: Path) -> None:
    """Such as `ln -s /disk2/coco data/coco`."""
    (tmp_path / "disk2" / "coco").mkdir(parents=True)
    PILImage.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "disk2" / "coco" / "a.png")
    names = ["coco/a.png", "link.png", "b/../a.png", str(tmp_path / "pictures" / "a.png")]
    path = write_json(tmp_path, [{"image": name, "conversations": ASKED} for name in names])
    (tmp_path / "pictures" / "coco").symlink_to(tmp_path / "disk2" / "coco")
    (tmp_path / "pictures" / "link.png").symlink_to("../disk2/coco/a.png")
    rows = load_rows(str(path), str(tmp_path / "pictures"))
    for row in rows:
        check_row(row)
    assert [open_images(row)[0].getpixel((0, 0))[0] for row in rows] == [9, 9, 1, 1]
