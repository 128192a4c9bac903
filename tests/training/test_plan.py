"""Plans of a step: their memory against what a run allocates, and their FLOPs against torch's count of a real pass."""

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
from script_runs import FAST, INSTRUCT, load_weights, run
from training.command_line import parse_arguments
from training.loading import prepare_model
from training.plan import Batch, StepPlan, main, plan_step
from training.stages import base_model
from training.trainer import NormLlavaTrainer


SAMPLES = 8
STAGES = {"align": {"stage": "align"}, "instruct": INSTRUCT, "adapt": {"stage": "adapt", "lora_r": 4}}


@pytest.fixture
def recipe(composed: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """The fields of a recipe that all stages share."""
    return {**FAST, "model_name_or_path": str(composed()), "dataset_name": "none", "output_dir": str(tmp_path / "out")}


def plan_fields(fields: dict[str, Any], batch: Batch, devices: int = 1) -> StepPlan:
    """The plan of a recipe with these fields."""
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    config = NormLlavaConfig.from_pretrained(fields["model_name_or_path"])
    return plan_step(config, run_args, args, batch, devices)


@pytest.fixture(scope="session")
def equal_rows(data: Path) -> Path:
    """32 equal rows, each with a picture and an answer of 20 tokens."""
    turns = [{"from": "human", "value": "<image>\n" + "What? " * 15}, {"from": "gpt", "value": "a number of 20 bytes"}]
    path = data.with_name("equal.json")
    path.write_text(json.dumps([{"image": "0.png", "conversations": turns}] * 32))
    return path


def measure_run(monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any) -> tuple[int, Batch]:
    """Run the script under torch's profiler.

    Returns:
        The peak of the bytes that it allocates while it trains, and the batch of each pass. The bytes don't include
        the weights, which are loaded before.
    """
    train = NormLlavaTrainer.train
    trace = folder / "trace.json"
    first_rows: list[dict[str, Any]] = []

    def train_under_profiler(trainer: NormLlavaTrainer, *args: Any, **kwargs: Any) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train(trainer, *args, **kwargs)
        profiler.export_chrome_trace(str(trace))
        first_rows.append(trainer.train_dataset[0])

    monkeypatch.setattr(NormLlavaTrainer, "train", train_under_profiler)
    run(folder, **fields)

    events = json.loads(trace.read_text())["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    (row,) = first_rows
    num_supervised = sum(label != IGNORED for label in row["labels"])
    return peak, Batch(SAMPLES, row["length"], num_supervised, is_packed=False)


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


# The output and input sizes of the projections in a decoder layer of the tests' model: q, k, v, o, gate, up and down.
PROJECTIONS = ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48))
NUM_LAYERS = 2
LORA_RANK = 4


def count_trained(checkpoint: Path, stage: str) -> tuple[int, int]:
    """How many parameters of the tests' model a stage trains, and how many tensors hold them."""
    sizes = {name: tensor.numel() for name, tensor in load_weights(checkpoint).items()}
    if stage == "instruct":
        # Of the vision encoder's three layers Llava reads the second one's output, so what follows is not trained.
        unread = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.", "vision_tower.head.")
        trained_sizes = [size for name, size in sizes.items() if not any(part in name for part in unread)]
    else:
        trained_sizes = [size for name, size in sizes.items() if ".multi_modal_projector." in name]
    if stage == "adapt":
        for size_out, size_in in PROJECTIONS * NUM_LAYERS:
            trained_sizes += [LORA_RANK * size_in, size_out * LORA_RANK]
    return sum(trained_sizes), len(trained_sizes)


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_weights_gradients_and_states_follow_from_the_number_of_parameters(
    composed: Callable[..., Path], recipe: dict[str, Any], stage: str
) -> None:
    fields = {**recipe, **STAGES[stage]}
    batch = Batch(SAMPLES, tokens=150, supervised=20, is_packed=False)
    plan = plan_fields(fields, batch)
    num_trained, num_trained_tensors = count_trained(composed(), stage)
    num_all = sum(tensor.numel() for tensor in load_weights(composed()).values())
    if stage == "adapt":
        # PEFT adds the adapters, and trains a copy of the projector, whose original stays.
        num_all += num_trained
    assert plan.weights == 4 * num_all
    assert plan.gradients == 4 * num_trained
    # AdamW keeps two means of each gradient, and for each tensor the number of its steps.
    assert plan.states == 2 * plan.gradients + 4 * num_trained_tensors

    sharded = plan_fields(fields, batch, devices=2)
    assert sharded.weights == plan.weights // 2
    assert sharded.gradients == plan.gradients // 2
    # Not exactly equal, as the moment at which Python frees a tensor may differ.
    assert sharded.activations == pytest.approx(plan.activations, rel=0.01)
    assert sharded.flops == plan.flops

    in_bfloat16 = plan_fields({**fields, "bf16": True}, batch)
    num_in_float32 = num_trained
    if stage == "instruct":
        # The projector doesn't read the encoder's last layer, so this layer isn't trained. It stays float32 too, since
        # the trained layers before it give it float32 input.
        num_in_float32 = num_all
    assert in_bfloat16.weights == 4 * num_in_float32 + 2 * (num_all - num_in_float32)


