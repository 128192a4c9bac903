"""From rows to a padded or packed batch: opens the pictures, and puts the loss on assistant turns only."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from PIL import Image

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
        samples = [(expand(row["input_ids"]), expand(row["input_ids"], row["labels"])) for row in rows]
        images = [image for row in rows for image in open_images(row)]
        batch = self._pack(samples, not images) if self.packed else self._pad(samples, not images)
        batch["pixel_values"] = self.pixels(images)
        return batch

    def pixels(self, images: list[Image.Image]) -> torch.Tensor:
        """`pixel_values` of pictures, or of a blank one where there are none."""
        image_processor = self.tokenize.processor.image_processor
        if not images:
            size = image_processor.crop_size
            images = [Image.new("RGB", (size["width"], size["height"]))]
        return image_processor(images, return_tensors="pt")["pixel_values"]

    def _pad(self, samples: list[tuple[list[int], list[int]]], blank: bool) -> Inputs:
        if not samples:  # attention needs at least one token to attend to
            samples = [([self.tokenize.processor.tokenizer.pad_token_id], [IGNORED])]
        longest = max(len(input_ids) for input_ids, _ in samples)
        num_blank = self.tokenize.tokens_per_image if blank else 0
        tokenizer = self.tokenize.processor.tokenizer
        shape = (len(samples), longest + num_blank)
        input_ids = torch.full(shape, tokenizer.pad_token_id)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for number, (sample_ids, sample_labels) in enumerate(samples):
            input_ids[number, : len(sample_ids)] = torch.tensor(sample_ids)
            attention_mask[number, : len(sample_ids)] = 1
            labels[number, : len(sample_ids)] = torch.tensor(sample_labels)
        input_ids[0, longest:] = self.tokenize.processor.image_token_id
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def _pack(self, samples: list[tuple[list[int], list[int]]], blank: bool) -> Inputs:
        lengths = [len(input_ids) for input_ids, _ in samples]
        input_ids = [token for sample_ids, _ in samples for token in sample_ids]
        labels = [label for _, sample_labels in samples for label in sample_labels]
        if blank:
            # Each token is a separate sample, which tells it from a real picture and costs almost nothing.
            lengths += [1] * self.tokenize.tokens_per_image
            input_ids += [self.tokenize.processor.image_token_id] * self.tokenize.tokens_per_image
            labels += [IGNORED] * self.tokenize.tokens_per_image
        return {
            "input_ids": torch.tensor([input_ids]),
            "labels": torch.tensor([labels]),
            **sample_boundaries(lengths),
        }


def sample_boundaries(lengths: list[int]) -> Inputs:
    """What tells the samples of a packed row apart: positions, and the bounds that FlashAttention takes."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
