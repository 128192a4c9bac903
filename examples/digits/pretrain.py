"""Trains the quickstart's backbones from scratch into ordinary checkpoint folders, instead of downloading them.

    python examples/digits/pretrain.py --data_dir runs/digits/data --output_dir runs/digits

`vision/` is a small SigLIP encoder trained to recognise digits and colours; `text/` is a small Qwen3 language model
trained on descriptions of scenes in words, never on pictures.
"""

import argparse
import json
import logging
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from scenes import CELL, COLOURS, draw_scene, render, split_digits
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

from conversations.chat_template import chat_template
from conversations.rows import to_messages


logger = logging.getLogger(__name__)

VISION_STEPS, VISION_BATCH, VISION_RATE = 500, 128, 2e-3
TEXT_STEPS, TEXT_BATCH, TEXT_RATE = 700, 16, 2e-3
WIDTH = 128  # of the language model


def train_vision(output_dir: Path) -> str:
    """Train the encoder to name the digit and the colour behind each patch; say how well it does on unseen digits."""
    set_seed(0)
    config = SiglipVisionConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=2 * CELL,
        patch_size=CELL // 2,
        vision_use_head=False,
    )
    encoder, processor = SiglipVisionModel(config), SiglipImageProcessor(size={"height": 2 * CELL, "width": 2 * CELL})
    # On the last hidden state before the final norm: Llava reads it there.
    heads = nn.ModuleDict({"digit": nn.Linear(96, 10), "colour": nn.Linear(96, len(COLOURS))})
    sources, digits = split_digits(), load_digits()
    rng = random.Random(1)

    def batch(split: str, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scenes = [draw_scene(rng, sources[split], digits.target) for _ in range(size)]
        pictures = [render(scene, digits.images, rng) for scene in scenes]
        cells = torch.tensor([[(cell.digit, list(COLOURS).index(cell.colour)) for cell in scene] for scene in scenes])
        cells = cells.reshape(size, 2, 2, 2).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1, 2)
        pixel_values = processor(pictures, return_tensors="pt")["pixel_values"]
        return pixel_values, {"digit": cells[..., 0], "colour": cells[..., 1]}  # labels: [size, num_patches]

    def logits(pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        features = encoder(pixel_values, output_hidden_states=True).hidden_states[-1]
        return {name: head(nn.functional.layer_norm(features, (96,))) for name, head in heads.items()}

    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=VISION_RATE, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimizer, 30, VISION_STEPS)
    for _ in range(VISION_STEPS):  # without a bar: the language model's is on the screen
        pixel_values, labels = batch("train", VISION_BATCH)
        scores = logits(pixel_values)
        losses = [nn.functional.cross_entropy(scores[name].flatten(0, 1), labels[name].flatten()) for name in scores]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()

    encoder.eval()
    with torch.no_grad():
        pixel_values, labels = batch("test", 500)
        scores = logits(pixel_values)
        right = {name: (scores[name].argmax(-1) == labels[name]).float().mean() for name in scores}
    encoder.save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    return f"vision encoder: {right['digit']:.1%} of unseen digits and {right['colour']:.1%} of colours right"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """Qwen2's byte-level BPE tokenizer with a small vocabulary, in which the words of the scenes are a token each."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, 420, new_special_tokens=special, show_progress=False)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = chat_template(tokenizer, "<|image_pad|>")
    return tokenizer


def encode_row(row: dict, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of a row's conversation, and of its caption after its description, as stage 1 has it."""
    masked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    chat = tokenizer.apply_chat_template(to_messages(row), **masked)
    ids, mask = chat["input_ids"], chat["assistant_masks"]
    labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
    description, caption = (tokenizer(text)["input_ids"] for text in (row["description"], row["caption"] + "\n"))
    return [(ids, labels), (description + caption, [-100] * len(description) + caption)]


def pad_batch(chosen: list[tuple[list[int], list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels`, padded on the right, where causal attention needs no mask."""
    ids, labels = ([torch.tensor(row) for row in rows] for rows in zip(*chosen, strict=True))
    return {"input_ids": pad_sequence(ids, True, pad_token_id), "labels": pad_sequence(labels, True, -100)}


def train_text(rows: list[dict], output_dir: Path) -> str:
    """Train the language model on conversations and captions without pictures, and save it with its tokenizer; say how
    far it came. Rows have LLaVA's layout, with `description` and `caption`."""
    set_seed(0)
    corpus = [
        text for row in rows[:500] for text in (row["caption"], *(turn["value"] for turn in row["conversations"]))
    ]
    tokenizer = train_tokenizer([*corpus, *["user assistant system"] * 100])
    # Qwen3 is Qwen2 with normalised queries and keys. Here it learns to look up a place within half a minute on every
    # seed tried; Qwen2 of this size, with its default rotary base, got stuck on some.
    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=WIDTH // 16,
        num_key_value_heads=WIDTH // 16,
        head_dim=16,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        # transformers' std of 0.02 fits wide models: at this width attention starts too flat to learn in minutes.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.08)

    encoded = [encode_row(row, tokenizer) for row in tqdm(rows, desc="Tokenising")]
    chats, captions = zip(*encoded, strict=True)
    rng = random.Random(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEXT_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, TEXT_STEPS)
    for _ in tqdm(range(TEXT_STEPS), desc="Training the language model, and beside it the vision encoder"):
        # Separate batches, since padding costs as much as words. Captions teach looking up a place, as answers do.
        losses = [
            model(**pad_batch(chosen, tokenizer.pad_token_id), use_cache=False).loss
            for chosen in (rng.sample(chats, TEXT_BATCH), rng.sample(captions, TEXT_BATCH))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return f"language model: a last loss of {losses[0]:.3f} on answers and {losses[1]:.3f} on captions"


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads((args.data_dir / "text.json").read_text(encoding="utf-8"))
    # Side by side, a thread each: so small a model is trained no faster by two threads.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        text = pool.submit(train_text, rows, args.output_dir / "text")
        vision = pool.submit(train_vision, args.output_dir / "vision")
        logger.info("%s\n%s", text.result(), vision.result())


if __name__ == "__main__":
    main()
