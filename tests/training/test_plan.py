"""The plan of a step against what runs of the training script allocate, and FLOPs against torch's own count."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, run, weights
from training.command_line import parse_arguments
from training.loading import prepare_model
from training.plan import Batch, StepPlan, main, plan_step
from training.stages import base_model
from training.trainer import NormLlavaTrainer


SAMPLES = 8
STAGES = {"align": {"stage": "align"}, "instruct": INSTRUCT, "adapt": {"stage": "adapt", "lora_r": 4}}


@pytest.fixture
def recipe(composed: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    return {**FAST, "model_name_or_path": str(composed()), "dataset_name": "none", "output_dir": str(tmp_path / "out")}


def plan_fields(fields: dict[str, Any], batch: Batch, devices: int = 1) -> StepPlan:
    """The plan of a recipe."""
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    config = NormLlavaConfig.from_pretrained(fields["model_name_or_path"])
    return plan_step(config, run_args, args, batch, devices)


@pytest.fixture(scope="session")
def equal_rows(data: Path) -> Path:
    """32 rows that differ in nothing, each with a picture and an answer of 20 tokens."""
    turns = [{"from": "human", "value": "<image>\n" + "What? " * 15}, {"from": "gpt", "value": "a number of 20 bytes"}]
    path = data.with_name("equal.json")
    path.write_text(json.dumps([{"image": "0.png", "conversations": turns}] * 32))
    return path


def measure_run(monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any) -> tuple[int, Batch]:
    """Bytes that a run of the script allocates at most while it trains, by torch's profiler, and what its passes are
    made of. The weights, which it has loaded before, are not among the bytes."""
    train = NormLlavaTrainer.train
    trace = folder / "trace.json"
    rows: list[dict[str, Any]] = []

    def profiled(trainer: NormLlavaTrainer, *args: Any, **kwargs: Any) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            train(trainer, *args, **kwargs)
        record.export_chrome_trace(str(trace))
        rows.append(trainer.train_dataset[0])

    monkeypatch.setattr(NormLlavaTrainer, "train", profiled)
    run(folder, **fields)
    events = json.loads(trace.read_text())["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    supervised = sum(label != IGNORED for label in rows[0]["labels"])
    return peak, Batch(SAMPLES, rows[0]["length"], supervised, is_packed=False)


@pytest.mark.parametrize(("stage", "checkpointed"), [("align", False), ("instruct", False), ("adapt", True)])
def test_a_plan_is_within_a_tenth_of_the_peak_of_a_run(
    recipe: dict[str, Any],
    equal_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    checkpointed: bool,
) -> None:
    fields = {**recipe, **STAGES[stage], "dataset_name": str(equal_rows), "gradient_checkpointing": checkpointed}
    fields |= {"per_device_train_batch_size": SAMPLES, "global_batch_size": 2 * SAMPLES, "save_strategy": "no"}
    peak, batch = measure_run(monkeypatch, tmp_path, **fields)
    plan = plan_fields(fields, batch)
    assert plan.peak - plan.weights == pytest.approx(peak, rel=0.1)


def count_learned(checkpoint: Path, stage: str) -> tuple[int, int]:
    """Parameters that a stage trains of the tests' model, and tensors that they are in, by their names and sizes."""
    sizes = {name: tensor.numel() for name, tensor in weights(checkpoint).items()}
    if stage == "instruct":
        # Llava reads the hidden state before the last of the vision encoder's three layers.
        unread = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.", "vision_tower.head.")
        learned = [size for name, size in sizes.items() if not any(part in name for part in unread)]
    else:
        learned = [size for name, size in sizes.items() if ".multi_modal_projector." in name]
    if stage == "adapt":
        # Two layers of seven projections, each with adapters of rank 4: q, k, v, o, gate, up and down.
        for outputs, inputs in ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)) * 2:
            learned += [4 * inputs, outputs * 4]
    return sum(learned), len(learned)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_gradients_and_states_are_those_of_the_parameters(
    composed: Callable[..., Path], recipe: dict[str, Any], stage: str
) -> None:
    fields = {**recipe, **STAGES[stage]}
    batch = Batch(SAMPLES, tokens=150, supervised=20, is_packed=False)
    plan = plan_fields(fields, batch)
    num_learned, num_tensors = count_learned(composed(), stage)
    num_frozen = sum(tensor.numel() for tensor in weights(composed()).values())
    if stage == "adapt":
        num_frozen += num_learned  # adapters, and a copy of the projector, beside the original
    assert plan.weights == 4 * num_frozen
    assert plan.gradients == 4 * num_learned
    assert plan.states == 2 * plan.gradients + 4 * num_tensors  # AdamW's two means, and a step for each tensor

    halves = plan_fields(fields, batch, devices=2)
    assert (halves.weights, halves.gradients) == (plan.weights // 2, plan.gradients // 2)
    assert halves.activations == pytest.approx(plan.activations, rel=0.01)  # when Python frees a tensor may differ
    assert halves.flops == plan.flops

    in_bfloat16 = plan_fields({**fields, "bf16": True}, batch)
    if stage == "instruct":
        num_learned = num_frozen  # unread layers get the output of a trained encoder, in float32
    assert in_bfloat16.weights == 4 * num_learned + 2 * (num_frozen - num_learned)


@pytest.mark.parametrize("stage", STAGES)
def test_flops_are_those_of_eager_attention_over_half_of_a_causal_matrix(recipe: dict[str, Any], stage: str) -> None:
    num_tokens, num_supervised = 150, 20
    fields = {**recipe, **STAGES[stage]}
    plan = plan_fields(fields, Batch(1, num_tokens, num_supervised, is_packed=False))

    config = NormLlavaConfig.from_pretrained(recipe["model_name_or_path"])
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    whole = NormLlavaForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    trained, _ = prepare_model(whole, run_args, args, torch.float32)
    model = base_model(trained.train())
    input_ids = torch.tensor([[config.image_token_id] * 4 + [5] * (num_tokens - 4)])
    with FlopCounterMode(display=False) as counter:
        states = model.model(input_ids=input_ids, pixel_values=torch.rand(1, 3, 28, 28)).last_hidden_state
        model.lm_head(states[:, -num_supervised:]).sum().backward()

    text = config.text_config
    halved = 6 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * num_tokens**2
    assert plan.flops == pytest.approx(counter.get_total_flops() - halved, rel=0.03)


def test_a_plan_goes_by_max_steps_and_refuses_what_no_sample_holds(
    recipe: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fields = [f"--{name}={value}" for name, value in {**recipe, "stage": "align"}.items()]

    def report(*options: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            main([*options, *fields])
        return "\n".join(caplog.messages[-3:])

    assert report("--rows", "40", "--num_train_epochs", "1") == report("--rows", "7", "--max_steps", "10")
    told = r"assumed: 40 rows of 1024 tokens, 200 supervised, [\s\S]*: (.*) FLOPs, (.*) hours, devices: 2"
    match = re.fullmatch(told, report("--rows=40", "--tflops=1e-07", "--devices=2"))
    flops, hours = map(float, match.groups())
    assert hours == pytest.approx(flops / (2 * 1e5 * 3600), rel=0.01)
    with pytest.raises(SystemExit, match=r"^error: A sample of 10 tokens can't hold .* supervised ones: set --tokens"):
        report("--tokens", "10")
