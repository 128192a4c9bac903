"""Rehearses the GPU's benchmarks on the CPU with tiny shapes, so that mistakes don't cost time on a GPU."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, large, norm, part, small
from benchmarks.gpu.definitions import Work, model_flops
from benchmarks.gpu.models import large_config, small_config
from benchmarks.gpu.results import Arm, Line, append_line, read_lines
from benchmarks.gpu.table import render
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.adapters import add_adapters
from training.stages import LearningRates, Stage, prepare_stage


CPU = torch.device("cpu")
CONFIGS = {"CLS token": small_config, "no CLS token": large_config}


def config_that_reads_all(family: str) -> NormLlavaConfig:
    """A tiny config of which all encoder layers are read. torch counts layers that aren't read, and we don't."""
    config = CONFIGS[family](tiny=True)
    config.vision_feature_layer = -1
    return config


def make_trained_model(config: NormLlavaConfig, stage: Stage) -> Any:
    """A model prepared for a stage; in stage "adapt" the `PeftModel` around it."""
    model: Any = NormLlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    trained = add_adapters(model, rank=4, alpha=8) if stage is Stage.ADAPT else model
    prepare_stage(model, stage, LearningRates(common=1e-3, vision=1e-3, norm=1e-3))
    return trained


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("family", list(CONFIGS))
def test_model_flops_are_those_that_torch_counts(family: str, stage: Stage) -> None:
    trained = make_trained_model(config_that_reads_all(family), stage)
    model = trained.get_base_model() if stage is Stage.ADAPT else trained
    config = model.config
    text = config.text_config
    num_patches = config.image_seq_length
    length = 12
    num_supervised = 3
    input_ids = torch.full((1, length), 7)
    input_ids[:, 1 : 1 + num_patches] = config.image_token_id
    pixel_values = torch.randn(1, 3, config.vision_config.image_size, config.vision_config.image_size)

    with FlopCounterMode(display=False) as counter:
        states = model.model(input_ids=input_ids, pixel_values=pixel_values).last_hidden_state
        logits = model.lm_head(states[:, -num_supervised:])
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(num_supervised, dtype=torch.long)).backward()

    flops = model_flops(trained, Work([length], num_images=1, num_supervised=num_supervised))
    # torch counts what is computed, which differs from model FLOPs in three places.
    # 1. Eager attention also computes what its mask hides: twice as much as causal attention needs.
    differences = text.num_hidden_layers * 6 * length**2 * text.hidden_size
    # 2. The patch embedding isn't computed for the CLS token, and no gradient of the pixels is computed.
    [patches] = [module for module in model.model.vision_tower.modules() if isinstance(module, torch.nn.Conv2d)]
    has_cls_token = config.vision_feature_select_strategy == "default"
    num_positions = num_patches + 1 if has_cls_token else num_patches
    if stage is Stage.INSTRUCT:
        differences -= patches.weight.numel() * (6 * num_positions - 4 * num_patches)
    else:
        differences -= patches.weight.numel() * (2 * num_positions - 2 * num_patches)
    # 3. If the encoder is frozen, no gradient of the projector's input is computed.
    if stage is not Stage.INSTRUCT:
        projector = model.get_submodule("model.multi_modal_projector")
        if stage is Stage.ADAPT:
            projector = projector.modules_to_save["default"]
        differences -= 2 * projector.linear_1.weight.numel() * num_patches

    assert counter.get_total_flops() == flops.whole + differences
    assert 0 < flops.layers < flops.whole


def test_an_encoder_layer_that_is_not_read_costs_nothing() -> None:
    work = Work([12], num_images=2, num_supervised=3)
    reads_all = config_that_reads_all("no CLS token")
    reads_all_but_one = large_config(tiny=True)
    flops_of_all = model_flops(make_trained_model(reads_all, Stage.ALIGN), work).whole
    flops_of_all_but_one = model_flops(make_trained_model(reads_all_but_one, Stage.ALIGN), work).whole

    # A frozen layer has four matrices of attention and two of the MLP, and attention itself.
    width = reads_all.vision_config.hidden_size
    num_weights = 4 * width**2 + 2 * width * reads_all.vision_config.intermediate_size
    num_patches = reads_all.image_seq_length
    layer_flops = 2 * num_weights * num_patches + 4 * num_patches**2 * width
    assert flops_of_all - flops_of_all_but_one == work.num_images * layer_flops


@pytest.mark.parametrize("name", list(norm.KINDS))
def test_the_norms_gradients_are_right(name: str) -> None:
    figures = norm.measure_norm(name, torch.float32, num_tokens=8, passes=1, device=CPU)
    assert figures["output_relative_error"] < 1e-6
    assert figures["gradient_relative_error"] < 1e-6
    assert norm.float64_gradient_error() < 1e-14


@pytest.mark.parametrize("kind", ["varlen", "sdpa, masked"])
def test_attention_is_measured_on_what_the_reference_computes(kind: str) -> None:
    figures = attention.measure_case(kind, cudnn=False, lengths=[3, 9, 2], repeats=1, device=CPU)
    for name in ("output", "query", "key", "value"):
        assert figures[f"{name}_relative_error"] < 0.01  # bfloat16's rounding


def test_trainers_are_compared_on_the_same_tokens(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in small.arms(CPU, tmp_path)}
    names = {
        "TRL": "stage 1: TRL, workers, no cuDNN, no checkpointing",
        "padded": "stage 1: ours, padded",
        "packed": "stage 1: + packed, varlen",
    }
    figures = {short_name: arms[name].measure() for short_name, name in names.items()}
    for arm_figures in figures.values():
        assert arm_figures["tokens_per_step"] == figures["padded"]["tokens_per_step"]
        assert 0 < arm_figures["layers_seconds_per_step"] < arm_figures["seconds_per_step"]
        assert len(arm_figures["steps"]) == 2  # three, of which one is the warm-up
    assert figures["padded"]["padding_share"] > 0
    assert figures["TRL"]["padding_share"] == figures["padded"]["padding_share"]
    assert figures["packed"]["padding_share"] == 0
    # Packed and padded rows train alike. TRL trains another model, a plain Llava, whose loss is only similar.
    assert figures["packed"]["loss"] == pytest.approx(figures["padded"]["loss"], abs=1e-5)
    assert figures["TRL"]["loss"] == pytest.approx(figures["padded"]["loss"], rel=0.01)


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    def stop() -> dict[str, Any]:
        raise SystemExit(2)

    arms = [Arm("died", dict), Arm("fails", fail), Arm("stops", stop), Arm("runs", lambda: {"speed": 1.0})]
    monkeypatch.setattr(part, "make_arms", lambda *_: arms)
    results = tmp_path / "results.jsonl"
    part.measure_part("small", CPU, results, tmp_path, commit="abc", first_died=True)
    died, fails, stops, runs = read_lines(results)
    assert died.error == "It ended its process."
    assert fails.error == "ValueError: no such kernel"
    assert stops.error == "SystemExit: 2"
    assert runs.figures == {"speed": 1.0}
    assert runs.commit == "abc"


def test_the_command_goes_on_where_it_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    done = Line("ceilings", "copy", "x86_64", None, {}, {}, figures={"median_tb_per_second": 1.5})
    append_line(results, done)
    call = ["--cpu", "--parts", "ceilings", "--results", str(results)]

    command.main(call)
    lines = read_lines(results)
    assert lines[0] == done
    assert len(lines) == 4
    for line in lines[1:]:
        assert line.figures is not None
        assert line.figures["best_tflops"] > 0

    # A last line that was cut off is left out.
    with results.open("a") as file:
        file.write('{"part": "ceilings"')
    assert read_lines(results) == lines
    command.main(["--table", str(results)])
    assert "| copy |  |  | 1.50 |" in capsys.readouterr().out


def test_a_process_is_ended_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(cpu=True, results=tmp_path / "results.jsonl", commit=None)
    assert command.run_part("large", args, seconds=0.5, first_died=False) is None
    assert capsys.readouterr().out == "large was ended after 0.5 s\n"
    assert read_lines(args.results) == []


def test_the_table_compares_each_arm_with_the_one_beside_it(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"

    def add(part_name: str, arm: str, figures: Any = None, **fields: Any) -> None:
        append_line(results, Line(part_name, arm, "H100", None, {}, {}, figures=figures, **fields))

    training = {
        "seconds_per_step": 1.0,
        "share_of_peak": 0.4,
        "layers_share_of_peak": 0.5,
        "peak_memory_gib": 20.0,
        "model_flops_per_second": 4e14,
        "layers_flops_per_second": 6e14,
        "padding_share": 0,
        "loss": 2.0,
    }
    add("ceilings", "product", {"best_tflops": 800.0, "median_tflops": 700.0})
    add("large", "TRL", {"tokens_per_second": 1000, **training})
    add("large", "ours", {"tokens_per_second": 1500, **training}, beside="TRL")
    add("large", "compiled", error="ValueError: refused\nand more", beside="ours")
    add("large", "silent", error="")
    text = render(results)
    assert "| ours | 1,500 | 1.000 | 40.0 | 50.0 | 50.0 | 75.0 | 2.0000 | 0 | 20.00 | 1.50 | TRL |" in text
    assert "| compiled | ValueError: refused |" in text
    assert "| silent |  |" in text


@pytest.mark.parametrize("make_arms", [large.packed_arms, large.full_arms, large.quantized_arms])
def test_compiled_layers_warm_up_longer_and_are_measured_as_long(
    make_arms: Callable[[torch.device, Path], list[Arm]], tmp_path: Path
) -> None:
    """The warm-up covers the third step, in which a second graph is compiled, and there are rows for all steps."""
    arms = {arm.name: arm for arm in make_arms(CPU, tmp_path)}
    compiled = [arm for arm in arms.values() if arm.settings["compiled"]]
    assert compiled
    for arm in compiled:
        settings = arm.settings
        uncompiled = arms[str(arm.beside)].settings
        assert settings["warmup"] >= 3
        assert settings["steps"] - settings["warmup"] == uncompiled["steps"] - uncompiled["warmup"]
        rows = json.loads((tmp_path / "conversations.json").read_text())
        assert len(rows) >= settings["steps"] * settings["rows_per_step"]


def test_every_part_has_a_limit() -> None:
    assert set(command.LIMITS) == set(part.PARTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_parts_run(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command.main(["--cpu", "--results", str(results)])
    lines = read_lines(results)
    assert {line.part for line in lines} == set(command.LIMITS)
    errors = {line.arm: line.error for line in lines if line.error is not None}
    assert errors == {}
    render(results)
