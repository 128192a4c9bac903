"""Training logs the same norms of image and text tokens as the diagnostics measure on the same rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.loading import load_rows
from normllava.diagnostics.probe import Probe, Record
from normllava.tokens import classify_sample, token_ids
from script_runs import INSTRUCT, PACKED, collate, read_metrics, run


@torch.no_grad()
def measure_rows(folder: Path, rows_file: Path) -> list[Record]:
    """What the diagnostics measure on each row of a file by itself, tokenized as in training."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    records = []
    for row in load_rows(str(rows_file)):
        inputs = collate(folder, [row])
        del inputs["labels"]
        tokens = classify_sample(inputs, token_ids(model, processor))
        with Probe(model, inputs, tokens) as probe:
            model.model(**inputs)
        record = probe.record()
        # Training counts sinks, and the diagnostics leave them out, so a sink would make the norms differ.
        assert not record.tokens.excluded["sink"].any()
        records.append(record)
    return records


def test_norms_of_a_step_are_those_of_the_diagnostics(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    rows_with_pictures = [row for row in json.loads(data.read_text()) if "image" in row]
    rows_file = data.with_name("pictures.json")
    rows_file.write_text(json.dumps(rows_with_pictures))

    # The norms of image tokens and of text tokens at the decoder's input, from all rows.
    image_norms = []
    text_norms = []
    for record in measure_rows(make_model_folder(), rows_file):
        input_norms = record.layer_norms[0]  # [num_tokens]
        image_norms.append(input_norms[record.tokens.image])
        text_norms.append(input_norms[record.tokens.text])
    expected_image = torch.cat(image_norms).mean().item()
    expected_text = torch.cat(text_norms).mean().item()

    # Each run has one step on all 24 rows.
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(rows_file)}
    fields |= {"max_steps": 1, "logging_steps": 1, "global_batch_size": 24}
    settings: dict[str, dict[str, Any]] = {
        "padded": {},
        "packed": PACKED,
        "checkpointing": {"gradient_checkpointing": True},
    }
    for name, setting in settings.items():
        fields_of_run = {**fields, **setting, "output_dir": str(tmp_path / name)}
        run(tmp_path, **fields_of_run)
        metrics = read_metrics(tmp_path / name)
        step = metrics[0]
        assert step["norm/image"] == pytest.approx(expected_image, rel=1e-5), name
        assert step["norm/text"] == pytest.approx(expected_text, rel=1e-5), name
        assert step["norm/ratio"] == pytest.approx(expected_image / expected_text, rel=1e-5), name
        # Two of Trainer's figures on the whole run are left out, since they would be wrong: `total_flos` counts
        # padding, and `train_samples_per_second` counts a packed row as one sample.
        summary = metrics[-1]
        assert summary.keys().isdisjoint({"total_flos", "train_samples_per_second"})
