"""Add key adapters to a NormLlava, which change nothing until they are trained.

    python training/add_key_adapters.py --model checkpoints/stage1 --rank 16 --output_dir checkpoints/stage1-keys

They are MaLoRA-style; docs/key_alignment.md says what they are and how they are trained.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoProcessor

from common.console import command, new_folder, parse
from modeling_normllava import (
    NormLlavaForConditionalGeneration,
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
)
from training.checkpoints import copy_record
from training.loading import load_config


def add_key_adapters(
    model: NormLlavaForConditionalGeneration, rank: int, alpha: float, dropout: float, seed: int = 42
) -> NormLlavaKeyAdapterForConditionalGeneration:
    """The same model with key adapters; its parts are reused. Raises `UserError` if its decoder can't have any, or
    has them already."""
    fields = {"key_adapter_rank": rank, "key_adapter_alpha": alpha, "key_adapter_dropout": dropout}
    config = NormLlavaKeyAdapterConfig.from_dict(model.config.to_dict() | fields)
    config._attn_implementation = model.config._attn_implementation
    torch.manual_seed(seed)
    parts = (model.model.vision_tower, model.model.language_model, model.lm_head)
    adapted = NormLlavaKeyAdapterForConditionalGeneration(config, *parts)
    adapted.model.multi_modal_projector = model.model.multi_modal_projector
    adapted.generation_config = model.generation_config
    with torch.no_grad():  # fails if the decoder doesn't pass on what its adapters need
        adapted.eval()(input_ids=torch.zeros((1, 1), dtype=torch.long))
    return adapted


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description="Add key adapters to a NormLlava.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="NormLlava: folder or Hub id")
    parser.add_argument("--output_dir", required=True, type=new_folder, help="folder to write")
    parser.add_argument("--rank", type=int, default=16, help="rank of the updates")
    parser.add_argument("--alpha", type=float, default=32, help="they are scaled by alpha / rank")
    parser.add_argument("--dropout", type=float, default=0.05, help="dropout in front of them, in training")
    parser.add_argument("--seed", type=int, default=42, help="seed of the new weights")
    return parser


@command()
def main() -> None:
    """Run the command line."""
    args = parse(build_parser())
    load_config(args.model)
    model = NormLlavaForConditionalGeneration.from_pretrained(args.model, dtype="auto")
    add_key_adapters(model, args.rank, args.alpha, args.dropout, args.seed).save_pretrained(args.output_dir)
    AutoProcessor.from_pretrained(args.model).save_pretrained(args.output_dir)
    copy_record(Path(args.model), args.output_dir)


if __name__ == "__main__":
    main()
