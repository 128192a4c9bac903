"""Turns a row into token ids and labels. It opens no pictures, since every picture has the same number of tokens."""

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import LlavaProcessor

from conversations.chat_template import plain_template
from conversations.rows import BadRowError, Row, control_token_pattern, row_turns, to_messages


# The label of a token that the loss leaves out.
IGNORED = -100


@dataclass
class RowTokenizer:
    """Adds `input_ids`, `labels`, `num_images` and `length` to a row.

    - `input_ids` and `labels` are of the same length. Each picture has a single image token in them. The collator of
      training repeats it `tokens_per_image` times.
    - `length` is the number of tokens after this repetition.
    - A label is -100 unless the template marks its token with `{% generation %}`. The first token's label is always
      -100, since no token comes before it from which it could be predicted.

    Args:
        processor: The model's processor.
        chat_template: The Jinja template that writes a row as text.
        max_length: The largest `length` allowed. Longer rows are refused, never cut.
        max_positions: The decoder's number of positions. Rows with a larger `length` are refused too.

    Attributes:
        tokens_per_image: The number of image tokens that the decoder gets for each picture.
        control_tokens: A pattern of texts that rows must not contain, for `check_row`.
        is_plain_template: Whether `chat_template` is LLaVA's of stage 1. It leaves out questions, so only rows of one
            question and one answer are accepted.
    """

    processor: LlavaProcessor
    chat_template: str
    max_length: int | None = None
    max_positions: int | None = None
    tokens_per_image: int = field(init=False)
    control_tokens: re.Pattern[str] = field(init=False)
    is_plain_template: bool = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        image_token = self.processor.image_token
        self.tokens_per_image = self._count_tokens_per_image()
        self.control_tokens = control_token_pattern(tokenizer, image_token)
        self.is_plain_template = self.chat_template == plain_template(tokenizer, image_token)

    def __call__(self, row: Row) -> Row:
        """Tokenize a row that `check_row` has found good.

        Raises:
            BadRowError: if the row is too long, or has nothing that the model could be trained on.
        """
        if self.is_plain_template:
            _require_one_answer(row)

        encoded = self._encode(row)
        input_ids = encoded["input_ids"]
        num_images = input_ids.count(self.processor.image_token_id)
        length = len(input_ids) + num_images * (self.tokens_per_image - 1)
        self._check_length(row, length)

        labels = self._make_labels(input_ids, encoded["assistant_masks"])
        if all(label == IGNORED for label in labels):
            problem = "no supervised token: the template marks no answer, or the tokenizer has `trim_offsets`"
            raise BadRowError(row["source"], problem)

        return {**row, "input_ids": input_ids, "labels": labels, "num_images": num_images, "length": length}

    def expand_pictures(self, input_ids: list[int]) -> list[int]:
        """A row's `input_ids`, or their beginning, with each image token repeated `tokens_per_image` times."""
        return self.repeat_at_pictures(values=input_ids, input_ids=input_ids)

    def repeat_at_pictures(self, values: list[int], input_ids: list[int]) -> list[int]:
        """The values, with those at image tokens repeated `tokens_per_image` times.

        Args:
            values: One value for each of `input_ids`, such as its label.
            input_ids: A row's `input_ids`, in which each picture has a single image token.
        """
        repeated: list[int] = []
        for value, token in zip(values, input_ids, strict=True):
            if token == self.processor.image_token_id:
                repeated += [value] * self.tokens_per_image
            else:
                repeated.append(value)
        return repeated

    def _count_tokens_per_image(self) -> int:
        size = self.processor.image_processor.crop_size
        image_sizes = [(size["height"], size["width"])]  # of a single picture
        counts = self.processor._get_num_multimodal_tokens(image_sizes)
        return counts.num_image_tokens[0]

    def _encode(self, row: Row) -> Any:
        """The row's `input_ids`, and `assistant_masks`: for each token, 1 if the template marks it, otherwise 0."""
        try:
            return self.processor.tokenizer.apply_chat_template(
                to_messages(row), chat_template=self.chat_template, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TypeError, UnicodeError) as error:  # tokenizers raise these for text such as half a surrogate pair
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
            labels[0] = IGNORED
        return labels


def _require_one_answer(row: Row) -> None:
    """Refuse a row for LLaVA's plain template unless its turns are a question and an answer."""
    roles = [turn["from"] for turn in row_turns(row)]
    if roles != ["human", "gpt"]:
        problem = "stage 'align' takes one human turn and one gpt turn, and would drop other questions"
        raise BadRowError(row["source"], problem)
