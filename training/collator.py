"""From rows to a padded or packed batch: opens the pictures, and puts the loss on assistant turns only."""

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from PIL import Image
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from conversations.pictures import open_images
from conversations.rows import Row
from conversations.tokens import IGNORED, RowTokenizer
from diagnostics.tokens import Inputs


@dataclass
class VisionLanguageCollator:
    """Collates tokenized rows into what the model and TRL's loss take.

    Padded, it returns `input_ids`, `attention_mask` and `labels`, each `(batch_size, sequence_length)`. Packed, all
    samples are in one row: `input_ids`, `labels` and `position_ids`, which restart at each sample, are
    `(1, sequence_length)`, there is no `attention_mask`, and `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and
    `max_length_k` tell attention kernels where samples begin, as in transformers. In both cases `pixel_values` is
    `(num_images, 3, height, width)`, in the order of the image tokens.

    A batch without pictures, or without any row, gets a blank one, whose tokens no other token sees and which has no
    label. It changes no result, but without it the projector would not take part in the loss: a stage that trains
    nothing else would get no gradient, and parallel processes would deadlock.

    Args:
        tokenize: What the rows were tokenized with.
        packed: Whether to join the rows of a batch into one.
    """

    tokenize: RowTokenizer
    packed: bool = False

    def __call__(self, rows: list[Row]) -> Inputs:
        """Collate `rows`. Raises `BadRowError` if one has an unreadable picture."""
        expand = self.tokenize.expand_pictures
        input_ids = [expand(row["input_ids"]) for row in rows]
        labels = [expand(row["input_ids"], row["labels"]) for row in rows]
        images = [image for row in rows for image in open_images(row)]
        num_blank = 0 if images else self.tokenize.tokens_per_image
        batch = self._pack(input_ids, labels, num_blank) if self.packed else self._pad(input_ids, labels, num_blank)
        batch["pixel_values"] = self.pixels(images)
        return batch

    def pixels(self, images: list[Image.Image]) -> torch.Tensor:
        """`pixel_values` of pictures, or of a blank one where there are none."""
        image_processor = self.tokenize.processor.image_processor
        if not images:
            size = image_processor.crop_size
            images = [Image.new("RGB", (size["width"], size["height"]))]
        return image_processor(images, return_tensors="pt")["pixel_values"]

    def _pad(self, input_ids: list[list[int]], labels: list[list[int]], num_blank: int) -> Inputs:
        processor = self.tokenize.processor
        pad_id = processor.tokenizer.pad_token_id
        if not input_ids:  # attention needs at least one token to attend to
            input_ids, labels = [[pad_id]], [[IGNORED]]

        def padded(rows: list[list[int]], value: int) -> torch.Tensor:
            return pad(pad_sequence([torch.tensor(row) for row in rows], True, value), (0, num_blank), value=value)

        batch = {"input_ids": padded(input_ids, pad_id), "labels": padded(labels, IGNORED)}
        batch["attention_mask"] = padded([[1] * len(row) for row in input_ids], 0)
        batch["input_ids"][0, batch["input_ids"].shape[1] - num_blank :] = processor.image_token_id
        return batch

    def _pack(self, input_ids: list[list[int]], labels: list[list[int]], num_blank: int) -> Inputs:
        # Each blank token is a separate sample, which tells it from a real picture and costs almost nothing.
        lengths = [*map(len, input_ids), *[1] * num_blank]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        image_id = self.tokenize.processor.image_token_id
        return {
            "input_ids": torch.tensor([[*chain(*input_ids), *[image_id] * num_blank]]),
            "labels": torch.tensor([[*chain(*labels), *[IGNORED] * num_blank]]),
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
