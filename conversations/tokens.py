"""From a row to token ids and labels, without opening pictures: their number of tokens is known."""

import re
from dataclasses import dataclass, field

from transformers import LlavaProcessor

from conversations.chat_template import plain_template
from conversations.rows import BadRowError, Row, control_tokens, row_turns, to_messages


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
        max_length: Longest sample allowed, in tokens. Samples are never cut.
        max_positions: The decoder's number of positions: it was not made for longer samples.
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
        size = self.processor.image_processor.crop_size
        counts = self.processor._get_num_multimodal_tokens([(size["height"], size["width"])])
        (self.tokens_per_image,) = counts.num_image_tokens
        tokenizer, image_token = self.processor.tokenizer, self.processor.image_token
        self.control_tokens = control_tokens(tokenizer, image_token)
        self.plain = self.chat_template == plain_template(tokenizer, image_token)

    def __call__(self, row: Row) -> Row:
        """Tokenize a row that `check_row` has found good. Raises `BadRowError` if the model can't learn from it."""
        if self.plain and [turn["from"] for turn in row_turns(row)] != ["human", "gpt"]:
            problem = "stage 'align' takes one human turn and one gpt turn, and would drop other questions"
            raise BadRowError(row["source"], problem)
        try:
            encoded = self.processor.tokenizer.apply_chat_template(
                to_messages(row), chat_template=self.chat_template, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TypeError, UnicodeError) as error:  # such as half a surrogate pair
            raise BadRowError(row["source"], f"the text can't be tokenized ({error!a})") from error
        input_ids, image_id = encoded["input_ids"], self.processor.image_token_id
        # The mask is per character, and a picture may be adjacent to the answer in LLaVA's plain format.
        labels = [
            token if trained and token != image_id else IGNORED
            for token, trained in zip(input_ids, encoded["assistant_masks"], strict=True)
        ]
        labels[:1] = [IGNORED]
        num_images = input_ids.count(image_id)
        length = len(input_ids) + num_images * (self.tokens_per_image - 1)
        if self.max_length is not None and length > self.max_length:
            raise BadRowError(row["source"], f"{length} tokens, more than max_length {self.max_length}")
        if self.max_positions is not None and length > self.max_positions:
            problem = (
                f"{length} tokens, but the decoder has {self.max_positions} positions; max_length can only lower that"
            )
            raise BadRowError(row["source"], problem)
        if all(label == IGNORED for label in labels):
            problem = "no supervised token: the template marks no answer, or the tokenizer has `trim_offsets`"
            raise BadRowError(row["source"], problem)
        return {**row, "input_ids": input_ids, "labels": labels, "num_images": num_images, "length": length}

    def expand_pictures(self, tokens: list[int], like: list[int] | None = None) -> list[int]:
        """`input_ids` of a row, or their beginning, with as many image tokens as the pictures have; or their labels,
        if these are given as `like`."""
        image_id, expanded = self.processor.image_token_id, []
        for token, value in zip(tokens, like or tokens, strict=True):
            expanded += [value] * (self.tokens_per_image if token == image_id else 1)
        return expanded
