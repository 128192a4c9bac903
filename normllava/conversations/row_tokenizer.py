"""Turns a row into token ids and labels, without opening its pictures."""

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import LlavaProcessor

from normllava.conversations.chat_template import plain_template
from normllava.conversations.rows import BadRowError, Row, control_token_pattern, row_turns, to_messages
from normllava.conversations.tiles import cuts_tiles, tile_options
from normllava.tokens import IGNORED


@dataclass
class RowTokenizer:
    """Adds `input_ids`, `labels`, `tiles_per_image`, `num_tiles` and `length` to a row.

    - `input_ids` and `labels` are of the same length. Each picture has a single token in `input_ids`, the image token.
      The training collator repeats this token `tokens_per_tile` times for each tile of the picture.
    - `tiles_per_image` has the number of tiles of each picture, and `num_tiles` is their sum. A thumbnail is a tile
      too, and a picture that isn't cut is one tile.
    - `length` is the number of tokens after the image tokens are repeated.
    - A label is -100 unless the template marks its token with `{% generation %}`. The first token's label is always
      -100, and so are those of an answer without text: it would train only the token that ends a turn.

    Args:
        processor: The model's processor.
        chat_template: The Jinja template that writes a row as text.
        max_length: The largest `length` allowed. Longer rows are refused, never cut.
        max_positions: The decoder's number of positions. Rows with a larger `length` are refused too.
        max_tiles: The largest number of tiles that a picture is cut into; `None` stands for the image processor's own.

    Attributes:
        tokens_per_tile: The number of image tokens that the decoder gets for each tile.
        control_tokens: A pattern of texts that rows must not contain, for `check_row`.
        is_plain_template: Whether `chat_template` is that of LLaVA's stage 1. This template leaves questions out, so
            only rows of one question and one answer are accepted.
    """

    processor: LlavaProcessor
    chat_template: str
    max_length: int | None = None
    max_positions: int | None = None
    max_tiles: int | None = None
    tokens_per_tile: int = field(init=False)
    control_tokens: re.Pattern[str] = field(init=False)
    is_plain_template: bool = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        image_token = self.processor.image_token
        self.tokens_per_tile = self._count_tokens_per_tile()
        self.control_tokens = control_token_pattern(tokenizer, image_token)
        self.is_plain_template = self.chat_template == plain_template(tokenizer, image_token)

    @property
    def needs_image_sizes(self) -> bool:
        """Whether a picture's number of tokens depends on its size."""
        return cuts_tiles(self.processor.image_processor)

    def __call__(self, row: Row, image_sizes: list[tuple[int, int]] | None = None) -> Row:
        """Tokenize a row that `check_row` has found good.

        Args:
            row: The row.
            image_sizes: Width and height of each picture; required if `needs_image_sizes` is true.

        Raises:
            BadRowError: if the row is too long, or has nothing that the model could be trained on.
        """
        if self.is_plain_template:
            _require_one_answer(row)

        encoded = self._encode(row)
        input_ids = encoded["input_ids"]
        num_images = input_ids.count(self.processor.image_token_id)
        tiles_per_image = self._count_tiles(num_images, image_sizes)
        num_tiles = sum(tiles_per_image)

        # Each picture's token is replaced by the tokens of its tiles.
        length = len(input_ids) - num_images + num_tiles * self.tokens_per_tile
        self._check_length(row, length)

        labels = self._make_labels(input_ids, encoded["assistant_masks"])
        if all(label == IGNORED for label in labels):
            problem = "no supervised token: the template marks no answer, or the tokenizer has `trim_offsets`"
            raise BadRowError(row["source"], problem)

        return {
            **row,
            "input_ids": input_ids,
            "labels": labels,
            "tiles_per_image": tiles_per_image,
            "num_tiles": num_tiles,
            "length": length,
        }

    def repeat_at_pictures(self, values: list[int], row: Row) -> list[int]:
        """The values, repeated where the collator repeats image tokens.

        Args:
            values: One value for each of the row's `input_ids`, such as the labels.
            row: A tokenized row.
        """
        tiles_per_image = iter(row["tiles_per_image"])
        repeated: list[int] = []
        for value, token in zip(values, row["input_ids"], strict=True):
            if token == self.processor.image_token_id:
                num_tokens = next(tiles_per_image) * self.tokens_per_tile
                repeated += [value] * num_tokens
            else:
                repeated.append(value)
        return repeated

    def _count_tokens_per_tile(self) -> int:
        """The number of image tokens of a picture that isn't cut, and so is one tile."""
        image_processor = self.processor.image_processor
        # Composing gives every image processor a `crop_size`: the size of the pictures that the vision encoder takes.
        tile_size = (image_processor.crop_size["height"], image_processor.crop_size["width"])
        leave_whole = tile_options(image_processor, max_tiles=1)
        counts = self.processor._get_num_multimodal_tokens([tile_size], **leave_whole)
        return counts.num_image_tokens[0]

    def _count_tiles(self, num_images: int, image_sizes: list[tuple[int, int]] | None) -> list[int]:
        """The number of tiles of each of a row's pictures; `image_sizes` are those of `__call__`."""
        if not self.needs_image_sizes:
            return [1] * num_images

        assert image_sizes is not None, "the pictures' sizes are needed to count their tiles"
        heights_and_widths = [(height, width) for width, height in image_sizes]
        options = tile_options(self.processor.image_processor, self.max_tiles)
        counts = self.processor._get_num_multimodal_tokens(heights_and_widths, **options)
        return counts.num_image_patches or []  # `None` if there are no pictures

    def _encode(self, row: Row) -> Any:
        """The row's `input_ids`, and `assistant_masks`: for each token, 1 if the template marks it, otherwise 0."""
        try:
            return self.processor.tokenizer.apply_chat_template(
                to_messages(row), chat_template=self.chat_template, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TypeError, UnicodeError) as error:  # tokenizers raise these for text such as half a surrogate pair
            # `!a` writes the error in ASCII, since it may quote that text.
            raise BadRowError(row["source"], f"the text can't be tokenized ({error!a})") from error

    def _check_length(self, row: Row, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise BadRowError(row["source"], f"{length} tokens, more than max_length {self.max_length}")

        if self.max_positions is not None and length > self.max_positions:
            limit = f"the decoder has {self.max_positions} positions; max_length can only lower that"
            problem = f"{length} tokens, but {limit}"
            raise BadRowError(row["source"], problem)

    def _make_labels(self, input_ids: list[int], assistant_masks: list[int]) -> list[int]:
        """The label of each token: the token's own id if it is trained, otherwise -100."""
        labels = []
        for token, is_marked in zip(input_ids, assistant_masks, strict=True):
            # transformers finds the marked tokens by the characters of the text. In LLaVA's plain format, where the
            # answer directly follows the picture, the image token can count as marked too.
            is_image_token = token == self.processor.image_token_id
            is_trained = is_marked and not is_image_token
            labels.append(token if is_trained else IGNORED)

        if labels:
            labels[0] = IGNORED  # no token comes before the first, so nothing predicts it
        self._ignore_empty_answers(labels)
        return labels

    def _ignore_empty_answers(self, labels: list[int]) -> None:
        """Set the labels of each answer that has no text to -100. An answer is a run of labels that aren't -100."""
        start = 0
        for is_answer, answer in groupby(labels, key=lambda label: label != IGNORED):
            end = start + len(list(answer))
            if is_answer:
                text = self.processor.tokenizer.decode(labels[start:end], skip_special_tokens=True)
                if not text.strip():
                    labels[start:end] = [IGNORED] * (end - start)
            start = end


def _require_one_answer(row: Row) -> None:
    """Refuse a row for LLaVA's plain template (stage "align") unless its turns are one question and one answer."""
    roles = [turn["from"] for turn in row_turns(row)]
    if roles != ["human", "gpt"]:
        problem = "stage 'align' takes one human turn and one gpt turn, and would drop other questions"
        raise BadRowError(row["source"], problem)
