"""A row becomes chat messages, and a bad row is named with the reason."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as PILImage
from torch._utils import ExceptionWrapper
from transformers import AutoProcessor

from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from normllava.conversations.rows import BadRowError, check_row, control_token_pattern, to_messages
from row_files import COLOUR, GOOD_ROWS, turns, write_json, write_pictures


# A conversation about one picture.
CONVERSATION = turns("<image>\nWhat?", "A dog.")


def test_marks_become_image_parts_in_their_place() -> None:
    image = {"type": "image"}
    (question, _) = to_messages({"conversations": CONVERSATION})
    assert question["content"] == [image, {"type": "text", "text": "What?"}]
    (question, _) = to_messages({"conversations": turns("<image> and\n<image>", "Two.")})
    assert question["content"] == [image, {"type": "text", "text": " and"}, image]


# The fields of a bad row, by a pattern of the message about it. A row without a field `conversations` gets
# `CONVERSATION`.
BAD_ROWS: dict[str, dict[str, Any]] = {
    "image file .* is missing": {"image": "gone.png"},
    "1 <image> marks but 0 images": {"image": None},
    "0 <image> marks but 1 images": {"image": "a.png", "conversations": turns("What?", "A dog.")},
    "no assistant turn": {"image": "a.png", "conversations": turns("<image>\nWhat?")},
    "empty or not a list of turns": {"conversations": None},
    "turn 0 is not": {"conversations": [{"from": "robot", "value": "Hi."}]},
    "an assistant turn contains <image>": {"conversations": turns("What?", "<image>")},
    r"turn 1 contains <\|image_pad\|>": {"conversations": turns("What?", "I say <|image_pad|>.")},
    "image file .*/https:/example.com/a.png is missing": {"image": "https://example.com/a.png"},  # read as a path
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_named_with_the_reason(tmp_path: Path, message: str) -> None:
    """The only control token here is `<|image_pad|>`."""
    bad_row = {"conversations": CONVERSATION} | BAD_ROWS[message]
    path = write_json(tmp_path, [GOOD_ROWS[1], bad_row])
    good, bad = load_rows(str(path), str(tmp_path / "pictures"))
    check_row(good)
    with pytest.raises(BadRowError) as error:
        check_row(bad, control_tokens=re.compile(re.escape("<|image_pad|>")))
    assert error.value.source == f"{path}, row 1"
    assert re.search(message, error.value.problem)
    assert str(error.value) == f"{error.value.source}: {error.value.problem}."


@pytest.mark.parametrize(
    "question",
    [
        "<img>a.png</img>\nWhat is it?",  # Qwen-VL
        "<|image_1|>\nWhat is it?",  # Phi
        "What is in <image 1>?",  # MMMU
        "<start_of_image>What is it?",  # Gemma 3
        "![](a.png)\nWhat is it?",
        "<img src='a.png' width=3> What is it?",
        "![](data:image/png;base64,iVBORw0KGgo=) What is it?",
    ],
)
def test_a_question_with_another_tools_picture_mark_is_refused(tmp_path: Path, question: str) -> None:
    """Without its picture, the model would learn to answer blind. The picture a.png is in the image folder."""
    path = write_json(tmp_path, [{"conversations": turns(question, "A dog.")}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    with pytest.raises(BadRowError, match="and the row has no picture"):
        check_row(row)
    # A row with a picture may say so.
    with_picture = [{"image": "a.png", "conversations": turns(f"<image>\n{question}", "A dog.")}]
    (row,) = load_rows(str(write_json(tmp_path, with_picture)), str(tmp_path / "pictures"))
    check_row(row)


@pytest.mark.parametrize(
    "text",
    [
        "Why does <img src='logo.png'> show no logo?",
        "In Markdown, what does ![a logo](logo.png) write?",
        "Is <Image> an element of SVG?",
        "How do I close <img> in XHTML: <img/> or <img></img>?",
        "What do <video> and <audio> need?",
    ],
)
def test_texts_about_markup_are_no_pictures(tmp_path: Path, text: str) -> None:
    path = write_json(tmp_path, [{"conversations": turns(text, f"About {text}: see ![](a.png).")}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    check_row(row)


def test_an_empty_name_is_no_picture(tmp_path: Path) -> None:
    path = write_json(tmp_path, [{"image": "", "conversations": CONVERSATION}])
    (row,) = load_rows(str(path))
    with pytest.raises(BadRowError, match="1 <image> marks but 0 images"):
        check_row(row)


def test_a_workers_error_about_a_bad_row_keeps_its_type_and_message() -> None:
    # A data loader wraps a worker's error with `ExceptionWrapper`, and raises the error again in the main process.
    try:
        raise BadRowError("data.json, row 1", "broken")
    except BadRowError:
        wrapped_error = ExceptionWrapper(where="in a worker")  # wraps the error that is being handled
    with pytest.raises(BadRowError, match=r"data.json, row 1: broken\."):
        wrapped_error.reraise()


def text_row(question: str, answer: str) -> dict[str, Any]:
    """A row without pictures."""
    return {"images": [], "conversations": turns(question, answer), "source": "row"}


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3", "vicuna"])
def test_text_that_would_become_a_control_token_is_refused(
    family: str, make_model_folder: Callable[..., Path]
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder(text=family))
    tokenizer = processor.tokenizer
    pattern = control_token_pattern(tokenizer, processor.image_token)
    control_ids = {*tokenizer.all_special_ids, processor.image_token_id}
    control_tokens = set(tokenizer.convert_ids_to_tokens(list(control_ids)))

    for token in control_tokens - {"<image>"}:  # the image token of "vicuna", which is also the mark of a picture
        problem = f"contains {re.escape(token)}, which this model's tokenizer reads as a control"
        with pytest.raises(BadRowError, match=f"turn 0 {problem}"):
            check_row(text_row(f"Say {token}.", "No."), pattern)
        with pytest.raises(BadRowError, match=f"turn 1 {problem}"):
            check_row(text_row("Say it.", f"It is{token}"), pattern)

    # These texts only resemble control tokens.
    harmless_text = "if a < b: print('<b>|end|</b>', im_end, '</ s>', '<|im_end>', '< image_pad>')"
    check_row(text_row(harmless_text, harmless_text), pattern)


def test_the_pattern_of_a_tokenizer_without_control_tokens_matches_no_text() -> None:
    tokenizer: Any = SimpleNamespace(added_tokens_decoder={}, all_special_tokens=[])
    assert control_token_pattern(tokenizer, "<image>").search("any text") is None


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "../pictures2/secret.png"])
def test_a_path_out_of_the_image_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write_json(tmp_path, [{"image": name, "conversations": CONVERSATION}])
    (row,) = load_rows(str(path), str(tmp_path / "pictures"))
    message = r"row 0: image .* is outside the image folder .*pictures; set one that"
    with pytest.raises(BadRowError, match=message):
        check_row(row)
    with pytest.raises(BadRowError, match=message):
        open_images(row)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_json_row_may_give_a_picture_as_a_mapping_with_its_path(tmp_path: Path, streaming: bool) -> None:
    path = write_json(tmp_path, [{"images": [{"path": "a.png"}], "conversations": CONVERSATION}])
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

    colour_by_path = {
        "coco/a.png": other_colour,
        "link.png": other_colour,
        "b/../a.png": COLOUR,
        str(pictures / "a.png"): COLOUR,
    }
    path = write_json(tmp_path, [{"image": name, "conversations": CONVERSATION} for name in colour_by_path])
    rows = load_rows(str(path), str(pictures))
    for row, colour in zip(rows, colour_by_path.values(), strict=True):
        check_row(row)
        (image,) = open_images(row)
        assert image.getpixel((0, 0)) == colour
