"""Add key adapters to a NormLlava or a Llava. The model's outputs don't change until the adapters are trained.

    python training/add_key_adapters.py --model checkpoints/stage1 --rank 16 --output_dir checkpoints/stage1-keys

Key adapters are low-rank updates of the decoder's keys, as in MaLoRA (arXiv 2510.26721). docs/key_alignment.md
describes them, and how they are trained.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from normllava.command_line import command, new_folder, parse

import torch
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

from modeling_normllava import NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterForConditionalGeneration
from normllava.errors import errors_named_after
from normllava.files import let_others_read
from normllava.llava import add_norm
from training.folders.checkpoints import copy_record
from training.folders.loading import load_config, load_processor


def add_key_adapters(
    model: LlavaForConditionalGeneration, rank: int, alpha: float, dropout: float, seed: int = 42
) -> NormLlavaKeyAdapterForConditionalGeneration:
    """A model with key adapters. It is made of the given model's modules, whose decoder gets the adapters too.

    Args:
        model: The model without key adapters, a NormLlava or a Llava.
        rank: The rank of the updates.
        alpha: The updates are scaled by alpha / rank.
        dropout: The dropout on the input of the updates, in training.
        seed: The seed of the new weights.

    Raises:
        ValueError: if the decoder can't have key adapters, or has them already.
    """
    if type(model) is LlavaForConditionalGeneration:
        model = add_norm(model, "none")
    adapter_fields = {"key_adapter_rank": rank, "key_adapter_alpha": alpha, "key_adapter_dropout": dropout}
    config = NormLlavaKeyAdapterConfig.from_dict(model.config.to_dict() | adapter_fields)
    config._attn_implementation = model.config._attn_implementation  # to_dict() leaves this field out

    torch.manual_seed(seed)
    adapted_model = NormLlavaKeyAdapterForConditionalGeneration(
        config, model.model.vision_tower, model.model.language_model, model.lm_head
    )
    adapted_model.model.multi_modal_projector = model.model.multi_modal_projector
    adapted_model.generation_config = model.generation_config

    # Key adapters need a mask of the image tokens, which some decoders don't pass on to their layers. With such a
    # decoder, this forward pass on a single token raises a ValueError.
    adapted_model.eval()
    single_token = torch.zeros((1, 1), dtype=torch.long)
    with torch.no_grad():
        adapted_model(input_ids=single_token)
    return adapted_model


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Add key adapters to a model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of a NormLlava or a Llava")
    parser.add_argument("--output_dir", required=True, type=new_folder, help="folder to write")
    parser.add_argument("--rank", type=int, default=16, help="rank of the updates")
    parser.add_argument("--alpha", type=float, default=32, help="the updates are scaled by alpha / rank")
    parser.add_argument("--dropout", type=float, default=0.05, help="dropout in front of the updates, in training")
    parser.add_argument("--seed", type=int, default=42, help="seed of the new weights")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse(build_parser(), argv)
    load_config(options.model)  # raises a UserError if this is neither a NormLlava nor a Llava
    with errors_named_after(options.model):
        model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
        adapted_model = add_key_adapters(model, options.rank, options.alpha, options.dropout, options.seed)
    adapted_model.save_pretrained(options.output_dir)
    load_processor(options.model).save_pretrained(options.output_dir)
    copy_record(Path(options.model), options.output_dir)
    let_others_read(options.output_dir)


if __name__ == "__main__":
    main()
