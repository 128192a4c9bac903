"""Makes the rows and pictures that training is timed on. Every call makes the same rows and pictures.

There are two files of rows:
- captions.json: each row has a picture and a caption;
- conversations.json: each row has a question and an answer, and nine rows of ten have a picture.

The lengths of texts are drawn from a log-normal distribution: a few texts are many times as long as most, as in
LLaVA-NeXT's mixture. Its parameters are guesses, not measured on any data. A text is random letters, and each letter
is a token (see `byte_tokenizer` in models.py).
"""

import json
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


LETTERS = np.array(list(string.ascii_lowercase + " "))


@dataclass(frozen=True)
class Lengths:
    """The distributions of the lengths of texts, in tokens."""

    question: int
    """Median length of a question."""
    answer: int
    """Median length of an answer."""
    caption: int
    """Median length of a caption."""
    spread: float
    """Sigma of the log-normal distributions."""
    longest: int
    """The largest length, to which longer draws are cut."""


# With these lengths a conversation has around 70 tokens, of which 36 are image tokens.
EMOJI_LENGTHS = Lengths(question=9, answer=5, caption=5, spread=0.6, longest=60)
# With these lengths a conversation has around 1000 tokens, of which 729 are image tokens. The longest have over 2000.
LLAVA_LENGTHS = Lengths(question=60, answer=120, caption=40, spread=0.9, longest=1400)
# For rehearsals on a CPU.
TINY_LENGTHS = Lengths(question=6, answer=6, caption=5, spread=0.6, longest=20)


def write_rows(folder: Path, num_rows: int, picture_size: int, lengths: Lengths) -> None:
    """Write `captions.json`, `conversations.json`, and a picture for each row."""
    rng = np.random.default_rng(0)
    captions = []
    conversations = []
    for number in range(num_rows):
        name = f"{number}.png"
        make_picture(rng, picture_size).save(folder / name, compress_level=1)  # 1 is the fastest

        caption = random_text(rng, lengths.caption, lengths)
        captions.append(make_row(name, "What is this?", caption))

        question = random_text(rng, lengths.question, lengths)
        answer = random_text(rng, lengths.answer, lengths)
        has_picture = number % 10 != 9  # nine rows of ten
        picture = name if has_picture else None
        conversations.append(make_row(picture, question, answer))

    (folder / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    (folder / "conversations.json").write_text(json.dumps(conversations), encoding="utf-8")


def make_row(picture: str | None, question: str, answer: str) -> dict[str, Any]:
    """A row in LLaVA's layout. `picture` is the name of a picture's file, or `None`."""
    if picture is not None:
        question = f"<image>\n{question}"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    row: dict[str, Any] = {"conversations": turns}
    if picture is not None:
        row["image"] = picture
    return row


def random_text(rng: np.random.Generator, median: int, lengths: Lengths) -> str:
    """Random letters and spaces. Their number is drawn around `median`, with the spread and the limit in `lengths`."""
    drawn = rng.lognormal(np.log(median), lengths.spread)
    count = int(np.clip(drawn, 1, lengths.longest))
    # One more letter stands at each end, because a space at an end would be stripped.
    return "a" + "".join(rng.choice(LETTERS, count)) + "z"


def make_picture(rng: np.random.Generator, size: int) -> Image.Image:
    """A picture of cells of 4 x 4 pixels in random colours, whose PNG is about as large as a photograph's."""
    num_cells = math.ceil(size / 4)
    colours = rng.integers(0, 256, (num_cells, num_cells, 3), dtype=np.uint8)
    pixels = colours.repeat(4, axis=0).repeat(4, axis=1)  # [4 * num_cells, 4 * num_cells, 3]
    return Image.fromarray(pixels[:size, :size])
