"""Merge a trained adapter into its base model, unquantized, and save an ordinary checkpoint folder.

    python training/merge.py --adapter runs/Qwen2.5-7B-Instruct/qlora --output_dir runs/Qwen2.5-7B-Instruct/merged

Merging into 4-bit weights would round the result to 4 bits again.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from common.console import command, new_folder, parse
from common.errors import UserError
from modeling_normllava import NormLlavaForConditionalGeneration
from training.checkpoints import check_weights, copy_record
from training.loading import load_config


def merge(adapter: Path, base: str | None = None) -> NormLlavaForConditionalGeneration:
    """The base model with the adapter in a folder merged in, in float32, and then in the base's dtype.

    `base` is the folder or Hub id of the base model, if it is no longer where it was in training. Raises `UserError`
    if the adapter lacks weights or is another model's.
    """
    if not (adapter / "adapter_config.json").exists():
        raise UserError(f"{adapter} holds no adapter: give the output folder of a run of stage 'adapt'.")
    peft_config: Any = PeftConfig.from_pretrained(str(adapter))
    name, revision = base or peft_config.base_model_name_or_path, peft_config.revision
    config = load_config(name, revision)
    model = AutoModelForImageTextToText.from_pretrained(name, revision=revision, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(adapter))
    check_weights(adapter, adapted)
    return adapted.merge_and_unload().to(config.dtype or torch.float32)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description="Merge an adapter into its base model.")
    parser.add_argument("--adapter", required=True, type=Path, help="folder of the adapter")
    parser.add_argument("--output_dir", required=True, type=new_folder, help="folder to write")
    parser.add_argument("--base", help="the base model, if it is no longer where it was in training")
    return parser


@command()
def main() -> None:
    """Run the command line."""
    args = parse(build_parser())
    merge(args.adapter, args.base).save_pretrained(args.output_dir)
    AutoProcessor.from_pretrained(args.adapter).save_pretrained(args.output_dir)
    copy_record(args.adapter, args.output_dir)


if __name__ == "__main__":
    main()
