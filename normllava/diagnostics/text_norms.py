"""Compares norms of text embeddings in a language model and in vision-language models that were trained from it.

    normllava text_norms --model Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-VL-7B-Instruct

The first model is the base, which the others are compared with. Source: Table 6 of "The Unseen Bias" (arXiv
2512.08374), where training a VLM raised the mean norm of Qwen2.5-7B's embeddings from 0.80 to 0.90.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from normllava.command_line import command, parse

import pandas as pd
import torch
from transformers import AutoModel

from normllava.diagnostics.loading import load_pretrained
from normllava.errors import UserError
from normllava.files import folder_or_id, write_whole
from normllava.norms import vocabulary_norms


logger = logging.getLogger(__name__)

# Name of the table's file in `--output_dir`.
FILE = "text_norms.csv"


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse(build_parser(), argv)
    names = [folder_or_id(name) for name in args.model]
    if len(set(names)) < len(names):
        raise UserError("--model names a model twice: the table has one line for each model.")

    norms = {}
    for name in names:
        logger.info("Loading %s ...", name)
        model = load_pretrained(AutoModel, name, dtype="auto", trust_remote_code=args.trust_remote_code)
        norms[name] = vocabulary_norms(model)

    table = compare_text_norms(norms)
    logger.info("\n%s", table.to_string(index=False, float_format="{:.4f}".format))
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(args.output_dir / FILE, table.to_csv(index=False))


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="normllava text_norms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        nargs="+",
        required=True,
        help="folders or Hub ids of language models or vision-language models; the first is the base",
    )
    parser.add_argument("--output_dir", type=Path, help=f"folder for {FILE} (default: the table is only printed)")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava"
    )
    return parser


def compare_text_norms(norms: Mapping[str, torch.Tensor]) -> pd.DataFrame:
    """A row for each model, with columns `model`, `embeddings`, `mean`, `standard_deviation` and `ratio`.

    `mean` and `standard_deviation` are those of the embeddings' norms, `embeddings` is the number of embeddings, and
    `ratio` is the model's mean over the first model's mean. Embeddings that are all zero, which pad a vocabulary, are
    left out, as in the paper's target norm T (eq. 11). The paper doesn't say whether its Table 6 counts them.

    Args:
        norms: What [`vocabulary_norms`] returns for each model, by the model's name.

    Raises:
        UserError: if all embeddings of a model are zero.
    """
    rows = []
    for name, norms_of_model in norms.items():
        nonzero = norms_of_model[norms_of_model > 0].double()
        if len(nonzero) == 0:
            raise UserError(f"{name}: all of its text embeddings are zero, so there is nothing to compare.")
        rows.append(
            {
                "model": name,
                "embeddings": len(nonzero),
                "mean": nonzero.mean().item(),
                "standard_deviation": nonzero.std(correction=0).item(),  # these are all embeddings, not a sample
            }
        )

    table = pd.DataFrame(rows)
    return table.assign(ratio=table["mean"] / table["mean"].iloc[0])
