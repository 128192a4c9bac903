"""Trains the quickstart's two backbones from scratch, so that nothing has to be downloaded.

    python examples/digits/pretrain.py --data_dir runs/digits/data --output_dir runs/digits

The command writes two checkpoint folders of transformers. `vision/` is a small SigLIP encoder, trained to recognise
digits and colours. `text/` is a small Qwen3 language model, trained on scenes in words and never on pictures.
"""

import argparse
import json
import logging
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from normllava.command_line import command, parse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    get_cosine_schedule_with_warmup,
    set_seed,
)

from examples.digits.scenes import CELL, COLOURS, DIGITS, Row, make_random_scene, render, split_digits
from normllava.conversations.chat_template import chat_template
from normllava.conversations.rows import to_messages
from normllava.tokens import IGNORED


logger = logging.getLogger(__name__)

VISION_WIDTH = 96
VISION_STEPS = 500
VISION_BATCH = 128
VISION_RATE = 2e-3  # learning rate
VISION_WARMUP = 30  # steps
TEST_SCENES = 500  # scenes of unseen digits that the encoder is tested on

TEXT_WIDTH = 128
TEXT_STEPS = 700
TEXT_BATCH = 16
TEXT_RATE = 2e-3  # learning rate
TEXT_WARMUP = 20  # steps
TEXT_VOCABULARY = 420  # tokens: all single bytes, the special tokens, and every word of the scenes


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder that scenes.py has written")
    parser.add_argument("--output_dir", type=Path, required=True, help="parent folder of both checkpoints")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Train both backbones, and print how well they do."""
    args = parse(build_parser(), argv)
    rows = json.loads((args.data_dir / "text.json").read_text(encoding="utf-8"))

    # The models train at the same time, each in a process with one thread. With two threads they wouldn't be faster.
    pool = ProcessPoolExecutor(
        max_workers=2,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    with pool:
        text_result = pool.submit(train_text, rows, args.output_dir / "text")
        vision_result = pool.submit(train_vision, args.output_dir / "vision")
        logger.info("%s\n%s", text_result.result(), vision_result.result())


# The vision encoder


class PatchClassifier(nn.Module):
    """The encoder with two linear classifiers. For each patch, one predicts the digit, and the other its colour."""

    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=VISION_WIDTH,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=2 * CELL,
            patch_size=CELL // 2,  # a picture has 4 x 4 patches, and each digit covers 2 x 2 of them
            vision_use_head=False,
        )
        self.encoder = SiglipVisionModel(config)
        self.classifiers = nn.ModuleDict({
            "digit": nn.Linear(VISION_WIDTH, len(DIGITS)),
            "colour": nn.Linear(VISION_WIDTH, len(COLOURS)),
        })  # fmt: skip

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """For each classifier, its scores of the classes, `[num_scenes, num_patches, num_classes]`."""
        # Llava reads the hidden states before the encoder's final norm, so the classifiers read the same states.
        features = self.encoder(pixel_values, output_hidden_states=True).hidden_states[-1]
        normalised = nn.functional.layer_norm(features, (VISION_WIDTH,))
        return {name: classifier(normalised) for name, classifier in self.classifiers.items()}


class PatchBatch(NamedTuple):
    """A batch of pictures, with a digit and a colour as the labels of each patch."""

    pixel_values: torch.Tensor
    labels: dict[str, torch.Tensor]
    """For each classifier, the right class of every patch, `[num_scenes, num_patches]`."""


class PatchData:
    """Makes batches of random scenes."""

    def __init__(self, processor: SiglipImageProcessor) -> None:
        self.processor = processor
        self.digits = load_digits()
        self.sources = split_digits()  # by split, the indices of its digits' pictures
        self.rng = random.Random(1)

    def make_batch(self, split: str, num_scenes: int) -> PatchBatch:
        """A batch of new scenes. Their digits are from this split: "train" or "test"."""
        sources = self.sources[split]
        scenes = [make_random_scene(self.rng, sources, self.digits.target) for _ in range(num_scenes)]
        pictures = [render(scene, self.digits.images, self.rng) for scene in scenes]
        pixel_values = self.processor(pictures, return_tensors="pt")["pixel_values"]

        colours = list(COLOURS)
        digit_labels = []
        colour_labels = []
        for scene in scenes:
            digit_labels.append([cell.digit for cell in scene])
            colour_labels.append([colours.index(cell.colour) for cell in scene])
        labels = {"digit": repeat_by_patch(digit_labels), "colour": repeat_by_patch(colour_labels)}
        return PatchBatch(pixel_values, labels)


def repeat_by_patch(cell_labels: list[list[int]]) -> torch.Tensor:
    """Give each patch the label of its cell. A scene has four cells of 2 x 2 patches.

    Args:
        cell_labels: For each scene, the labels of its cells.

    Returns:
        The labels of the patches, `[num_scenes, 16]`.
    """
    cells = torch.tensor(cell_labels).unflatten(1, (2, 2))  # [num_scenes, 2, 2]
    patches = cells.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)  # [num_scenes, 4, 4]
    return patches.flatten(1)


def train_vision(output_dir: Path) -> str:
    """Train the encoder, and save it with its processor.

    Returns:
        A sentence that says what share of unseen digits and of colours the encoder recognises.
    """
    set_seed(0)
    model = PatchClassifier()
    processor = SiglipImageProcessor(size={"height": 2 * CELL, "width": 2 * CELL})
    data = PatchData(processor)

    optimizer = torch.optim.AdamW(model.parameters(), lr=VISION_RATE, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimizer, VISION_WARMUP, VISION_STEPS)
    # There is no progress bar here, because the language model's is on the screen at the same time.
    for _ in range(VISION_STEPS):
        batch = data.make_batch("train", VISION_BATCH)
        scores = model(batch.pixel_values)
        losses = []
        for name, labels in batch.labels.items():
            patch_scores = scores[name].flatten(0, 1)  # [num_scenes * num_patches, num_classes]
            losses.append(nn.functional.cross_entropy(patch_scores, labels.flatten()))
        take_step(model, optimizer, schedule, losses)

    model.eval()
    batch = data.make_batch("test", TEST_SCENES)
    with torch.no_grad():
        scores = model(batch.pixel_values)
    shares = {}
    for name, labels in batch.labels.items():
        is_right = scores[name].argmax(-1) == labels
        shares[name] = is_right.float().mean().item()

    model.encoder.save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    return f"vision encoder: {shares['digit']:.1%} of unseen digits and {shares['colour']:.1%} of colours right"


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    losses: list[torch.Tensor],
) -> None:
    """Take one step of the optimizer and of the schedule, by the sum of the losses."""
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


# The language model


class LabelledText(NamedTuple):
    """Token ids of a text and their labels."""

    ids: list[int]
    labels: list[int]


def train_text(rows: list[Row], output_dir: Path) -> str:
    """Train the language model on conversations and captions without pictures, and save it with its tokenizer.

    Args:
        rows: Rows in LLaVA's layout, each with a `description` and a `caption`.
        output_dir: Folder to write.

    Returns:
        A sentence with the losses of the last step.
    """
    set_seed(0)
    tokenizer = train_tokenizer(rows)
    model = make_language_model(tokenizer)
    chats = [encode_chat(row, tokenizer) for row in tqdm(rows, desc="Tokenising")]
    captions = [encode_caption(row, tokenizer) for row in rows]

    rng = random.Random(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEXT_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, TEXT_WARMUP, TEXT_STEPS)
    for _ in tqdm(range(TEXT_STEPS), desc="Training the language model, and beside it the vision encoder"):
        # Captions teach the model to look up a place, such as "northwest", in a description, as it must for answers.
        # Chats and captions have different lengths, so separate batches need less padding.
        chat_batch = pad_batch(rng.sample(chats, TEXT_BATCH), tokenizer.pad_token_id)
        caption_batch = pad_batch(rng.sample(captions, TEXT_BATCH), tokenizer.pad_token_id)
        chat_loss = model(**chat_batch, use_cache=False).loss
        caption_loss = model(**caption_batch, use_cache=False).loss
        take_step(model, optimizer, schedule, [chat_loss, caption_loss])

    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return f"language model: a last loss of {chat_loss:.3f} on answers and {caption_loss:.3f} on captions"


def train_tokenizer(rows: list[Row]) -> PreTrainedTokenizerBase:
    """Train Qwen2's kind of tokenizer with a small vocabulary, in which each word of the scenes is one token."""
    texts = []
    for row in rows[:500]:  # in 500 rows, each word of the scenes comes up many times
        texts.append(row["caption"])
        texts += [turn["value"] for turn in row["conversations"]]
    # The chat format's words are repeated so often that each becomes one token.
    texts += ["user assistant system"] * 100

    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts,
        vocab_size=TEXT_VOCABULARY,
        new_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"],
        show_progress=False,
    )
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = chat_template(tokenizer, "<|image_pad|>")
    return tokenizer


