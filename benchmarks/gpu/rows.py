"""Rows and pictures that training is timed on, made here and the same every time.

Their lengths are drawn, to be like data that people train on, and not measured on any:
- captions: a picture, and a caption of around `answer` tokens;
- conversations: a question and an answer. Texts are log-normal, so that a few are many times as long as most, as in
  LLaVA-NeXT's mixture, and one row in ten has no picture.
A text is letters at random, each a token (see `byte_tokenizer`).
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
    """Median numbers of tokens of a question, an answer and a caption; `spread` is the log-normal's sigma."""

    question: int
    answer: int
    caption: int
    spread: float
    longest: int
    """No text is longer."""


# Around 70 tokens a conversation with the template and 36 image tokens.
EMOJI_LIKE = Lengths(question=9, answer=5, caption=5, spread=0.6, longest=60)
# Around 1000 tokens a conversation with the template and 729 image tokens, the longest rows above 2000.
LLAVA_LIKE = Lengths(question=60, answer=120, caption=40, spread=0.9, longest=1400)
# For rehearsals, with the spread of the others.
TINY = Lengths(question=6, answer=6, caption=5, spread=0.6, longest=20)


def write_rows(folder: Path, num_rows: int, picture_size: int, lengths: Lengths) -> None:
    """Write `captions.json`, `conversations.json`, and a picture for each row."""
    rng = np.random.default_rng(0)
    captions = []
    conversations = []
    for number in range(num_rows):
        name = f"{number}.png"
        make_picture(rng, picture_size).save(folder / name, compress_level=1)

        caption = random_text(rng, lengths.caption, lengths)
        captions.append(make_row(name, "What is this?", caption))

        question = random_text(rng, lengths.question, lengths)
        answer = random_text(rng, lengths.answer, lengths)
        has_picture = number % 10 != 9
        conversations.append(make_row(name if has_picture else None, question, answer))

    (folder / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    (folder / "conversations.json").write_text(json.dumps(conversations), encoding="utf-8")


def make_row(picture: str | None, question: str, answer: str) -> dict[str, Any]:
    """A row in LLaVA's layout."""
    if picture is not None:
        question = f"<image>\n{question}"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    if picture is None:
        return {"conversations": turns}
    return {"conversations": turns, "image": picture}


def random_text(rng: np.random.Generator, median: int, lengths: Lengths) -> str:
    """Letters, as many as a log-normal draw says."""
    count = int(np.clip(rng.lognormal(np.log(median), lengths.spread), 1, lengths.longest))
    # Spaces at the ends would be stripped.
    return "a" + "".join(rng.choice(LETTERS, count)) + "z"


def make_picture(rng: np.random.Generator, size: int) -> Image.Image:
    """Coarse noise, so that a PNG of it neither vanishes nor explodes."""
    cells = math.ceil(size / 4)
    pixels = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(4, axis=0).repeat(4, axis=1)[:size, :size])
