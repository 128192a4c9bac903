"""Runs the training script for tests, and reads the files that it writes."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoProcessor

from conversations.measured import RowCheck
from conversations.tokens import RowTokenizer
from training import sft
from training.collator import VisionLanguageCollator


ROOT = Path(__file__).parents[2]
# Fields of a run of the tests' tiny model on a CPU.
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
INSTRUCT = {"stage": "instruct", "vision_learning_rate": 2e-4}
PACKED = {"packed_length": 120, "per_device_train_batch_size": 1}
NORM = "model.multi_modal_projector.norm"


def dump_recipe(**fields: Any) -> str:
    """The text of a recipe. Fields that are `None` are left out."""
    given = {name: value for name, value in fields.items() if value is not None}
    return yaml.safe_dump(given)


def run(folder: Path, **fields: Any) -> None:
    """Run the script in this process, with a recipe in `folder` that has these fields and those of `FAST`."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**FAST | fields))
    sft.main(["--config", str(recipe)])


def collate(folder: Path, rows: list[dict[str, Any]], packed: bool = False) -> dict[str, Any]:
    """A batch of rows, tokenized with the chat template of the model in `folder`."""
    processor = AutoProcessor.from_pretrained(folder)
    tokenize = RowTokenizer(processor, processor.chat_template)
    collator = VisionLanguageCollator(tokenize, packed)
    check = RowCheck(tokenize)
    return collator([check(row) for row in rows])


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """The weights of a model or adapter, by name."""
    return load_file(folder / name)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def changed_weights(before: Path, after: Path, file: str = "model.safetensors") -> set[str]:
    """The names of the weights that differ between two folders."""
    old = weights(before, file)
    new = weights(after, file)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}
