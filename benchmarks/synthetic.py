"""Models of random weights and rows of synthetic text, for benchmarks.

The rows of stage 2 mix the sources of LLaVA-1.5 in their published sizes (arXiv 2310.03744, Table 7); the lengths of
their rows are our estimates from how they are made. Stage 1 is a picture and a short caption. For the small model
pictures have 81 tokens instead of 729, and texts are a ninth as long.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from conversations.chat_template import chat_template, plain_template
from conversations.loading import load_rows
from conversations.measured import RowCheck, keep_good_rows, tokenize_rows
from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.stages import Stage


@dataclass(frozen=True)
class Size:
    """A model of random weights and the batches that it is trained on."""

    vision: dict[str, int]
    text: dict[str, Any]
    text_scale: int
    """Texts are this many times shorter than real ones."""
    samples_per_step: int
    rows_per_batch: int
    """Batch size of the padded arm."""
    packed_length: dict[Stage, int]
    text_config: type[PreTrainedConfig] = Qwen2Config


SIGLIP_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                 "image_size": 384, "patch_size": 14}  # fmt: skip
SIZES = {
    # Only shows that code runs.
    "tiny": Size(
        vision={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14},
        text={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096},
        text_scale=40, samples_per_step=4, rows_per_batch=2, packed_length={Stage.ALIGN: 256, Stage.INSTRUCT: 256},
    ),
    "small": Size(
        vision={"hidden_size": 160, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 4,
                "image_size": 126, "patch_size": 14},
        text={"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
              "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 4096},
        text_scale=9, samples_per_step=16, rows_per_batch=8, packed_length={Stage.ALIGN: 2048, Stage.INSTRUCT: 2560},
    ),
    "Qwen2.5-7B": Size(
        vision=SIGLIP_SO400M,
        text={"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
              "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768},
        text_scale=1, samples_per_step=32, rows_per_batch=4, packed_length={Stage.ALIGN: 16384, Stage.INSTRUCT: 8192},
    ),
    "Llama-3.2-3B": Size(
        vision=SIGLIP_SO400M,
        text={"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
              "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
              "tie_word_embeddings": True},
        text_scale=1, samples_per_step=32, rows_per_batch=4, packed_length={Stage.ALIGN: 16384, Stage.INSTRUCT: 8192},
        text_config=LlamaConfig,
    ),
}  # fmt: skip

SIZES["tiny Llama"] = replace(
    SIZES["tiny"], text={**SIZES["tiny"].text, "tie_word_embeddings": True}, text_config=LlamaConfig
)

# Thousands of rows; then, estimated, the median of a row's text in tokens and its spread as exp(sigma).
MIXTURE = {
    "LLaVA": (158, 300, 1.6), "ShareGPT, no picture": (40, 1100, 1.8), "VQAv2, GQA": (155, 260, 1.5),
    "OKVQA, OCRVQA, A-OKVQA": (155, 170, 1.4), "TextCaps": (22, 90, 1.3), "RefCOCO, VG": (134, 480, 1.6),
}  # fmt: skip


def write_rows(folder: Path, stage: Stage, size: Size, count: int) -> Path:
    """Rows of synthetic text and noise, as a LLaVA JSON file."""
    rng = np.random.default_rng(0)
    pictures = []
    for number in range(64):
        # 1.5 times the encoder's size, since photographs are larger too.
        side = size.vision["image_size"] * 3 // 2
        noise = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)).resize((side, side))
        noise.save(folder / f"{number}.jpg")
        pictures.append(f"{number}.jpg")
    rows = []
    weights = np.array([thousands for thousands, _, _ in MIXTURE.values()], dtype=float)
    for number in range(count):
        if stage is Stage.ALIGN:
            source, median, spread = "caption", 20, 1.5
        else:
            source = str(rng.choice(list(MIXTURE), p=weights / weights.sum()))
            _, median, spread = MIXTURE[source]
        words = median * math.exp(rng.normal(0, math.log(spread)))
        words = int(np.clip(words, 8, 2048)) // (1 if stage is Stage.ALIGN else size.text_scale)
        question, answer = (" ".join(f"w{word}" for word in rng.integers(0, 1000, max(half, 2)))
                            for half in (words // 2, words - words // 2))  # fmt: skip
        has_picture = "no picture" not in source
        turns = [
            {"from": "human", "value": ("<image>\n" if has_picture else "") + question},
            {"from": "gpt", "value": answer},
        ]
        rows.append({"conversations": turns, **({"image": pictures[number % 64]} if has_picture else {})})
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def checked_rows(
    folder: Path, stage: Stage, size: Size, count: int, processor: LlavaProcessor
) -> tuple[Dataset, RowTokenizer]:
    """These rows as in training, checked and with their `length`; and their tokenizer."""
    plain = plain_template(processor.tokenizer, processor.image_token)
    tokenize = RowTokenizer(processor, plain if stage is Stage.ALIGN else processor.chat_template)
    rows = load_rows(str(write_rows(folder, stage, size, count)))
    tokens = tokenize_rows(rows, RowCheck(tokenize, open_pictures=False))
    return keep_good_rows(rows, tokens, "error", report_file=None)[0], tokenize


def synthetic_processor(size: Size) -> LlavaProcessor:
    """A processor whose tokenizer has a token for each word of the synthetic text."""
    words = ["<unk>", "user", "assistant", *(f"w{number}" for number in range(1000))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=special
    )
    side = size.vision["image_size"]
    image_processor = SiglipImageProcessor(
        size={"height": side, "width": side}, crop_size={"height": side, "width": side}, do_center_crop=False
    )
    return LlavaProcessor(
        image_processor=image_processor, tokenizer=tokenizer, patch_size=size.vision["patch_size"],
        vision_feature_select_strategy="full", num_additional_image_tokens=0, image_token="<|image_pad|>",
        chat_template=chat_template(tokenizer, "<|image_pad|>"),
    )  # fmt: skip


def write_model(folder: Path, size: Size, device: str) -> None:
    """Save a composed model of random weights with its processor, in bfloat16, like published language models."""
    processor = synthetic_processor(size)
    with torch.device(device):
        model = NormLlavaForConditionalGeneration._from_config(
            synthetic_config(size, processor, ours=True), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def synthetic_config(size: Size, processor: LlavaProcessor, ours: bool) -> LlavaConfig:
    """The configuration of NormLlava or of plain Llava."""
    text = {"tie_word_embeddings": False, **size.text}
    fields = {
        "vision_config": SiglipVisionConfig(**size.vision, vision_use_head=False),
        "text_config": size.text_config(**text),
        "image_token_index": processor.image_token_id,
        "vision_feature_select_strategy": "full",
    }
    return NormLlavaConfig(**fields, projector_norm_target=0.8) if ours else LlavaConfig(**fields)
