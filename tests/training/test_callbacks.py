"""What training logs of the modality interface is what the diagnostics measure on the same rows."""

import json
from collections.abc import Callable
from pathlib import Path

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
    """What the diagnostics see of each row by itself, tokenized as training does it."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    records = []
    for row in load_rows(rows):
        inputs = collate(folder, [row])
        del inputs["labels"]
        with Probe(model, inputs, classify_sample(inputs, token_ids(model, processor))) as probe:
            model.model(**inputs)
        record = probe.record()
        assert not record.tokens.excluded["sink"].any()  # which training can't know
        records.append(record)
    return records


def test_norms_of_a_step_are_those_of_the_diagnostics(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    rows = data.with_name("pictures.json")
    rows.write_text(json.dumps([row for row in json.loads(data.read_text()) if "image" in row]))
    records = record_rows(composed(), str(rows))
    expected = {}
    for modality in ("visual", "text"):
        norms = [record.layer_norms[0, getattr(record.tokens, modality)] for record in records]
        expected[modality] = torch.cat(norms).mean().item()
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(rows)}
    fields |= {"max_steps": 1, "logging_steps": 1, "global_batch_size": 24}
    for name, more in (("padded", {}), ("packed", PACKED), ("checkpointing", {"gradient_checkpointing": True})):
        run(tmp_path, **{**fields, **more}, output_dir=str(tmp_path / name))
        line, *_, last = read_metrics(tmp_path / name)
        assert last.keys().isdisjoint({"total_flos", "train_samples_per_second"})
        assert line["norm/visual"] == pytest.approx(expected["visual"], rel=1e-5), name
        assert line["norm/text"] == pytest.approx(expected["text"], rel=1e-5), name
        assert line["norm/ratio"] == pytest.approx(expected["visual"] / expected["text"], rel=1e-5), name
