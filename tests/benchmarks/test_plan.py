"""Plans of memory and time, against runs and against numbers that follow from the config alone."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import Trainer, TrainingArguments

from benchmarks.plan import main
from benchmarks.plan_check import (
    ALIGN,
    BF16,
    CHECKPOINTED,
    FLOAT32,
    INSTRUCT,
    PACKED,
    RUNS,
    compare,
    config_of,
    measure,
    parse,
    set_beside,
)
from benchmarks.synthetic import SIZES, synthetic_processor
from training.plan import KINDS, Optimizer, Sample, StepPlan, as_zero3, plan_step


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "training" / "recipes"
ROW = [[Sample(tokens=121, pictures=1, supervised=20)] * 4]


def plan(folder: Path, fields: dict, **options: object) -> StepPlan:
    fields = {**PACKED, **CHECKPOINTED, **fields}
    run_args, args = parse(fields, folder)
    return plan_step(config_of(fields, synthetic_processor(SIZES["small"])), run_args, args, ROW, **options)


def test_a_plan_is_what_a_run_allocates() -> None:
    fields = {**ALIGN, **PACKED, **CHECKPOINTED, **FLOAT32, "packed_length": 768}
    assert set_beside(fields, "none", measure(fields, "none"))["ratio"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_plans_are_what_runs_allocate(number: int) -> None:
    assert compare(*RUNS[number])["ratio"] == pytest.approx(1, abs=0.1)


def test_the_written_check_holds() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "plan_cpu.json").read_text())
    assert len(report["runs"]) == len(RUNS)
    assert 0.9 < report["ratio"][0] <= report["ratio"][1] < 1.1


def test_states_follow_from_the_config(tmp_path: Path) -> None:
    whole = plan(tmp_path, {**INSTRUCT, **BF16})
    groups = [(group, sum(p.numel() for p in group.parameters.values())) for group in whole.groups]
    trained = sum(count for group, count in groups if group.learning_rate is not None)
    assert whole.peak["gradients"] == 4 * trained
    assert whole.peak["optimizer states"] == pytest.approx(8 * trained, rel=1e-3)
    assert whole.peak["weights"] == pytest.approx(4 * sum(count for _, count in groups), rel=1e-3)
    # DDP's buckets are as large as the gradients; nothing else changes.
    shared = plan(tmp_path, {**INSTRUCT, **BF16}, num_processes=2, sharding="ddp")
    assert {kind: shared.peak[kind] - whole.peak[kind] for kind in KINDS} == {
        **dict.fromkeys(KINDS, 0),
        "gathered": 4 * trained,
    }
    sharded = plan(tmp_path, {**INSTRUCT, **BF16}, num_processes=2, sharding="fsdp2")
    for kind in ("weights", "gradients", "optimizer states"):
        assert sharded.peak[kind] == pytest.approx(whole.peak[kind] / 2, rel=0.02)
    zero3 = as_zero3(sharded, 2)
    assert zero3.peak["optimizer states"] == 8 * trained // 2
    assert zero3.peak["activations"] == sharded.peak["activations"]


def test_memory_of_varlen_is_linear_in_the_length(tmp_path: Path) -> None:
    run_args, args = parse({**ALIGN, **PACKED, **CHECKPOINTED, **BF16}, tmp_path)
    config = config_of(ALIGN, synthetic_processor(SIZES["small"]))
    totals = [
        plan_step(config, run_args, args, [[Sample(length, 0, 20), ROW[0][0]]]).total for length in (4096, 8192, 16384)
    ]
    assert (totals[2] - totals[1]) / (totals[1] - totals[0]) == pytest.approx(2, rel=0.02)


def test_four_bits_are_half_a_byte(tmp_path: Path) -> None:
    adapt = {"stage": "adapt", "learning_rate": 2e-4, "lora_r": 16, "lora_alpha": 32, **BF16}
    whole, packed = (plan(tmp_path, {**adapt, "load_in_4bit": four}).peak["weights"] for four in (False, True))
    linear = SIZES["small"].text["num_hidden_layers"] * (512 * (512 + 2 * 128 + 512) + 3 * 512 * 1408)
    # From bfloat16 to half a byte, a byte of scale for 64 weights, and one of four bytes for 256 of these.
    assert whole - packed == pytest.approx(linear * (2 - 0.5 - 1 / 64 - 4 / 64 / 256), rel=1e-3)


def test_an_optimizer_of_unknown_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optim 'adafactor': its memory is not known"):
        plan(tmp_path, {**ALIGN, **BF16, "optim": "adafactor"})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    recipe = RECIPES / "Qwen2.5-7B-Instruct" / "stage1.yaml"
    common = ["--config", str(recipe), "--num_processes", "2", "--sharding", "ddp", "--output", str(output)]
    main([*common, "--size", "small", "--device_memory", "1", "--packed_length", "1024", "--text_tokens", "40"])
    printed, report = capsys.readouterr().out, json.loads(output.read_text())
    assert "stage align, packed rows of 1024 tokens, 2 x 1 GB (0.9 GiB)" in printed
    assert report["memory"]["ddp"]["total"] == sum(report["memory"]["ddp"][kind] for kind in KINDS)
    assert report["memory"]["ddp"]["total"] > 0
    assert 512 <= report["memory"]["ddp"]["longest packed_length"] <= 128 * 121 + 512
    assert report["steps"] == 2181  # 558,128 rows by 256
    assert report["hours"] == pytest.approx(2181 * sum(report["flops a step"].values()) / (2 * 0.4 * 989e12) / 3600)
    with pytest.raises(SystemExit, match="Or give --model_config <folder or Hub id>, or --size"):
        main(common)


SMALL = ("--size", "small", "--num_processes", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_processes", "0"], "--num_processes must be above 0, got 0"),
        (["--device", "T4"], "--device T4: TRL's table has no bfloat16 FLOP/s of it"),
        (["--mfu", "0"], "--mfu must be above 0, got 0.0"),
        (["--rows", "0"], "--rows must be above 0, got 0"),
        (["--text_tokens", "20", "--supervised_tokens", "500"], "--supervised_tokens 500 is more than the 20 text"),
        (["--sharding", "fsdp2"], "--sharding fsdp2: 4-bit weights can't be sharded"),
        (["--num_processes", "1", "--sharding", "ddp"], "--sharding ddp: there is one process"),
        (["--config", "gone.yaml"], "gone.yaml can't be read"),
    ],
)
def test_what_can_not_be_planned_is_said_in_a_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(RECIPES / "Qwen2.5-7B-Instruct" / "qlora.yaml"), *SMALL, *options])
    assert message in str(stopped.value) + capsys.readouterr().err


@pytest.mark.parametrize("changed", [("--optim", "adamw_bnb_8bit"), ("--bf16", "false")])
def test_zero3_is_planned_only_where_its_memory_is_known(changed: tuple[str, str]) -> None:
    recipe = str(RECIPES / "Qwen2.5-7B-Instruct" / "stage2.yaml")
    with pytest.raises(SystemExit, match="--sharding zero3: its memory is known in bfloat16 with torch's AdamW alone"):
        main(["--config", recipe, *SMALL, "--sharding", "zero3", *changed])


def test_a_packed_stream_takes_as_many_samples_as_fit(tmp_path: Path) -> None:
    fields = yaml.safe_load((RECIPES / "Qwen2.5-7B-Instruct" / "stage1.yaml").read_text())
    fields |= {"packed_length": 1024, "global_batch_size": None}
    options = [*SMALL, "--sharding", "ddp", "--text_tokens", "40"]  # 121 tokens a sample, 8 in a row
    streamed = {"dataset_streaming": True, "max_steps": 9, "gradient_accumulation_steps": 4}
    reports = []
    for given in ({"global_batch_size": 8 * 2 * 4}, streamed):
        recipe = {name: value for name, value in {**fields, **given}.items() if value is not None}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        main(["--config", str(tmp_path / "recipe.yaml"), *options, "--output", str(tmp_path / "plan.json")])
        reports.append(json.loads((tmp_path / "plan.json").read_text()))
    for name in ("passes", "rows", "flops a step", "seconds a step", "memory"):
        assert reports[0][name] == reports[1][name], name
    assert reports[1]["passes"] == 4


def test_eight_bit_states_are_those_that_trainer_makes(tmp_path: Path) -> None:
    """Trainer keeps embeddings' states in float32, and bitsandbytes those of few weights."""
    pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 256))
    args = TrainingArguments(str(tmp_path), optim="adamw_bnb_8bit", use_cpu=True)
    optimizer = Trainer(model, args).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned = Optimizer(model, list(model.parameters()), args, cuda=False).step()
    optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.startswith("qmap")  # one table for all
    ]
    assert sum(state.nbytes for state in planned) == sum(state.nbytes for state in kept)


