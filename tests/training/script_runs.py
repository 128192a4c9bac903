"""Runs the training script for tests, and reads the files that it writes."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoProcessor

from normllava.conversations.checked_rows import RowCheck
from normllava.conversations.row_tokenizer import RowTokenizer
from training import sft
from training.rows.collator import VisionLanguageCollator


ROOT = Path(__file__).parents[2]  # the repository's folder
# Recipe fields with which the tests' tiny model trains fast on a CPU.
FAST = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "global_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 2,
    "report_to": "none",
    "gradient_checkpointing": False,
    "num_train_epochs": 1,
}
# Recipe fields of stage "instruct".
INSTRUCT = {"stage": "instruct", "vision_learning_rate": 2e-4}
# Recipe fields of a run with packed rows. Each packed row is a batch.
PACKED = {"packed_length": 120, "per_device_train_batch_size": 1}
# The name of the projector's norm layer, which begins the names of its weights.
NORM = "model.multi_modal_projector.norm"


def dump_recipe(**fields: Any) -> str:
    """The text of a recipe with these fields. A field that is `None` is left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    return yaml.safe_dump(present)


def run(folder: Path, **fields: Any) -> None:
    """Run the training script in this process, with a recipe of the fields of `FAST` and `fields`.

    A field that both have is taken from `fields`. The recipe is written into `folder`.
    """
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, **fields}))
    sft.main(["--config", str(recipe)])


def collate(folder: Path, rows: list[dict[str, Any]], packed: bool = False) -> dict[str, Any]:
    """The batch that the collator makes of rows, with the chat template of the model in `folder`."""
    processor = AutoProcessor.from_pretrained(folder)
    tokenize = RowTokenizer(processor, processor.chat_template)
    check_and_tokenize = RowCheck(tokenize)
    tokenized_rows = [check_and_tokenize(row) for row in rows]
    collator = VisionLanguageCollator(tokenize, packed)
    return collator(tokenized_rows)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`. The last line is on the whole run, the others on steps and evaluations."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_steps(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl` on training steps."""
    return [line for line in read_metrics(folder) if "loss" in line]  # an evaluation has "eval/loss" instead


def load_weights(folder: Path, file_name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """The weights of the model or adapter in a folder, by name."""
    return load_file(folder / file_name)


def changed_weights(before: Path, after: Path, file_name: str = "model.safetensors") -> set[str]:
    """The names of the weights that differ between two folders with the same model or adapter."""
    old = load_weights(before, file_name)
    new = load_weights(after, file_name)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}
