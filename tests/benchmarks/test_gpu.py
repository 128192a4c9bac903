"""Rehearses benchmarks/gpu on the CPU with tiny shapes, so that mistakes don't cost time on a GPU."""

import argparse
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, large, norm, part, small
from benchmarks.gpu.definitions import Work, model_flops
from benchmarks.gpu.models import large_config, small_config
from benchmarks.gpu.profile import length_of_union
from benchmarks.gpu.results import Arm, Line, append_line, read_lines
from benchmarks.gpu.synchronisations import SynchronisationCounter
from benchmarks.gpu.table import render
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.modules.adapters import add_adapters
from training.modules.stages import LearningRates, Stage, prepare_stage


ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Functions that make a config, by the kind of its vision encoder: DINOv2 has a CLS token, and SigLIP has none.
MAKE_CONFIG = {"CLS token": small_config, "no CLS token": large_config}


def make_config_that_reads_all(encoder: str) -> NormLlavaConfig:
    """A tiny config with which the model reads the output of the encoder's last layer, and so needs all layers."""
    config = MAKE_CONFIG[encoder](tiny=True)
    config.vision_feature_layer = -1
    return config


def make_trained_model(config: NormLlavaConfig, stage: Stage) -> Any:
    """A model prepared for a stage of training; in stage "adapt" a `PeftModel`."""
    model: Any = NormLlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    trained_model = add_adapters(model, rank=4, alpha=8) if stage is Stage.ADAPT else model
    prepare_stage(model, stage, LearningRates(common=1e-3, vision=1e-3, norm=1e-3))
    return trained_model


def count_by_torch(model: Any, length: int, num_supervised: int) -> int:
    """The FLOPs that torch counts in a training step on one sample with one picture.

    Args:
        model: The model, without a `PeftModel` around it.
        length: Number of the sample's tokens, image tokens included.
        num_supervised: Number of tokens at the sample's end that the loss counts.
    """
    config = model.config
    input_ids = torch.full((1, length), 7)  # any token of text would do
    input_ids[:, 1 : 1 + config.image_seq_length] = config.image_token_id  # one picture, after the first token
    pixel_values = torch.randn(1, 3, config.vision_config.image_size, config.vision_config.image_size)

    with FlopCounterMode(display=False) as counter:
        outputs = model.model(input_ids=input_ids, pixel_values=pixel_values)
        states = outputs.last_hidden_state  # [1, length, hidden_size]
        logits = model.lm_head(states[:, -num_supervised:])  # [1, num_supervised, vocabulary]
        labels = torch.zeros(num_supervised, dtype=torch.long)  # any labels would do
        F.cross_entropy(logits.flatten(0, 1), labels).backward()
    return counter.get_total_flops()


