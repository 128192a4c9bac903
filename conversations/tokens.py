"""From a row to token ids and labels, without opening pictures: their number of tokens is known."""

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import LlavaProcessor

from conversations.chat_template import plain_template
from conversations.rows import BadRowError, Row, control_tokens, row_turns, to_messages


# The label of a token that the loss leaves out.
IGNORED = -100


@dataclass
class RowTokenizer:
    """Gives a row `input_ids` and `labels` of the same length, `num_images` and `length`.

    There is one image token a picture, which the collator repeats `tokens_per_image` times; `length` counts them all.
    Labels are -100 except for what the template marks with `{% generation %}`, and at the first token, which nothing
    predicts.

    Args:
        processor: The model's processor.
        chat_template: Jinja template that says what a row looks like.
        max_length: Largest sample allowed, in tokens. Samples are never cut.
        max_positions: The decoder's number of positions: it was not made for larger samples.
    """

    processor: LlavaProcessor
    chat_template: str
    max_length: int | None = None
    max_positions: int | None = None
    tokens_per_image: int = field(init=False)
    control_tokens: re.Pattern[str] = field(init=False)
    # Whether the template is LLaVA's, which reads no question: a conversation would lose its questions.
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        image_token = self.processor.image_token
        self.tokens_per_image = self._count_tokens_per_image()
        self.control_tokens = control_tokens(tokenizer, image_token)
        self.plain = self.chat_template == plain_template(tokenizer, image_token)

    def __call__(self, row: Row) -> Row:
        """Tokenize a row that `check_row` has found good.

        Raises:
            BadRowError: if the model can't learn from it.
        """
        if self.plain:
            _require_one_answer(row)

        encoded = self._encode(row)
        input_ids = encoded["input_ids"]
        num_images = input_ids.count(self.processor.image_token_id)
        length = len(input_ids) + num_images * (self.tokens_per_image - 1)
        self._check_length(row, length)

        labels = self._mask_labels(input_ids, encoded["assistant_masks"])
        if all(label == IGNORED for label in labels):
            problem = "no supervised token: the template marks no answer, or the tokenizer has `trim_offsets`"
            raise BadRowError(row["source"], problem)

        return {**row, "input_ids": input_ids, "labels": labels, "num_images": num_images, "length": length}

    def expand_pictures(self, input_ids: list[int]) -> list[int]:
        """A row's `input_ids`, or their beginning, with as many image tokens as its pictures have."""
        return self.repeat_at_pictures(input_ids, input_ids)

    def repeat_at_pictures(self, values: list[int], input_ids: list[int]) -> list[int]:
        """One value for each of a row's `input_ids`, such as its label; a picture's as often as it has tokens."""
        repeated: list[int] = []
        for value, token in zip(values, input_ids, strict=True):
            if token == self.processor.image_token_id:
                repeated += [value] * self.tokens_per_image
            else:
                repeated.append(value)
        return repeated

    def _count_tokens_per_image(self) -> int:
        size = self.processor.image_processor.crop_size
        counts = self.processor._get_num_multimodal_tokens([(size["height"], size["width"])])
        return counts.num_image_tokens[0]

    def _encode(self, row: Row) -> Any:
        """The row's `input_ids`, one image token a picture, and `assistant_masks`."""
        try:
            return self.processor.tokenizer.apply_chat_template(
                to_messages(row), chat_template=self.chat_template, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TypeError, UnicodeError) as error:  # the tokenizer's, of text such as half a surrogate pair
            raise BadRowError(row["source"], f"the text can't be tokenized ({error!a})") from error

    def _check_length(self, row: Row, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise BadRowError(row["source"], f"{length} tokens, more than max_length {self.max_length}")

        if self.max_positions is not None and length > self.max_positions:
            limit = f"the decoder has {self.max_positions} positions; max_length can only lower that"
            raise BadRowError(row["source"], f"{length} tokens, but {limit}")

    def _mask_labels(self, input_ids: list[int], is_trained: list[int]) -> list[int]:
        """The labels: the tokens that are trained, and -100 elsewhere."""
        labels = []
        for token, trained in zip(input_ids, is_trained, strict=True):
            # The mask is made from characters: in LLaVA's plain format it can reach the picture before the answer.
            is_image_token = token == self.processor.image_token_id
            labels.append(token if trained and not is_image_token else IGNORED)

        labels[:1] = [IGNORED]
        return labels


def _require_one_answer(row: Row) -> None:
    """Refuse a conversation for LLaVA's plain template."""
    roles = [turn["from"] for turn in row_turns(row)]
    if roles != ["human", "gpt"]:
        problem = "stage 'align' takes one human turn and one gpt turn, and would drop other questions"
        raise BadRowError(row["source"], problem)
