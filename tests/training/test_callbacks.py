"""Training logs the same norms at the modality interface as the diagnostics measure on the same rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from conversations.loading import load_rows
from diagnostics.probe import Probe, Record
from diagnostics.tokens import classify_sample, token_ids
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, collate, read_metrics, run


@torch.no_grad()
def record_rows(folder: Path, rows: str) -> list[Record]:
    """A record of the diagnostics for each row by itself, tokenized as in training."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    records = []
    for row in load_rows(rows):
        inputs = collate(folder, [row])
        del inputs["labels"]
        tokens = classify_sample(inputs, token_ids(model, processor))
        with Probe(model, inputs, tokens) as probe:
            model.model(**inputs)
        record = probe.record()
        assert not record.tokens.excluded["sink"].any()  # training would count sinks too
        records.append(record)
    return records


def test_norms_of_a_step_are_those_of_the_diagnostics(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    rows_with_pictures = [row for row in json.loads(data.read_text()) if "image" in row]
    path = data.with_name("pictures.json")
    path.write_text(json.dumps(rows_with_pictures))

    # `layer_norms[0]` are norms at the decoder's input.
    records = record_rows(composed(), str(path))
    visual = torch.cat([record.layer_norms[0, record.tokens.visual] for record in records]).mean().item()
    text = torch.cat([record.layer_norms[0, record.tokens.text] for record in records]).mean().item()

    # One step trains on all 24 rows.
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(path)}
    fields |= {"max_steps": 1, "logging_steps": 1, "global_batch_size": 24}
    settings: dict[str, dict[str, Any]] = {
        "padded": {},
        "packed": PACKED,
        "checkpointing": {"gradient_checkpointing": True},
    }
    for name, setting in settings.items():
        run(tmp_path, **{**fields, **setting}, output_dir=str(tmp_path / name))
        step, *_, summary = read_metrics(tmp_path / name)
        assert step["norm/visual"] == pytest.approx(visual, rel=1e-5), name
        assert step["norm/text"] == pytest.approx(text, rel=1e-5), name
        assert step["norm/ratio"] == pytest.approx(visual / text, rel=1e-5), name
        # Trainer's figures that count padding, or a packed row as a sample, are not logged.
        assert summary.keys().isdisjoint({"total_flos", "train_samples_per_second"})
