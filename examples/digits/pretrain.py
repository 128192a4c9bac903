"""Trains the quickstart's backbones from scratch into ordinary checkpoint folders, instead of downloading them.

    python examples/digits/pretrain.py --data_dir runs/digits/data --output_dir runs/digits

`vision/` is a small SigLIP encoder trained to recognise digits and colours; `text/` is a small Qwen3 language model
trained on descriptions of scenes in words, never on pictures.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scenes import CELL, COLOURS, draw_scene, render, split_digits
from sklearn.datasets import load_digits
from torch import nn
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
TEXT_BATCH = 16
# A stopped training of the language model repeats at most so many steps.
SAVE_STEPS = 100
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]


@dataclass(frozen=True)
class TextSettings:
    """Size of the language model and how it is trained."""

    num_hidden_layers: int = 3
    hidden_size: int = 128
    vocab_size: int = 420
    num_steps: int = 700
    learning_rate: float = 2e-3
    # transformers' std of 0.02 fits wide models: at a width of 128 attention starts too flat to learn in minutes.
    initializer_range: float = 0.05


def train_vision(output_dir: Path, num_steps: int = VISION_STEPS) -> dict[str, float]:
    """Train the encoder to name the digit and the colour behind each patch; return accuracies on unseen digits."""
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
    schedule = get_cosine_schedule_with_warmup(optimizer, 30, num_steps)
    for _ in tqdm(range(num_steps), desc="Training the vision encoder", position=1):
        pixel_values, labels = batch("train", VISION_BATCH)
        losses = [
            nn.functional.cross_entropy(scores.flatten(0, 1), labels[name].flatten())
            for name, scores in logits(pixel_values).items()
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()

    encoder.eval()
    with torch.no_grad():
        pixel_values, labels = batch("test", 500)
        accuracy = {
            f"vision_{name}": (scores.argmax(-1) == labels[name]).float().mean().item()
            for name, scores in logits(pixel_values).items()
        }
    encoder.save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    return accuracy


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Qwen2's byte-level BPE tokenizer with a small vocabulary, in which the words of the scenes are a token each."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size=vocab_size, new_special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = chat_template(tokenizer, "<|image_pad|>")
    return tokenizer


def encode_row(row: dict, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of a row's conversation, and of its caption after its description, as stage 1 has it."""
    chat = tokenizer.apply_chat_template(
        to_messages(row), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    labels = [
        token if trained else -100 for token, trained in zip(chat["input_ids"], chat["assistant_masks"], strict=True)
    ]
    description, caption = (tokenizer(text)["input_ids"] for text in (row["description"], row["caption"] + "\n"))
    return [(chat["input_ids"], labels), (description + caption, [-100] * len(description) + caption)]


def pad_batch(chosen: list[tuple[list[int], list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels`, padded on the right, where causal attention needs no mask."""
    length = max(len(ids) for ids, _ in chosen)
    return {
        "input_ids": torch.tensor([ids + [pad_token_id] * (length - len(ids)) for ids, _ in chosen]),
        "labels": torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in chosen]),
    }


def train_text(
    rows: list[dict], output_dir: Path, settings: TextSettings = TextSettings(), compiled: bool = False
) -> dict[str, float]:
    """Train the language model on conversations and captions without pictures, and save it with its tokenizer.

    A run that was stopped goes on from its last hundredth step, if rows and settings are the same.

    Args:
        rows: In LLaVA's layout, with `description` and `caption`.
        output_dir: Folder of the model.
        settings: Size and training.
        compiled: Compile the decoder's layers, which pays off for a long run.

    Returns:
        The last losses.
    """
    set_seed(0)
    corpus = [
        text for row in rows[:500] for text in (row["caption"], *(turn["value"] for turn in row["conversations"]))
    ]
    tokenizer = train_tokenizer([*corpus, *["user assistant system"] * 100], settings.vocab_size)
    # Qwen3 is Qwen2 with normalised queries and keys. Here it learns to look up a place within half a minute on every
    # seed tried; Qwen2 of this size, with its default rotary base, got stuck on some.
    config = Qwen3Config(
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.hidden_size // 16,
        num_key_value_heads=settings.hidden_size // 16,
        head_dim=16,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=settings.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.08)

    encoded = [encode_row(row, tokenizer) for row in tqdm(rows, desc="Tokenising")]
    chats, captions = [chat for chat, _ in encoded], [caption for _, caption in encoded]
    rng = random.Random(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, settings.num_steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint, run = output_dir / "progress.pt", repr((settings, rows))
    identity = hashlib.sha256(run.encode()).hexdigest()
    before = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {}
    first = 0
    if before.get("identity") == identity:
        first = before["step"]
        rng.setstate(before["rng"])
        for name, part in parts.items():
            part.load_state_dict(before[name])
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    output_dir.mkdir(parents=True, exist_ok=True)
    progress = tqdm(
        range(first, settings.num_steps),
        desc="Training the language model",
        initial=first,
        total=settings.num_steps,
    )
    for step in progress:
        if step % SAVE_STEPS == 0 and step > first:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"identity": identity, "step": step, "rng": rng.getstate(), **states}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
        # Separate batches, since lengths differ and padding costs as much as words. Captions teach looking up a place,
        # which the answers build on.
        losses = [
            model(**pad_batch(chosen, tokenizer.pad_token_id), use_cache=False).loss
            for chosen in (rng.sample(chats, TEXT_BATCH), rng.sample(captions, TEXT_BATCH))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(answers=f"{losses[0].item():.3f}", captions=f"{losses[1].item():.3f}")
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    checkpoint.unlink(missing_ok=True)
    return {"answers": losses[0].item(), "captions": losses[1].item()}


def main() -> None:
    """Run the command line; existing models are kept."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    vision, text = args.output_dir / "vision", args.output_dir / "text"
    # Side by side, a thread each: so small a model is trained no faster by two threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as pool:
        training = []
        if not (text / "tokenizer.json").exists():
            rows = json.loads((args.data_dir / "text.json").read_text(encoding="utf-8"))
            training.append(pool.submit(train_text, rows, text))
        if not (vision / "preprocessor_config.json").exists():
            training.append(pool.submit(train_vision, vision))
        results = [future.result() for future in training]
    for result in results:
        logger.info("%s", result)


if __name__ == "__main__":
    main()