def difference_to_model_flops(model: Any, stage: Stage, length: int) -> int:
    """The FLOPs that `count_by_torch` counts, minus the model FLOPs of the same step.

    Torch counts what is computed. Model FLOPs, defined in benchmarks/gpu/definitions.py, are what a step needs.
    """
    config = model.config
    text = config.text_config
    num_patches = config.image_seq_length

    # Eager attention also computes what the mask hides, which takes as many FLOPs as the rest: in each layer
    # 2 * length² * hidden_size forward, and three times as many forward and backward.
    difference = text.num_hidden_layers * 6 * length**2 * text.hidden_size

    # For each weight of the patch embedding, model FLOPs are 6 a position if the encoder is trained, and 2 if it is
    # frozen. A position is a patch or the CLS token. Torch counts patches only, and 4 FLOPs instead of 6, because no
    # gradient of the pixels is computed.
    modules = model.model.vision_tower.modules()
    (patch_embedding,) = (module for module in modules if isinstance(module, torch.nn.Conv2d))
    has_cls_token = config.vision_feature_select_strategy == "default"
    num_positions = num_patches + 1 if has_cls_token else num_patches
    encoder_is_trained = stage is Stage.INSTRUCT
    if encoder_is_trained:
        difference -= patch_embedding.weight.numel() * (6 * num_positions - 4 * num_patches)
    else:
        difference -= patch_embedding.weight.numel() * (2 * num_positions - 2 * num_patches)

    # If the encoder is frozen, no gradient of the projector's input is computed, but model FLOPs count one.
    if not encoder_is_trained:
        projector = model.get_submodule("model.multi_modal_projector")
        if stage is Stage.ADAPT:
            projector = projector.modules_to_save["default"]
        difference -= 2 * projector.linear_1.weight.numel() * num_patches
    return difference


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("encoder", list(MAKE_CONFIG))
def test_model_flops_are_those_that_torch_counts(encoder: str, stage: Stage) -> None:
    # The model must read all layers of its encoder: torch counts a layer that isn't read, and model FLOPs don't.
    trained_model = make_trained_model(make_config_that_reads_all(encoder), stage)
    model = trained_model.get_base_model() if stage is Stage.ADAPT else trained_model

    flops = model_flops(trained_model, Work(lengths=[12], num_images=1, num_supervised=3))
    counted = count_by_torch(model, length=12, num_supervised=3)
    assert counted == flops.whole + difference_to_model_flops(model, stage, length=12)
    assert 0 < flops.layers < flops.whole


def test_an_encoder_layer_that_is_not_read_costs_nothing() -> None:
    work = Work(lengths=[12], num_images=2, num_supervised=3)
    reads_all = make_config_that_reads_all("no CLS token")
    reads_all_but_one = large_config(tiny=True)  # its `vision_feature_layer` is -2
    flops_of_all = model_flops(make_trained_model(reads_all, Stage.ALIGN), work).whole
    flops_of_all_but_one = model_flops(make_trained_model(reads_all_but_one, Stage.ALIGN), work).whole

    # The encoder is frozen, so a layer takes 2 FLOPs for each weight and patch, and 4 * num_patches² * width for
    # attention. A layer's weights are four square matrices of attention and two matrices of the MLP.
    width = reads_all.vision_config.hidden_size
    num_weights = 4 * width**2 + 2 * width * reads_all.vision_config.intermediate_size
    num_patches = reads_all.image_seq_length
    layer_flops = 2 * num_weights * num_patches + 4 * num_patches**2 * width
    assert flops_of_all - flops_of_all_but_one == work.num_images * layer_flops


@pytest.mark.parametrize("name", list(norm.KINDS))
def test_outputs_and_gradients_of_the_measured_norms_are_right(name: str) -> None:
    figures = norm.measure_norm(name, torch.float32, num_tokens=8, passes=1, device=CPU)
    assert figures["output_relative_error"] < 1e-6  # float32 rounds by up to 6e-8
    assert figures["gradient_relative_error"] < 1e-6


def test_the_gradient_of_gwc_is_exact_in_float64() -> None:
    assert norm.float64_gradient_error() < 1e-14  # float64 rounds by up to 1e-16


@pytest.mark.parametrize(("kind", "window"), [("varlen", None), ("sdpa, masked", None), ("varlen", 4), ("varlen", 20)])
def test_the_measured_attention_and_its_gradients_are_right(kind: str, window: int | None) -> None:
    figures = attention.measure_case(kind, cudnn=False, lengths=[3, 9, 2], repeats=1, device=CPU, window=window)
    for name in ("output", "query", "key", "value"):
        assert figures[f"{name}_relative_error"] < 0.01  # bfloat16 rounds by up to 0.004


def test_attention_with_larger_errors_than_bfloat16s_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_samples = attention.make_attention
    monkeypatch.setattr(
        attention, "make_attention", lambda kind, lengths, device, window: whole_samples(kind, lengths, device)
    )
    with pytest.raises(ValueError, match=r"relative error of the output is .*, above 0\.01"):
        attention.measure_case("varlen", cudnn=False, lengths=[3, 9, 2], repeats=1, device=CPU, window=4)


