"""From a row to token ids and labels, without opening pictures: their number of tokens is known."""

import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import transformers
from transformers import LlavaProcessor

from conversations.chat_template import plain_template
from conversations.files import sha256
from conversations.rows import BadRowError, Row, row_turns, to_messages


IGNORED = -100


@dataclass
class RowTokenizer:
    """Gives a row `input_ids` and `labels` of the same length, `num_images` and `length`.

    There is one image token a picture, which the collator repeats as often as a picture has tokens; `length` counts
    them all. Labels are -100 except for what the template marks with `{% generation %}`; the first is always -100,
    since there is nothing before it to predict it from.

    Args:
        processor: The model's processor.
        chat_template: Jinja template that says what a row looks like.
        max_length: Longest sample allowed, in tokens. Samples are never cut; `None` allows any length.

    Attributes:
        tokens_per_image: Image tokens of a picture.
        plain: Whether the template is LLaVA's plain one, which reads no question, so that rows may hold only one.
    """

    processor: LlavaProcessor
    chat_template: str
    max_length: int | None = None
    tokens_per_image: int = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        size = self.processor.image_processor.crop_size
        counts = self.processor._get_num_multimodal_tokens([(size["height"], size["width"])])
        (self.tokens_per_image,) = counts.num_image_tokens
        self.plain = self.chat_template == plain_template(self.processor.tokenizer, self.processor.image_token)

    def identity(self) -> str:
        """Hash of all that a row's tokens depend on besides the row: saved tokenizer, template, versions."""
        with tempfile.TemporaryDirectory() as folder:
            self.processor.tokenizer.save_pretrained(folder)
            files = [(path.name, sha256(path)) for path in sorted(Path(folder).iterdir())]
        parts = [
            files, self.chat_template, self.max_length, self.tokens_per_image, self.processor.image_token_id,
            transformers.__version__, tokenizers.__version__,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __call__(self, row: Row) -> Row:
        """Tokenize a row that `check_row` has found good.

        Raises:
            BadRowError: if it is too long, can't be tokenized, has no supervised token, or is a conversation where the
                plain template would drop most of it.
        """
        if self.plain and [turn["from"] for turn in row_turns(row)] != ["human", "gpt"]:
            raise BadRowError(
                row["source"],
                "stage 'align' takes a picture with its caption, one human turn and one gpt turn: a conversation's "
                "questions would be dropped. Train on it in stage 'instruct'",
            )
        try:
            encoded = self.processor.tokenizer.apply_chat_template(
                to_messages(row),
                chat_template=self.chat_template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
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
            raise BadRowError(
                row["source"],
                f"{length} tokens, more than max_length {self.max_length}. Rows are never cut: raise max_length, or "
                "leave the row out",
            )
        if all(label == IGNORED for label in labels):
            raise BadRowError(
                row["source"],
                "no supervised token: the template marks no answer, or the tokenizer's offsets leave out leading "
                "spaces (`trim_offsets`), by which transformers finds what it marks",
            )
        return {**row, "input_ids": input_ids, "labels": labels, "num_images": num_images, "length": length}

    def expand_pictures(self, tokens: list[int], like: list[int] | None = None) -> list[int]:
        """Tokens with as many image tokens as the pictures have.

        Args:
            tokens: `input_ids` of a row, or their beginning.
            like: Labels of these tokens, to be returned in their place.
        """
        image_id, expanded = self.processor.image_token_id, []
        for token, value in zip(tokens, like or tokens, strict=True):
            expanded += [value] * (self.tokens_per_image if token == image_id else 1)
        return expanded
