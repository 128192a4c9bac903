"""From rows to a padded batch: pictures opened here, loss on what the assistant says and nothing else."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import LlavaProcessor

from training.data import BadRowError, open_images, to_messages


@dataclass
class VisionLanguageCollator:
    """Collates rows of `training.data` into what the model and TRL's loss take.

    Returns `input_ids`, `attention_mask` and `labels`, each `(batch_size, sequence_length)`, and `pixel_values`
    `(num_images, 3, height, width)`. Labels are -100 but for what the template marks with `{% generation %}`.

    A batch without pictures gets a blank one, whose tokens are padding to attention and loss. It changes no result,
    but without it the projector would have no part in the loss, and a stage that trains nothing else no gradient.

    Args:
        processor: The model's processor.
        chat_template: Jinja template that says what a row looks like.
        max_length: Longest row allowed, in tokens. Rows are never cut; `None` allows any length.
    """

    processor: LlavaProcessor
    chat_template: str
    max_length: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate `rows`. Raises `BadRowError` if one has an unreadable picture, is too long or has no loss."""
        messages = [to_messages(row) for row in rows]
        for row, conversation in zip(rows, messages, strict=True):
            pictures = iter(open_images(row))
            for message in conversation:
                for part in message["content"]:
                    if isinstance(part, dict) and part["type"] == "image":
                        part["image"] = next(pictures)

        batch = self.processor.apply_chat_template(
            messages,
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
            # The template writes BOS where the model wants one.
            processor_kwargs={"padding": True, "padding_side": "right", "add_special_tokens": False},
        )
        labels = batch["input_ids"].masked_fill(batch.pop("assistant_masks") == 0, -100)
        # The mask goes by characters, and an image token may touch the answer in LLaVA's plain format.
        batch["labels"] = labels.masked_fill(batch["input_ids"] == self.processor.image_token_id, -100)
        self._check(rows, batch)
        if "pixel_values" not in batch:
            self._add_blank_image(batch)
        return dict(batch)

    def _check(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> None:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        supervised = (batch["labels"] != -100).sum(dim=1).tolist()
        for row, length, num_supervised in zip(rows, lengths, supervised, strict=True):
            if self.max_length is not None and length > self.max_length:
                raise BadRowError(
                    f"{row['source']}: {length} tokens, more than max_length {self.max_length}. Rows are never cut: "
                    "raise max_length, or leave the row out of the data."
                )
            if num_supervised == 0:
                raise BadRowError(f"{row['source']}: no token of it is trained; the template marks no answer.")

    def _add_blank_image(self, batch: dict[str, torch.Tensor]) -> None:
        """Append the tokens of a blank picture to every row, and its pixels once: they belong to the first row."""
        size = self.processor.image_processor.crop_size
        blank = Image.new("RGB", (size["width"], size["height"]))
        batch["pixel_values"] = self.processor.image_processor(blank, return_tensors="pt")["pixel_values"]
        (num_tokens,) = self.processor._get_num_multimodal_tokens([(size["height"], size["width"])]).num_image_tokens

        num_rows = batch["input_ids"].shape[0]
        image_tokens = torch.full((num_rows, num_tokens), self.processor.tokenizer.pad_token_id)
        image_tokens[0] = self.processor.image_token_id
        ignored = torch.zeros_like(image_tokens)
        for name, extra in (("input_ids", image_tokens), ("attention_mask", ignored), ("labels", ignored - 100)):
            batch[name] = torch.cat([batch[name], extra], dim=1)  # [num_rows, sequence_length + num_tokens]