def test_trainers_are_compared_on_the_same_tokens(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in small.arms(CPU, tmp_path)}
    trl = arms["stage 1: TRL, workers, no cuDNN, no checkpointing"].measure()
    padded = arms["stage 1: ours, padded"].measure()
    packed = arms["stage 1: + packed, varlen"].measure()

    for figures in (trl, padded, packed):
        assert figures["tokens_per_step"] == padded["tokens_per_step"]
        assert 0 < figures["layers_seconds_per_step"] < figures["seconds_per_step"]
        assert len(figures["steps"]) == 2  # of four: the first is the warm-up, and the last is profiled
        assert 0 < len(figures["kernels"]) <= 20
        assert figures["graphs"] == 0

    assert padded["padding_share"] > 0
    assert trl["padding_share"] == padded["padding_share"]
    assert packed["padding_share"] == 0

    # Packed and padded rows train alike. TRL trains another model, a plain Llava, whose loss is only similar.
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
    assert trl["loss"] == pytest.approx(padded["loss"], rel=0.01)


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Any]:
        return {"speed": 1.0}

    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    def stop() -> dict[str, Any]:
        raise SystemExit(2)

    arms = [Arm("died", run), Arm("fails", fail), Arm("stops", stop), Arm("runs", run)]
    monkeypatch.setattr(part, "make_arms", lambda *_: arms)
    results = tmp_path / "results.jsonl"
    # With `first_arm_died`, the first arm gets an error without being measured, because an earlier process died in it.
    part.measure_part("small", CPU, results, tmp_path, commit="abc", first_arm_died=True)

    died, fails, stops, runs = read_lines(results)
    assert died.error == "Measuring this arm ended the process."
    assert fails.error == "ValueError: no such kernel"
    assert stops.error == "SystemExit: 2"
    assert runs.figures == {"speed": 1.0}
    assert runs.commit == "abc"


def make_line(part_name: str, arm: str, commit: str | None = None, **fields: Any) -> Line:
    """A line of the file of results. `fields` are more fields of `Line`, such as the figures or the error."""
    return Line(part=part_name, arm=arm, device="H100", commit=commit, packages={}, settings={}, **fields)


def test_the_command_measures_only_arms_without_a_line_of_its_commit(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    earlier_lines = [
        make_line("ceilings", "copy", commit="new", figures={"median_tb_per_second": 1.5}),
        make_line("ceilings", "product 8192 x 8192 x 8192", commit="old", figures={"best_tflops": 1.5}),
    ]
    for line in earlier_lines:
        append_line(results, line)

    command.main(["--cpu", "--parts", "ceilings", "--results", str(results), "--commit", "new"])
    lines = read_lines(results)
    new_lines = lines[2:]
    assert lines[:2] == earlier_lines
    assert len(new_lines) == 3  # the part's other arms: three matrix products
    for line in new_lines:
        assert line.figures is not None
        assert line.figures["best_tflops"] > 0


# The second text ends in the brace of its settings, not in that of the line.
@pytest.mark.parametrize("cut_off", ['{"part": "ceilings"', '{"part": "ceilings", "settings": {}'])
def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, cut_off: str) -> None:
    results = tmp_path / "results.jsonl"
    whole_line = make_line("ceilings", "copy", figures={"median_tb_per_second": 1.5})
    append_line(results, whole_line)
    with results.open("a") as file:
        file.write(cut_off)
    assert read_lines(results) == [whole_line]

    append_line(results, whole_line)  # must not continue the line that was cut off
    assert read_lines(results) == [whole_line, whole_line]


def test_a_process_is_ended_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The process would need more than half a second only to import torch.
    args = argparse.Namespace(cpu=True, results=tmp_path / "results.jsonl", commit=None, repeats=1)
    assert command.run_part("large", args, seconds=0.5, first_arm_died=False) is None
    assert capsys.readouterr().out == "large was ended after 0.5 s\n"
    assert read_lines(args.results) == []


