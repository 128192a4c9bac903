"""Merge a trained adapter into its unquantized base model, and save the result as an ordinary checkpoint folder.

    python training/merge.py --adapter runs/Qwen2.5-7B-Instruct/qlora --output_dir runs/Qwen2.5-7B-Instruct/merged

The base model is loaded unquantized even if the adapter was trained on 4-bit weights: merging into 4-bit weights would
round the result to 4 bits.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normllava.command_line import command, new_folder, parse

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

from normllava.errors import UserError, errors_named_after
from normllava.files import let_others_read
from training.folders.checkpoints import check_weights, copy_record
from training.folders.loading import load_config, load_processor
from training.folders.run import check_start_weights, start_weights


logger = logging.getLogger(__name__)


def merge(adapter: Path, base: str | None = None) -> LlavaForConditionalGeneration:
    """The base model with an adapter merged in.

    Args:
        adapter: The adapter's folder.
        base: Folder or Hub id of the base model, by default the one that the adapter was trained on.

    Returns:
        The merged model in the dtype of the base model. The merge itself is computed in float32.

    Raises:
        UserError: if the folder holds no adapter, the base model's weights have changed since the adapter was trained,
            or the adapter's weights don't match the base model.
    """
    if not (adapter / "adapter_config.json").exists():
        raise UserError(f"{adapter} holds no adapter: give the output folder of a run of stage 'adapt'.")
    with errors_named_after(adapter):
        peft_config: Any = PeftConfig.from_pretrained(str(adapter))

    recorded_base = peft_config.base_model_name_or_path
    base_name = recorded_base if base is None else base
    # The recorded revision is one of the recorded base model. Another Hub repository doesn't have it.
    revision = peft_config.revision if base_name == recorded_base else None
    config = load_config(base_name, revision)
    with errors_named_after(base_name):
        model = AutoModelForImageTextToText.from_pretrained(base_name, revision=revision, dtype=torch.float32)
    check_start_weights(adapter, base_name, start_weights(base_name, revision))
    with errors_named_after(adapter):
        adapted_model = PeftModel.from_pretrained(model, str(adapter))
    check_weights(adapter, adapted_model)
    merged_model = adapted_model.merge_and_unload()
    if config.dtype is None:  # the config doesn't tell the dtype, so the weights stay float32
        return merged_model
    return merged_model.to(config.dtype)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Merge an adapter into its base model.")
    parser.add_argument("--adapter", required=True, type=Path, help="folder of the adapter")
    parser.add_argument("--output_dir", required=True, type=new_folder, help="folder to write")
    parser.add_argument("--base", help="the base model, if it is no longer where it was in training")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse(build_parser(), argv)
    model = merge(options.adapter, options.base)
    model.save_pretrained(options.output_dir)
    load_processor(options.adapter).save_pretrained(options.output_dir)
    copy_record(options.adapter, options.output_dir)
    let_others_read(options.output_dir)
    logger.info("Merged %s into its base model, and saved to %s", options.adapter, options.output_dir)


if __name__ == "__main__":
    main()
