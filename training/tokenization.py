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
    """Turns a row into `input_ids` and `labels`, two lists of the same length.

    Labels are -100 except for what the template marks with `{% generation %}`; the first is always -100, since there
    is nothing before it to predict it from. Each image token of the text is repeated as often as a picture has tokens.

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
            transformers.__version__, tokenizers.__version__, sha256(Path(__file__)),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __call__(self, row: Row) -> tuple[list[int], list[int]]:
        """Tokenize a row. Raises `BadRowError` if it is too long, has no supervised token, or is a conversation where
        the plain template would drop most of it."""
        if self.plain and [turn["from"] for turn in row_turns(row)] != ["human", "gpt"]:
            raise BadRowError(
                f"{row['source']}: stage 'align' takes a picture with its caption, one human turn and one gpt turn: a "
                "conversation's questions would be dropped. Train on it in stage 'instruct'."
            )
        encoded = self.processor.tokenizer.apply_chat_template(
            to_messages(row),
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        input_ids: list[int] = []
        labels: list[int] = []
        for token, trained in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            if token == self.processor.image_token_id:
                # The mask is per character, and a picture may be adjacent to the answer in LLaVA's plain format.
                input_ids += [token] * self.tokens_per_image
                labels += [IGNORED] * self.tokens_per_image
            else:
                input_ids.append(token)
                labels.append(token if trained else IGNORED)
        labels[:1] = [IGNORED]

        if self.max_length is not None and len(input_ids) > self.max_length:
            raise BadRowError(
                f"{row['source']}: {len(input_ids)} tokens, more than max_length {self.max_length}. Rows are never "
                "cut: raise max_length, or leave the row out with --bad_rows skip."
            )
        if all(label == IGNORED for label in labels):
            raise BadRowError(
                f"{row['source']}: no supervised token: the template marks no answer, or the tokenizer's "
                "offsets leave out leading spaces (`trim_offsets`), by which transformers finds what it marks."
            )
        return input_ids, labels
