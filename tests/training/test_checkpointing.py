"""A rehearsal before training turns gradient checkpointing off if memory allows. A resumed run keeps this choice."""

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
from training.loop import checkpointing
from training.loop.checkpointing import checkpointed_stacks, peak_without_checkpointing, stop_checkpointing


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
    """The peak of the bytes that a pass of 4 rows of 100 tokens allocates. A trace is written into `folder`."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        input_ids = torch.zeros(4, 100, dtype=torch.long)
        model(input_ids, use_cache=False).logits.sum().backward()
    trace_file = folder / "trace.json"
    profiler.export_chrome_trace(str(trace_file))
    events = json.loads(trace_file.read_text())["traceEvents"]

    # Each event has the bytes that were allocated, negative if they were freed, and the total after the event.
    allocations = [event["args"] for event in events if event["name"] == "[memory]"]
    total_before = allocations[0]["Total Allocated"] - allocations[0]["Bytes"]
    peak = max(allocation["Total Allocated"] for allocation in allocations)
    return peak - total_before


@pytest.mark.parametrize("num_layers", [4, 12])
def test_the_peak_without_checkpointing_is_extrapolated(num_layers: int, tmp_path: Path) -> None:
    model = llama(num_layers)
    extrapolated = peak_without_checkpointing(model, lambda: measure_pass(model, tmp_path))
    (layers,) = checkpointed_stacks(model)
    assert len(layers) == num_layers  # all layers are checkpointed again

    stop_checkpointing(model)
    measured = measure_pass(model, tmp_path)
    # The extrapolated peak is too high by less than one and a half layers.
    assert measured < extrapolated < measured * (1 + 1.5 / num_layers)


@pytest.fixture
def fields(make_model_folder: Callable[..., Path], data: Path, tmp_path: Path) -> dict[str, Any]:
    """The fields of a recipe that doesn't say whether layers are checkpointed."""
    return {
        **INSTRUCT,
        **PACKED,
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
        "gradient_checkpointing": None,  # takes the field out of the recipe
        "save_steps": 4,
        "output_dir": str(tmp_path / "out"),
    }


# The bytes of simulated devices on which a pass takes 1,000 bytes. A pass may take 90% of the memory.
ENOUGH_MEMORY = 1200
TOO_LITTLE_MEMORY = 1050


def simulate_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[str]:
    """Simulate a device with `num_bytes` of memory, on which each pass takes 1,000 bytes.

    Returns:
        A list that grows by an entry with each pass that is measured.
    """
    measured_passes: list[str] = []

    def measure(run_pass: Callable[[], None], device: torch.device) -> int:
        run_pass()
        measured_passes.append("a pass")
        return 1000

    monkeypatch.setattr(checkpointing, "memory_limit", lambda device: num_bytes)
    monkeypatch.setattr(checkpointing, "measure_peak", measure)
    return measured_passes


def was_checkpointed(output_dir: Path) -> bool:
    """Whether the layers of a run were checkpointed, as its `run.json` says."""
    record = json.loads((output_dir / "run.json").read_text())
    return record["arguments"]["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("num_bytes", "num_bytes_when_resumed", "is_checkpointed"),
    [
        pytest.param(ENOUGH_MEMORY, TOO_LITTLE_MEMORY, False, id="enough memory"),
        pytest.param(TOO_LITTLE_MEMORY, ENOUGH_MEMORY, True, id="too little memory"),
    ],
)
def test_memory_decides_and_a_resumed_run_keeps_the_choice(
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_bytes: int,
    num_bytes_when_resumed: int,
    is_checkpointed: bool,
) -> None:
    out = Path(fields["output_dir"])
    measured_passes = simulate_memory(monkeypatch, num_bytes)
    run(tmp_path, **fields, max_steps=4)
    assert f"gradient checkpointing: {is_checkpointed}; without it" in caplog.text
    assert was_checkpointed(out) is is_checkpointed
    # Two batches are measured three times each: with all layers checkpointed, without checkpointing in the encoder's
    # first layer, and without checkpointing in the decoder's first layer.
    assert len(measured_passes) == 2 * 3

    measured_passes = simulate_memory(monkeypatch, num_bytes_when_resumed)
    resume = {"resume_from_checkpoint": True, "resume_changed": True}  # allows another `max_steps`
    run(tmp_path, **fields, **resume, max_steps=8)
    assert was_checkpointed(out) is is_checkpointed
    assert measured_passes == []


def test_training_without_checkpointing_is_the_same_to_the_bit(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed_dir = tmp_path / "with"
    uncheckpointed_dir = tmp_path / "without"
    run(tmp_path, **{**fields, "output_dir": str(checkpointed_dir)})  # on a CPU, checkpointing stays on
    simulate_memory(monkeypatch, ENOUGH_MEMORY)
    run(tmp_path, **{**fields, "output_dir": str(uncheckpointed_dir)})

    assert was_checkpointed(checkpointed_dir)
    assert was_checkpointed(uncheckpointed_dir) is False
    assert changed_weights(checkpointed_dir, uncheckpointed_dir) == set()
    losses = [step["loss"] for step in read_steps(uncheckpointed_dir)]
    assert losses == [step["loss"] for step in read_steps(checkpointed_dir)]


def test_checkpointing_in_the_recipe_is_obeyed_without_measuring(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_passes = simulate_memory(monkeypatch, ENOUGH_MEMORY)
    run(tmp_path, **{**fields, "gradient_checkpointing": True, "max_steps": 1})
    assert was_checkpointed(Path(fields["output_dir"]))
    assert measured_passes == []
