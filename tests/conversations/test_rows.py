"""What a row says to the model, and that a bad row is named with the reason."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as PILImage
from torch._utils import ExceptionWrapper
from transformers import AutoProcessor

from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, check_row, control_token_pattern, to_messages
from row_files import COLOUR, GOOD_ROWS, turns, write_json, write_pictures


ASKED = turns("<image>\nWhat?", "A dog.")


def test_marks_become_parts_in_their_place(tmp_path: Path) -> None:
    rows = load_rows(str(write_json(tmp_path, GOOD_ROWS)))
    image = {"type": "image"}
    assert to_messages(rows[0])[0]["content"] == [image, {"type": "text", "text": "What?"}]
    assert to_messages(rows[2])[0]["content"] == [image, {"type": "text", "text": " and"}, image]


# The fields of a bad row, by a pattern of the message about it. Without `conversations` they are `ASKED`.
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
    bad_row = {"conversations": ASKED} | BAD_ROWS[message]
    path = write_json(tmp_path, [GOOD_ROWS[1], bad_row])
    good, bad = load_rows(str(path), str(tmp_path / "pictures"))
    check_row(good)
    with pytest.raises(BadRowError) as error:
        check_row(bad, control_tokens=re.compile(re.escape("<|image_pad|>")))
    assert error.value.source == f"{path}, row 1"
    assert re.search(message, error.value.problem)
    assert str(error.value) == f"{error.value.source}: {error.value.problem}."


def test_a_workers_error_about_a_bad_row_keeps_its_type_and_message() -> None:
    try:
        raise BadRowError("data.json, row 1", "broken")
    except BadRowError:
        wrapped = ExceptionWrapper(where="in a worker")  # a data loader passes errors of its workers on in this way
    with pytest.raises(BadRowError, match=r"data.json, row 1: broken\."):
        wrapped.reraise()


@pytest.mark.parametrize("text", ["qwen2", "llama", "gemma3", "vicuna"])
def test_text_that_would_become_a_control_token_is_refused(text: str, composed: Callable[..., Path]) -> None:
    processor = AutoProcessor.from_pretrained(composed(text=text))
    tokenizer = processor.tokenizer
    tokens = control_token_pattern(tokenizer, processor.image_token)
    special_ids = {*tokenizer.all_special_ids, processor.image_token_id}
    special_tokens = set(tokenizer.convert_ids_to_tokens(list(special_ids)))

    for token in special_tokens - {"<image>"}:
        in_question = turns(f"Say {token}.", "No.")
        in_answer = turns("Say it.", f"It is{token}")
        for turn_number, conversation in enumerate((in_question, in_answer)):
            message = (
                f"turn {turn_number} contains {re.escape(token)}, which this model's tokenizer reads as a control"
            )
            with pytest.raises(BadRowError, match=message):
                check_row({"images": [], "conversations": conversation, "source": "row"}, tokens)

    harmless = "if a < b: print('<b>|end|</b>', im_end, '</ s>', '<|im_end>', '< image_pad>')"
    check_row({"images": [], "conversations": turns(harmless, harmless), "source": "row"}, tokens)


def test_a_tokenizer_without_control_tokens_finds_none() -> None:
    tokenizer: Any = SimpleNamespace(added_tokens_decoder={}, all_special_tokens=[])
    assert control_token_pattern(tokenizer, "<image>").search("any text") is None


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "../pictures2/secret.png"])
def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, [{"image": name, "conversations": ASKED}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    for check_or_open in (check_row, open_images):
        with pytest.raises(BadRowError, match=r"row 0: image .* is outside the image folder .*pictures; set one that"):
            check_or_open(row)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_json_row_may_give_a_picture_as_a_mapping_with_its_path(tmp_path: Path, streaming: bool) -> None:
    path = write_json(tmp_path, [{"images": [{"path": "a.png"}], "conversations": ASKED}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"), streaming=streaming)
    check_row(row)
    (image,) = open_images(row)
    assert image.getpixel((0, 0)) == COLOUR


def test_paths_inside_the_folder_may_be_links_to_other_disks(tmp_path: Path) -> None:
    """People link folders of pictures, as with `ln -s /disk2/coco pictures/coco`."""
    other_colour = (9, 9, 9)
    other_disk = tmp_path / "disk2" / "coco"
    other_disk.mkdir(parents=True)
    PILImage.new("RGB", (4, 4), other_colour).save(other_disk / "a.png")
    pictures = write_pictures(tmp_path)
    (pictures / "coco").symlink_to(other_disk)
    (pictures / "link.png").symlink_to("../disk2/coco/a.png")

    colours = {
        "coco/a.png": other_colour,
        "link.png": other_colour,
        "b/../a.png": COLOUR,
        str(pictures / "a.png"): COLOUR,
    }
    path = write_json(tmp_path, [{"image": name, "conversations": ASKED} for name in colours])
    rows = load_rows(str(path), str(pictures))
    for row, colour in zip(rows, colours.values(), strict=True):
        check_row(row)
        (image,) = open_images(row)
        assert image.getpixel((0, 0)) == colour
