"""Merge a trained adapter into its base model, unquantized, and save an ordinary checkpoint folder.

    python training/merge.py --adapter runs/Qwen2.5-7B-Instruct/qlora --output_dir runs/Qwen2.5-7B-Instruct/merged

Merging into 4-bit weights would round the result to 4 bits again.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from training.checkpoints import check_weights, copy_record
from training.loading import load_config


logger = logging.getLogger(__name__)


def merge(
    adapter: str, base: str | None = None, dtype: str = "auto", base_revision: str | None = None
) -> NormLlavaForConditionalGeneration:
    """The base model with the adapter merged in.

    Args:
        adapter: Folder or Hub id of the adapter.
        base: Folder or Hub id of the base model, if it is no longer where it was in training.
        dtype: Of the merged weights; `"auto"` is what the base's config.json states, or float32. Merging itself is in
            float32.
        base_revision: Revision of `base` on the Hub; without `base`, the one that the adapter was trained on.

    Raises:
        ValueError: if there is no adapter, or one that lacks weights, or no NormLlava where its base should be, or one
            without the key adapters that were trained.
    """
    if Path(adapter, "config.json").exists() and not Path(adapter, "adapter_config.json").exists():
        raise ValueError(f"{adapter} is a whole model, not an adapter: there is nothing to merge.")
    peft_config: Any = PeftConfig.from_pretrained(adapter)
    name = str(base or peft_config.base_model_name_or_path)
    revision = base_revision if base else peft_config.revision
    try:
        config = load_config(name, revision)
    except ValueError as error:
        raise ValueError(f"Can't merge into the base of {adapter}: {error} Give the base with --base.") from error
    if "key_adapter" in (peft_config.modules_to_save or ()) and not hasattr(config, "key_adapter_rank"):
        raise ValueError(
            f"{adapter} has key adapters, but its base {name} has none. Give the base that has them with --base."
        )
    model = AutoModelForImageTextToText.from_pretrained(name, revision=revision, dtype=torch.float32)
    folder = Path(adapter)
    if not folder.is_dir():
        folder = Path(snapshot_download(adapter, allow_patterns="adapter_*"))
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except KeyError as error:
        raise ValueError(f"{adapter} lacks the weight {error}.") from error
    check_weights(folder, adapted)
    return adapted.merge_and_unload().to(config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Merge an adapter into its base model.")
    parser.add_argument("--adapter", required=True, help="folder or Hub id of the adapter")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder to write")
    parser.add_argument("--base", help="the base model, if it is no longer where it was in training")
    parser.add_argument("--base_revision", help="its revision on the Hub (default: main)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="default: as the base's config.json states")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.output_dir.exists() and any(args.output_dir.iterdir()):
        parser.error(f"{args.output_dir} is not empty; choose another folder")
    if args.base_revision and not args.base:
        parser.error("--base_revision is for --base; without it the adapter's own base is loaded, at its revision")
    try:
        merged = merge(args.adapter, args.base, args.dtype, args.base_revision)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    merged.save_pretrained(args.output_dir)
    AutoProcessor.from_pretrained(args.adapter).save_pretrained(args.output_dir)
    copy_record(Path(args.adapter), args.output_dir)
    logger.info("Saved to %s", args.output_dir)


if __name__ == "__main__":
    main()