def test_cells_of_the_table_are_empty_where_an_arm_lacks_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    append_line(results, make_line("ceilings", "copy", figures={"median_tb_per_second": 1.5}))
    append_line(results, make_line("ceilings", "product", figures={"best_tflops": 800.0}))
    command.main(["--table", str(results)])
    # No arm has a figure for the column of median TFLOP/s, which is left out.
    printed = capsys.readouterr().out
    assert "|  | best TFLOP/s | median TB/s |" in printed
    assert "| copy |  | 1.50 |" in printed
    assert "| product | 800 |  |" in printed


def test_the_table_compares_an_arm_with_the_arm_that_its_line_names(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    shared_figures = {
        "seconds_per_step": 1.0,
        "share_of_peak": 0.4,
        "layers_share_of_peak": 0.5,
        "peak_memory_gib": 20.0,
        "model_flops_per_second": 4e14,
        "layers_flops_per_second": 6e14,
        "padding_share": 0,
        "loss": 2.0,
    }
    lines = [
        make_line("ceilings", "product", figures={"best_tflops": 800.0, "median_tflops": 700.0}),
        make_line("large", "TRL", figures={"tokens_per_second": 1000, **shared_figures}),
        make_line("large", "ours", figures={"tokens_per_second": 1500, **shared_figures}, compared_with="TRL"),
        make_line("large", "compiled", error="ValueError: refused\nand more", compared_with="ours"),
        make_line("large", "died without a message", error=""),  # an empty error is an error too
    ]
    for line in lines:
        append_line(results, line)

    table = render(results)
    # The columns are tokens/s, seconds a step, two shares in percent, loss, padding, memory, and the comparison, which
    # is 1500 tokens/s over 1000.
    assert "| ours | 1,500 | 1.000 | 40.0 | 50.0 | 2.0000 | 0 | 20.00 | 1.50 | TRL |" in table
    assert "| compiled | ValueError: refused |" in table
    assert "| died without a message |  |" in table


def test_figures_of_different_commits_are_not_compared(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_line(results, make_line("norm", "a", commit="old", figures={"microseconds": 1.0}))
    append_line(results, make_line("norm", "b", commit="new", figures={"microseconds": 2.0}, compared_with="a"))
    assert "| b | 2.0 |  |  |" in render(results)

    append_line(results, make_line("norm", "a", commit="new", figures={"microseconds": 4.0}))
    assert "| b | 2.0 | 0.50 | a |" in render(results)


@pytest.mark.parametrize("make_arms", [large.packed_arms, large.full_arms, large.quantized_arms])
def test_compiled_layers_warm_up_longer_and_are_measured_as_long(
    make_arms: Callable[[torch.device, Path], list[Arm]], tmp_path: Path
) -> None:
    arms = {arm.name: arm for arm in make_arms(CPU, tmp_path)}
    compiled_arms = [arm for arm in arms.values() if arm.settings["compiled"]]
    assert len(compiled_arms) > 0
    rows = json.loads((tmp_path / "conversations.json").read_text())

    for arm in compiled_arms:
        compiled = arm.settings
        uncompiled = arms[arm.compared_with].settings
        assert compiled["warmup"] >= 3  # the third step compiles a second graph
        assert compiled["steps"] - compiled["warmup"] == uncompiled["steps"] - uncompiled["warmup"]
        # There are enough rows for all steps, and for the step that is profiled.
        assert len(rows) >= (compiled["steps"] + 1) * compiled["rows_per_step"]


def test_repeats_are_measured_in_turns_and_their_median_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([3.0, 10.0, 1.0, 20.0, 2.0, 30.0])

    def run() -> dict[str, Any]:
        return {"microseconds": next(times)}

    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    arms = [Arm("a", run), Arm("fails", fail), Arm("b", run, compared_with="a")]
    monkeypatch.setattr(part, "make_arms", lambda *_: arms)
    results = tmp_path / "results.jsonl"
    part.measure_part("norm", CPU, results, tmp_path, commit="abc")
    part.measure_part("norm", CPU, results, tmp_path, commit="abc", repeats=3)
    assert [line.arm for line in read_lines(results)] == ["a", "fails", "b", "a", "b", "a", "b"]

    table = render(results)
    assert "| a | 2.0 (1.0 to 3.0) |" in table
    assert "| b | 20.0 (10.0 to 30.0) | 10.00 | a |" in table


def test_an_arm_that_fails_is_not_measured_again_for_its_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, Any]:
        return {"speed": 1.0}

    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    monkeypatch.setattr(part, "make_arms", lambda *_: [Arm("died", run), Arm("fails", fail), Arm("runs", run)])
    results = tmp_path / "results.jsonl"
    part.measure_part("norm", CPU, results, tmp_path, commit="abc", first_arm_died=True, repeats=2)
    assert [line.arm for line in read_lines(results)] == ["died", "fails", "runs", "runs"]


def test_kernels_that_run_at_the_same_time_count_once() -> None:
    assert length_of_union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == 5.0


def test_trl_compiles_each_layer_by_itself(tmp_path: Path) -> None:
    """As TRL's users can have it by accelerate's regional compilation."""
    arms = {arm.name: arm for arm in small.arms(CPU, tmp_path)}
    compiled = arms["stage 1: TRL, compiled layers"].measure()
    eager = arms["stage 1: TRL, workers, no cuDNN, no checkpointing"].measure()
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)
    assert compiled["graphs"] > 0
    assert compiled["compile_seconds"] > 0


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


