"""How sure a model is of each word of its answer, with the picture and with a grey picture in its place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure


# How many of the first words the figure shows, and how many characters of each.
MAX_WORDS = 12
MAX_CHARACTERS = 16


@dataclass(frozen=True)
class Word:
    """A word of an answer.

    Attributes:
        text: The word.
        with_picture: The word's probability after the question and the words before it, from 0 to 1.
        with_grey: The word's probability with a grey picture in place of the picture.
    """

    text: str
    with_picture: float
    with_grey: float


def score_words(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    grey_inputs: Mapping[str, torch.Tensor],
    answer_ids: torch.Tensor,
) -> list[Word]:
    """The words of a model's answer with their probabilities.

    Args:
        model: The model.
        tokenizer: The model's tokenizer.
        inputs: The question with the picture, as the processor returns it.
        grey_inputs: The question with a grey picture of the same size.
        answer_ids: The tokens of the answer, `(num_answer_tokens,)`.
    """
    with_picture = score_tokens(model, inputs, answer_ids)  # [num_answer_tokens]
    with_grey = score_tokens(model, grey_inputs, answer_ids)  # [num_answer_tokens]

    words = []
    for text, indices in split_into_words(tokenizer, answer_ids.tolist()):
        # A word is as likely as all of its tokens together.
        word = Word(
            text=text,
            with_picture=with_picture[indices].prod().item(),
            with_grey=with_grey[indices].prod().item(),
        )
        words.append(word)
    return words


@torch.no_grad()
def score_tokens(model: Any, inputs: Mapping[str, torch.Tensor], answer_ids: torch.Tensor) -> torch.Tensor:
    """The probability of each token of an answer, given all tokens before the token, `(num_answer_tokens,)`."""
    input_ids = torch.cat([inputs["input_ids"], answer_ids[None]], dim=1)  # [1, num_prompt_tokens + num_answer_tokens]
    logits = model(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        pixel_values=inputs["pixel_values"],
    ).logits

    # The logits at a token predict the next token.
    num_answer_tokens = len(answer_ids)
    answer_logits = logits[0, -num_answer_tokens - 1 : -1].float()  # [num_answer_tokens, vocab_size]
    probabilities = answer_logits.softmax(dim=-1)
    answer_probabilities = probabilities.gather(1, answer_ids[:, None])  # [num_answer_tokens, 1]
    return answer_probabilities[:, 0].cpu()


def split_into_words(tokenizer: Any, answer_ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """The words of an answer, each with the indices of its tokens. Special tokens belong to no word."""
    starts: list[int] = []  # where each word starts in the answer's text
    indices_by_word: list[list[int]] = []
    text = ""
    for index, token_id in enumerate(answer_ids):
        if token_id in tokenizer.all_special_ids:
            continue

        # A token may be only a part of a character, so the whole text up to the token is decoded.
        start = len(text)
        text = tokenizer.decode(answer_ids[: index + 1], skip_special_tokens=True)
        starts_word = not starts or text[start : start + 1].isspace()
        if starts_word:
            starts.append(start)
            indices_by_word.append([index])
        else:
            indices_by_word[-1].append(index)

    # Each word ends where the next word starts, and the last word at the end of the text.
    bounds = pairwise([*starts, len(text)])
    words = []
    for (start, end), indices in zip(bounds, indices_by_word, strict=True):
        word = text[start:end].strip()
        if word:  # white space alone is no word
            words.append((word, indices))
    return words


def draw_words(words: Sequence[Word]) -> Figure:
    """Draw two bars for each of the first words: its probability with the picture, and with a grey picture."""
    shown_words = words[:MAX_WORDS]
    height = 1.4 + 0.5 * len(shown_words)  # inches for the legend and the axis, and for each word
    figure = Figure(figsize=(6, height), layout="constrained")
    axis = figure.subplots()
    rows = range(len(shown_words))
    # The two bars of a word lie above and below the middle of its row.
    axis.barh(
        [row - 0.2 for row in rows],
        [100 * word.with_picture for word in shown_words],
        height=0.38,
        color="#d55e00",
        label="with your picture",
    )
    axis.barh(
        [row + 0.2 for row in rows],
        [100 * word.with_grey for word in shown_words],
        height=0.38,
        color="#999999",
        label="with a grey picture",
    )

    labels = [shorten(word.text) for word in shown_words]
    # Without `parse_math=False`, matplotlib would set text between two "$" as a formula.
    axis.set_yticks(rows, labels, parse_math=False)
    axis.invert_yaxis()  # the first word is at the top
    axis.set_xlim(0, 100)
    axis.set_xlabel("how sure the model is of the word, in %")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def shorten(text: str) -> str:
    """A word's text. A long text is cut off and gets a "…"."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[: MAX_CHARACTERS - 1]}…"