@pytest.mark.parametrize("stage", STAGES)
def test_flops_are_those_of_a_real_pass_with_half_of_the_causal_attention(recipe: dict[str, Any], stage: str) -> None:
    num_tokens = 150
    num_supervised = 20
    fields = {**recipe, **STAGES[stage]}
    plan = plan_fields(fields, Batch(1, num_tokens, num_supervised, is_packed=False))

    config = NormLlavaConfig.from_pretrained(recipe["model_name_or_path"])
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    eager = NormLlavaForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    trained, _ = prepare_model(eager, run_args, args, torch.float32)
    model = base_model(trained.train())
    input_ids = torch.full((1, num_tokens), 5)  # any token of text
    input_ids[0, : config.image_seq_length] = config.image_token_id
    with FlopCounterMode(display=False) as counter:
        output = model.model(input_ids=input_ids, pixel_values=torch.rand(1, 3, 28, 28))
        logits = model.lm_head(output.last_hidden_state[:, -num_supervised:])
        logits.sum().backward()

    # Eager attention multiplies whole matrices, of which a causal mask hides half. Attention has two products in the
    # forward pass and four in the backward pass, each of 2 * num_tokens**2 * head_dim FLOPs, so half of all is 6.
    text = config.text_config
    hidden_half = 6 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * num_tokens**2
    assert plan.flops == pytest.approx(counter.get_total_flops() - hidden_half, rel=0.03)


def test_a_report_counts_the_rows_of_max_steps_and_refuses_a_sample_that_is_too_short(
    recipe: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    recipe["stage"] = "align"
    recipe_options = [f"--{name}={value}" for name, value in recipe.items()]

    def report(*options: str) -> str:
        """The three lines that the command prints."""
        caplog.clear()
        with caplog.at_level(logging.INFO):
            main([*options, *recipe_options])
        return "\n".join(caplog.messages[-3:])

    # Ten steps of the recipe's 4 rows are an epoch of 40 rows, whatever --rows says.
    assert report("--rows", "40", "--num_train_epochs", "1") == report("--rows", "7", "--max_steps", "10")

    pattern = r"assumed: 40 rows of 1024 tokens, 200 supervised, [\s\S]*: (.*) FLOPs, (.*) hours, devices: 2"
    match = re.fullmatch(pattern, report("--rows=40", "--tflops=1e-07", "--devices=2"))
    flops = float(match[1])
    hours = float(match[2])
    flops_per_second = 2 * 1e5  # of two devices: 1e-7 TFLOP/s are 1e5 FLOP/s
    assert hours == pytest.approx(flops / flops_per_second / 3600, rel=0.01)

    with pytest.raises(SystemExit, match=r"^error: A sample of 10 tokens can't hold .* supervised ones: set --tokens"):
        report("--tokens", "10")