def make_language_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A language model with random weights.

    A Qwen3 is a Qwen2 with normalised queries and keys. With every seed that was tried, a Qwen3 of this size learned
    within half a minute to look up a place in a description. With some seeds, a Qwen2 with the default rotary base
    didn't learn it.
    """
    config = Qwen3Config(
        hidden_size=TEXT_WIDTH,
        intermediate_size=3 * TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=TEXT_WIDTH // 8,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        # The default of 0.02 fits wide models. At this width attention would be too even at first to learn in minutes.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # With this deviation, text embeddings get a mean norm of about 0.9: 0.08 times the square root of the width, 128.
    nn.init.normal_(model.get_input_embeddings().weight, std=0.08)
    return model


def encode_chat(row: Row, tokenizer: PreTrainedTokenizerBase) -> LabelledText:
    """The tokens of a row's conversation. Only the tokens of its answers are labels."""
    chat = tokenizer.apply_chat_template(
        to_messages(row), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    labels = []
    for token_id, is_answer in zip(chat["input_ids"], chat["assistant_masks"], strict=True):
        labels.append(token_id if is_answer else IGNORED)
    return LabelledText(chat["input_ids"], labels)


def encode_caption(row: Row, tokenizer: PreTrainedTokenizerBase) -> LabelledText:
    """The tokens of a row's description and caption.

    As in LLaVA's stage 1, a line break ends the caption, and only the caption's tokens are labels.
    """
    description = tokenizer(row["description"])["input_ids"]
    caption = tokenizer(row["caption"] + "\n")["input_ids"]
    return LabelledText(description + caption, [IGNORED] * len(description) + caption)


def pad_batch(texts: list[LabelledText], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A batch of `input_ids` and `labels`. It is padded on the right, where causal attention needs no mask."""
    ids = [torch.tensor(text.ids) for text in texts]
    labels = [torch.tensor(text.labels) for text in texts]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


if __name__ == "__main__":
    main()