def test_synchronisations_are_counted_by_line() -> None:
    counter = SynchronisationCounter()
    counter.start()
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation (of torch's C++)", stacklevel=1)  # as torch does
    warnings.warn("another warning", stacklevel=1)
    counts = counter.stop()
    [(line, count)] = counts.items()
    assert line.startswith("tests/benchmarks/test_gpu.py:")
    assert count == 2


def test_the_page_has_the_tables_and_the_ratios_of_the_h200s_lines() -> None:
    results = ROOT / "benchmarks/results/NVIDIA-H200/gpu.jsonl"
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    for table in re.split(r"^\w+, NVIDIA H200$", render(results), flags=re.MULTILINE):
        if "best TFLOP/s" not in table:  # the ceilings stand in the text
            assert table.strip() in page

    speeds: dict[str, Any] = {}
    for line in read_lines(results):
        if line.figures is not None and "tokens_per_second" in line.figures:
            speeds.setdefault(line.arm, []).append(line.figures["tokens_per_second"])
    speeds = {arm: median(values) for arm, values in speeds.items()}
    trl = {
        "stage 2": speeds["stage 2: TRL, workers, no cuDNN, no checkpointing"],
        "stage 1": speeds["stage 1: TRL, workers, no cuDNN, no checkpointing"],
        "LoRA": speeds["LoRA: TRL, padded"],
    }

    def over_trl(run: str, arm: str) -> str:
        return f"{speeds[f'{run}: {arm}'] / trl[run]:.2f}"

    padded, packed = over_trl("stage 1", "ours, padded"), over_trl("stage 1", "+ packed, varlen")
    stage_2 = f"{over_trl('stage 2', '+ no checkpointing')} | {over_trl('stage 2', 'padded, compiled')} |"
    stage_1 = f"{padded} padded, {packed} packed | {over_trl('stage 1', '+ packed, varlen, compiled')} packed |"
    padded, packed = over_trl("LoRA", "ours, padded"), over_trl("LoRA", "packed, varlen")
    lora = f"{padded} padded, {packed} packed | {over_trl('LoRA', 'packed, varlen, compiled')} packed |"
    for row in (f"135M, stage 2, padded | {stage_2}", f"135M, stage 1 | {stage_1}", f"7B, LoRA | {lora}"):
        assert f"| {row}" in page
