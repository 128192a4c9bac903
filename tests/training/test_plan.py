"""Plans of a step (training/plan.py): memory as a run allocates it, and FLOPs as torch counts them in a real pass."""

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

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from normllava.tokens import IGNORED
from script_runs import FAST, INSTRUCT, load_weights, run
from training.folders.loading import load_config, prepare_model
from training.loop.trainer import NormLlavaTrainer
from training.modules.stages import base_model
from training.options.command_line import parse_arguments
from training.plan import Batch, StepPlan, main, parse_for_gpu, plan_step


SAMPLES = 8  # in a batch
LORA_RANK = 4  # of the adapters in stage "adapt"
# The recipe fields of each stage.
STAGES = {"align": {"stage": "align"}, "instruct": INSTRUCT, "adapt": {"stage": "adapt", "lora_r": LORA_RANK}}


@pytest.fixture
def recipe(make_model_folder: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """The recipe fields that all stages share."""
    return {
        **FAST,
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": "none",
        "output_dir": str(tmp_path / "out"),
    }


def make_plan(fields: dict[str, Any], batch: Batch, devices: int = 1) -> StepPlan:
    """The plan of a step of a recipe with these fields."""
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    config = load_config(str(fields["model_name_or_path"]), None)
    return plan_step(config, run_args, args, batch).sharded(devices)


@pytest.fixture(scope="session")
def equal_rows(data: Path) -> Path:
    """The path of a file with 32 equal rows. A row has a picture, a question, and an answer of 20 bytes."""
    question = {"from": "human", "value": "<image>\n" + "What? " * 15}
    answer = {"from": "gpt", "value": "a number of 20 bytes"}
    row = {"image": "0.png", "conversations": [question, answer]}
    path = data.with_name("equal.json")
    path.write_text(json.dumps([row] * 32))
    return path


def measure_run(monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any) -> tuple[int, Batch]:
    """Run the training script under torch's profiler, on rows that are all equal.

    Returns:
        The peak of the bytes that training allocates, and the batch of each pass. The peak is without the weights,
        which are loaded before.
    """
    original_train = NormLlavaTrainer.train
    trace_file = folder / "trace.json"
    tokenized_rows: list[dict[str, Any]] = []

    def train_under_profiler(trainer: NormLlavaTrainer, *args: Any, **kwargs: Any) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            original_train(trainer, *args, **kwargs)
        profiler.export_chrome_trace(str(trace_file))
        tokenized_rows.append(trainer.train_dataset[0])  # all rows are equal

    monkeypatch.setattr(NormLlavaTrainer, "train", train_under_profiler)
    run(folder, **fields)

    events = json.loads(trace_file.read_text())["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    (row,) = tokenized_rows
    num_supervised = sum(label != IGNORED for label in row["labels"])
    return peak, Batch(samples=SAMPLES, tokens=row["length"], supervised=num_supervised, is_packed=False)


@pytest.mark.parametrize(("stage", "checkpointed"), [("align", False), ("instruct", False), ("adapt", True)])
def test_planned_memory_is_within_a_tenth_of_the_peak_of_a_run(
    recipe: dict[str, Any],
    equal_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    checkpointed: bool,
) -> None:
    fields = {**recipe, **STAGES[stage], "dataset_name": str(equal_rows), "gradient_checkpointing": checkpointed}
    fields |= {"per_device_train_batch_size": SAMPLES, "save_strategy": "no"}
    fields["global_batch_size"] = 2 * SAMPLES  # two passes a step, so that gradients are kept between passes
    peak, batch = measure_run(monkeypatch, tmp_path, **fields)
    plan = make_plan(fields, batch)
    assert plan.peak - plan.weights == pytest.approx(peak, rel=0.1)


def is_trained(name: str, stage: str) -> bool:
    """Whether a stage trains this weight of the tests' model."""
    if stage in ("align", "adapt"):
        return ".multi_modal_projector." in name

    # Llava reads the output of the encoder's second layer, so the third layer, `layers.2`, and the modules after that
    # layer are not trained.
    unread_modules = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.", "vision_tower.head.")
    return not any(module in name for module in unread_modules)


def trained_sizes(checkpoint: Path, stage: str) -> list[int]:
    """The number of parameters in each tensor that a stage trains."""
    weights = load_weights(checkpoint)
    sizes = [weight.numel() for name, weight in weights.items() if is_trained(name, stage)]
    if stage == "adapt":
        # LoRA adds two matrices to each linear layer of the decoder, whose weight is (size_out, size_in).
        for name, weight in weights.items():
            if "language_model.layers." in name and name.endswith("_proj.weight"):
                size_out, size_in = weight.shape
                sizes.append(LORA_RANK * size_in)
                sizes.append(size_out * LORA_RANK)
    return sizes


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_weights_gradients_and_states_follow_from_the_number_of_parameters(
    make_model_folder: Callable[..., Path], recipe: dict[str, Any], stage: str
) -> None:
    fields = {**recipe, **STAGES[stage]}
    batch = Batch(samples=SAMPLES, tokens=150, supervised=20, is_packed=False)
    plan = make_plan(fields, batch)
    sizes = trained_sizes(make_model_folder(), stage)
    num_trained = sum(sizes)
    num_all = sum(tensor.numel() for tensor in load_weights(make_model_folder()).values())
    if stage == "adapt":
        # All trained parameters are new: PEFT adds the adapters, and trains a copy of the projector.
        num_all += num_trained
    # A float32 has 4 bytes.
    assert plan.weights == 4 * num_all
    assert plan.gradients == 4 * num_trained
    # AdamW keeps two means of each gradient, and for each tensor a float32 that counts the steps.
    assert plan.states == 2 * plan.gradients + 4 * len(sizes)

    # Each of two devices has half of the weights and gradients, but a batch of its own.
    sharded = make_plan(fields, batch, devices=2)
    assert sharded.weights == plan.weights // 2
    assert sharded.gradients == plan.gradients // 2
    # Activations are not exactly equal, because the moment at which Python frees a tensor may differ.
    assert sharded.activations == pytest.approx(plan.activations, rel=0.01)
    assert sharded.flops == plan.flops

    # With bf16, trained weights stay float32, and frozen weights have 2 bytes.
    in_bfloat16 = make_plan({**fields, "bf16": True}, batch)
    num_in_float32 = num_trained
    if stage == "instruct":
        # The encoder's last layer isn't trained, but stays float32, because trained layers give it float32 input.
        num_in_float32 = num_all
    assert in_bfloat16.weights == 4 * num_in_float32 + 2 * (num_all - num_in_float32)


@pytest.mark.slow
def test_4_bit_weights_and_8_bit_states_are_planned(recipe: dict[str, Any]) -> None:
    batch = Batch(samples=SAMPLES, tokens=150, supervised=20, is_packed=False)
    lora = make_plan({**recipe, **STAGES["adapt"], "bf16": True}, batch)
    qlora = make_plan({**recipe, **STAGES["adapt"], "bf16": True, "load_in_4bit": True}, batch)
    assert qlora.weights < lora.weights
    assert qlora.gradients == lora.gradients
    assert qlora.flops == lora.flops

    full = make_plan({**recipe, **INSTRUCT}, batch)
    with_8_bit_states = make_plan({**recipe, **INSTRUCT, "optim": "adamw_bnb_8bit"}, batch)
    assert with_8_bit_states.states < full.states
    assert with_8_bit_states.gradients == full.gradients


def test_a_gpus_arithmetic_is_planned_on_any_machine(recipe: dict[str, Any]) -> None:
    """A run without `bf16` takes the arithmetic of its own device, which is bfloat16 on a GPU."""
    options = [f"--{name}={value}" for name, value in {**recipe, **INSTRUCT}.items() if name != "bf16"]
    _, args = parse_for_gpu(options)
    assert args.bf16
    _, args = parse_for_gpu([*options, "--bf16=false"])
    assert not args.bf16


def test_key_adapters_are_planned(recipe: dict[str, Any], make_model_folder: Callable[..., Path]) -> None:
    batch = Batch(samples=1, tokens=150, supervised=20, is_packed=False)
    without = make_plan({**recipe, **STAGES["adapt"]}, batch)
    folder = make_model_folder(key_adapter_rank=4)
    with_adapters = make_plan({**recipe, **STAGES["adapt"], "model_name_or_path": folder}, batch)
    assert with_adapters.weights > without.weights
    assert with_adapters.flops > without.flops


@pytest.mark.parametrize("stage", STAGES)
def test_flops_are_those_of_a_real_pass_with_half_of_the_causal_attention(recipe: dict[str, Any], stage: str) -> None:
    num_tokens = 150
    num_supervised = 20
    fields = {**recipe, **STAGES[stage]}
    batch = Batch(samples=1, tokens=num_tokens, supervised=num_supervised, is_packed=False)
    plan = make_plan(fields, batch)

    # Count a real pass of the same model, with eager attention.
    config = NormLlavaConfig.from_pretrained(recipe["model_name_or_path"])
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    model = NormLlavaForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model, _ = prepare_model(model, run_args, args, torch.float32)
    model = base_model(model.train())  # without PEFT's wrapper
    input_ids = torch.full((1, num_tokens), 5)  # any token of text
    input_ids[0, : config.image_seq_length] = config.image_token_id
    with FlopCounterMode(display=False) as counter:
        output = model.model(input_ids=input_ids, pixel_values=torch.rand(1, 3, 28, 28))
        logits = model.lm_head(output.last_hidden_state[:, -num_supervised:])
        logits.sum().backward()

    # Eager attention multiplies whole matrices. A causal mask hides half of each matrix, which the plan doesn't count.
    # An attention head has two products in the forward pass, and four in the backward pass.
    text = config.text_config
    num_products = text.num_hidden_layers * text.num_attention_heads * (2 + 4)
    flops_per_product = 2 * num_tokens**2 * text.head_dim
    attention_flops = num_products * flops_per_product
    expected_flops = counter.get_total_flops() - attention_flops / 2
    assert plan.flops == pytest.approx(expected_flops, rel=0.03)


@pytest.fixture
def print_report(recipe: dict[str, Any], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """A function that runs the command on the recipe with further options, and returns the report."""
    recipe_options = [f"--{name}={value}" for name, value in recipe.items()]

    def print_with(*options: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            main(["--stage=align", *recipe_options, *options])
        return "\n".join(caplog.messages[-3:])  # the report has three lines

    return print_with


def test_max_steps_win_over_the_number_of_rows(print_report: Callable[..., str]) -> None:
    """A step of this recipe has 4 rows, so ten steps are an epoch of 40 rows."""
    assert print_report("--rows=7", "--max_steps=10") == print_report("--rows=40", "--num_train_epochs=1")


def test_a_report_computes_hours_from_the_speed_of_all_devices(print_report: Callable[..., str]) -> None:
    report = print_report("--rows=40", "--tflops=1e-07", "--devices=2")
    # The first line says what is assumed. The last line is, for example, "the run: 1e+10 FLOPs, 14.0 hours,
    # devices: 2". With DOTALL, ".*" also matches the lines between.
    pattern = r"assumed: 40 rows of 1024 tokens, 200 supervised, .*: (.*) FLOPs, (.*) hours, devices: 2"
    match = re.fullmatch(pattern, report, re.DOTALL)
    flops = float(match[1])
    hours = float(match[2])
    flops_per_second = 2 * 1e-7 * 1e12  # two devices, each with 1e-7 TFLOP/s
    assert hours == pytest.approx(flops / flops_per_second / 3600, rel=0.01)


def test_only_stage_instruct_is_sharded(print_report: Callable[..., str]) -> None:
    """By our launch files: fsdp2.yaml for it, and ddp.yaml for the others."""

    def memory_line(*options: str) -> str:
        _, memory, _ = print_report(*options).splitlines()
        return memory

    assert memory_line("--devices=8") == memory_line("--devices=1")
    instruct = ("--stage=instruct", "--vision_learning_rate=1e-4")
    sharded = memory_line(*instruct, "--devices=8")
    assert "sharded by FSDP2" in sharded
    assert sharded != memory_line(*instruct, "--devices=1")

    # 8-bit Adam is planned for one device only.
    eight_bit = (*instruct, "--optim=adamw_bnb_8bit")
    assert "nothing sharded" in memory_line(*eight_bit)
    with pytest.raises(SystemExit, match="optim adamw_bnb_8bit is bitsandbytes'"):
        print_report(*eight_bit, "--devices=8")


def test_a_sample_that_is_too_short_is_refused(print_report: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: A sample of 10 tokens can't hold .* supervised ones: set --tokens"):
        print_report("--tokens=10")
