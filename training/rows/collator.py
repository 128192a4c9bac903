"""Makes a padded or packed batch from tokenized rows and their pictures."""

from dataclasses import dataclass

import torch
from PIL import Image
from torch.nn.functional import pad
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from normllava.conversations.pictures import open_images
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.rows import Row
from normllava.conversations.tiles import tile_options
from normllava.tokens import IGNORED, Inputs, blank_samples


@dataclass
class VisionLanguageCollator:
    """Collates tokenized rows into the batch that the model and TRL's loss take.

    A padded batch has `input_ids`, `attention_mask` and `labels`, each `(batch_size, sequence_length)`.

    A packed batch joins the given rows, then called samples, into a single row. `input_ids`, `labels` and
    `position_ids` are `(1, sequence_length)`, and positions restart at 0 in each sample. There is no `attention_mask`.
    As in transformers, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` tell attention kernels
    where samples begin.

    Every batch has `pixel_values` `(num_tiles, 3, height, width)`, in the order of the image tokens. A picture that
    isn't cut into tiles is one tile.

    A batch without pictures gets a blank picture, and so does a batch without rows. No other token sees the tokens of
    the blank picture, and these tokens have no labels, so that the blank picture changes no result. Without a picture
    the projector would not take part in the loss: a stage that trains only the projector would get no gradient, and
    parallel processes would deadlock.

    Args:
        row_tokenizer: The [`RowTokenizer`] that has tokenized the rows.
        packed: Whether to make packed batches.
    """

    row_tokenizer: RowTokenizer
    packed: bool = False

    def __call__(self, rows: list[Row]) -> Inputs:
        """The batch of `rows`, whose pictures are opened here.

        Raises:
            BadRowError: if a row has an unreadable picture.
        """
        samples = [self._expand(row) for row in rows]
        images: list[Image.Image] = []
        for row in rows:
            images += open_images(row)

        if self.packed:
            batch = self._pack(samples, has_images=bool(images))
        else:
            batch = self._pad(samples, has_images=bool(images))

        batch["pixel_values"] = self.process_images(images)
        return batch

    def _expand(self, row: Row) -> dict[str, list[int]]:
        """A row's tokens and labels, in which each picture has all of its image tokens instead of only one."""
        input_ids = self.row_tokenizer.repeat_at_pictures(row["input_ids"], row)
        labels = self.row_tokenizer.repeat_at_pictures(row["labels"], row)
        return {"input_ids": input_ids, "labels": labels}

    def _pack(self, samples: list[dict[str, list[int]]], has_images: bool) -> Inputs:
        """The packed batch of `samples`, with the blank picture's tokens at its end if there are no images."""
        if not has_images:
            image_token_id = self.row_tokenizer.processor.image_token_id
            samples = samples + blank_samples(image_token_id, self.row_tokenizer.tokens_per_tile)

        batch = DataCollatorForLanguageModeling(self._pad_id, padding_free=True)(samples)
        batch.pop("seq_idx", None)  # only linear attention reads seq_idx, and packing refuses such decoders
        return batch

    def _pad(self, samples: list[dict[str, list[int]]], has_images: bool) -> Inputs:
        """The padded batch of `samples`, with the blank picture's tokens at its end if there are no images."""
        if not samples:
            # Attention needs at least one token that isn't masked.
            samples = [{"input_ids": [self._pad_id], "labels": [IGNORED]}]
        batch = DataCollatorForLanguageModeling(self._pad_id)(samples)

        if not has_images:
            # Every row gets more masked padding on the right, and in the first row this padding becomes image tokens.
            num_blank_tokens = self.row_tokenizer.tokens_per_tile
            batch["input_ids"] = pad(batch["input_ids"], (0, num_blank_tokens), value=self._pad_id)
            batch["labels"] = pad(batch["labels"], (0, num_blank_tokens), value=IGNORED)
            batch["attention_mask"] = pad(batch["attention_mask"], (0, num_blank_tokens), value=0)
            batch["input_ids"][0, -num_blank_tokens:] = self.row_tokenizer.processor.image_token_id
        return batch

    @property
    def _pad_id(self) -> int:
        return self.row_tokenizer.processor.tokenizer.pad_token_id

    def process_images(self, images: list[Image.Image]) -> torch.Tensor:
        """The `pixel_values` of `images`, or of a blank picture if `images` is empty."""
        image_processor = self.row_tokenizer.processor.image_processor
        if not images:
            size = image_processor.crop_size  # which compose gives to every image processor
            images = [Image.new("RGB", (size["width"], size["height"]))]
        options = tile_options(image_processor, self.row_tokenizer.max_tiles)
        return image_processor(images, return_tensors="pt", **options)["pixel_values"]