BNB_8BIT = ("--optim", "adamw_bnb_8bit")
# What the recipes' heads say: recipe, processes, GB of a card, what is changed, planned GB.
CLAIMS: list[tuple[str, int, int, tuple[str, ...], int]] = [
    ("Llama-3.2-3B/stage1", 8, 24, (), 13),
    ("Llama-3.2-3B/stage2", 1, 80, (), 73),
    ("Llama-3.2-3B/stage2", 4, 40, (), 23),
    ("Llama-3.2-3B/stage2", 1, 48, (*BNB_8BIT, "--packed_length", "4096"), 47),
    ("Llama-3.2-3B/qlora", 1, 12, (), 8),
    ("Llama-3.2-3B/malora", 1, 12, (), 9),
    ("Qwen2.5-7B/stage1", 8, 40, (), 25),
    ("Qwen2.5-7B/stage1", 8, 24, ("--packed_length", "4096"), 19),
    ("Qwen2.5-7B/stage2", 8, 40, (), 24),
    ("Qwen2.5-7B/stage2", 2, 80, (), 73),
    ("Qwen2.5-7B/stage2", 1, 141, BNB_8BIT, 103),
    ("Qwen2.5-7B/qlora", 1, 16, (), 12),
    ("Qwen2.5-7B/malora", 1, 16, (), 11),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "processes", "card", "changes", "planned"), CLAIMS, ids=lambda value: str(value).replace("/", " ")
)
def test_recipes_fit_the_cards_that_they_name(
    recipe: str, processes: int, card: int, changes: tuple[str, ...], planned: int, tmp_path: Path
) -> None:
    size, stage = recipe.split("/")
    path, output = RECIPES / f"{size}-Instruct" / f"{stage}.yaml", tmp_path / "plan.json"
    command = ["--config", path, "--size", size, "--num_processes", processes]
    if processes > 1:
        command += ["--sharding", "fsdp2" if stage == "stage2" else "ddp"]
    main([*map(str, [*command, "--device_memory", card, "--output", output]), *changes])
    (memory,) = json.loads(output.read_text())["memory"].values()
    assert memory["fits"]
    assert round(memory["total"] / 1e9) == planned
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    head = " ".join(line.removeprefix("# ") for line in lines)
    assert f"{planned} GB" in head
    assert str(card) in head
