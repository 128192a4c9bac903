"""The rehearsal turns gradient checkpointing off where memory allows, and a resumed run keeps what was chosen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from script_runs import INSTRUCT, PACKED, changed_weights, read_steps, run
from training import trainer
from training.checkpointing import checkpointed_stacks, peak_without_checkpointing, stop_checkpointing


def llama(num_layers: int) -> LlamaForCausalLM:
    """A small decoder in training mode, whose layers are checkpointed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4, vocab_size=50
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model


def measure_pass(model: nn.Module, folder: Path) -> int:
    """The peak of the bytes that a pass of 4 rows of 100 tokens allocates."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        input_ids = torch.zeros(4, 100, dtype=torch.long)
        model(input_ids, use_cache=False).logits.sum().backward()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    at_start = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return max(entry["Total Allocated"] for entry in memory) - at_start


@pytest.mark.parametrize("num_layers", [4, 12])
def test_the_peak_without_checkpointing_is_extrapolated(num_layers: int, tmp_path: Path) -> None:
    model = llama(num_layers)
    extrapolated = peak_without_checkpointing(model, lambda: measure_pass(model, tmp_path))
    (layers,) = checkpointed_stacks(model)
    assert len(layers) == num_layers  # all are checkpointed again

    stop_checkpointing(model)
    measured = measure_pass(model, tmp_path)
    # It is too high by less than one and a half layers.
    assert measured < extrapolated < measured * (1 + 1.5 / num_layers)


@pytest.fixture
def fields(composed: Callable[..., Path], data: Path, tmp_path: Path) -> dict[str, Any]:
    """The fields of a recipe that doesn't say whether layers are checkpointed."""
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    return {**fields, "gradient_checkpointing": None, "save_steps": 4, "output_dir": str(tmp_path / "out")}


def give_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[int]:
    """Make the CPU a device with so much memory, on which each pass takes 1,000 bytes.

    Returns:
        A list that gets a 1 for each pass that is measured.
    """
    measured: list[int] = []

    def measure(run_pass: Callable[[], None], device: torch.device) -> int:
        run_pass()
        measured.append(1)
        return 1000

    monkeypatch.setattr(trainer, "memory_limit", lambda device: num_bytes)
    monkeypatch.setattr(trainer, "measure_peak", measure)
    return measured


def recorded(folder: Path) -> bool:
    """Whether the record in a folder says that layers were checkpointed."""
    return json.loads((folder / "run.json").read_text())["arguments"]["gradient_checkpointing"]


@pytest.mark.parametrize(("num_bytes", "checkpointed"), [(1200, False), (1050, True)])
def test_memory_decides_and_a_resumed_run_keeps_the_choice(
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_bytes: int,
    checkpointed: bool,
) -> None:
    out = Path(fields["output_dir"])
    measured = give_memory(monkeypatch, num_bytes)
    run(tmp_path, **fields, max_steps=4)
    assert f"gradient checkpointing: {checkpointed}; without it" in caplog.text
    assert recorded(out) is checkpointed
    # Two batches were measured as they are, and without checkpointing in the encoder's and the decoder's first layer.
    assert len(measured) == 6

    # The resumed run has other memory, and measures nothing.
    measured = give_memory(monkeypatch, 2250 - num_bytes)
    run(tmp_path, **fields, max_steps=8, resume_from_checkpoint=True, resume_changed=True)
    assert recorded(out) is checkpointed
    assert measured == []


def test_training_without_checkpointing_is_the_same_to_the_bit(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_checkpointing = tmp_path / "with"
    run(tmp_path, **{**fields, "output_dir": str(with_checkpointing)})  # as by default on a CPU
    give_memory(monkeypatch, 1_000_000)
    run(tmp_path, **fields)

    out = Path(fields["output_dir"])
    assert [recorded(with_checkpointing), recorded(out)] == [True, False]
    assert changed_weights(with_checkpointing, out) == set()
    losses = [step["loss"] for step in read_steps(out)]
    assert losses == [step["loss"] for step in read_steps(with_checkpointing)]


def test_a_recipe_that_says_it_is_obeyed(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = give_memory(monkeypatch, 1_000_000)
    run(tmp_path, **{**fields, "gradient_checkpointing": True, "max_steps": 1})
    assert recorded(Path(fields["output_dir"])) is True
    assert measured == []
