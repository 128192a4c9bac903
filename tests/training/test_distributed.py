"""Two processes: the training of one process, and the traps of sharded saving."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from script_runs import FAST, INSTRUCT, PACKED, ROOT, changed_weights, dump_recipe, read_metrics, weights


FSDP_ON_CPU = "tests/training/fsdp_cpu.py"
TWO = ("--config_file", "training/accelerate/cpu_ddp.yaml")


def launch(folder: Path, *arguments: str, script: str = "training/sft.py", **fields: Any) -> str:
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, "logging_steps": 1, **fields}))
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port=0"]  # any that is free
    command = [sys.executable, *launcher, *arguments, script, "--config", recipe]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def on_cpu(name: str, folder: Path, mixed_precision: str = "no") -> tuple[str, str]:
    """Arguments that launch two processes with one of accelerate's configurations, on the CPU."""
    config = yaml.safe_load((ROOT / "training" / "accelerate" / f"{name}.yaml").read_text())
    path = folder / f"{name}.yaml"
    config |= {"num_processes": 2, "mixed_precision": mixed_precision, "use_cpu": True}
    path.write_text(yaml.safe_dump(config))
    return "--config_file", str(path)


def assert_same_training(one: Path, two: Path, start: Path) -> None:
    """Weights of two folders are equal to a hundredth of how far they moved."""
    expected, got, before = weights(one), weights(two), weights(start)
    assert got.keys() == before.keys()
    for name, tensor in got.items():
        if not name.endswith("k_proj.bias"):  # no gradient but rounding, which Adam blows up
            distance = (expected[name] - before[name]).norm()
            assert (tensor - expected[name]).norm() <= 0.01 * distance + 1e-6, name


def test_two_processes_train_as_one_does_which_can_go_on_with_it(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "clip_by_module": True, "norm_learning_rate": 1e-4, "global_batch_size": 10}
    fields |= {"model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    printed = launch(tmp_path, *TWO, **fields, output_dir=str(two))
    assert "2 processes x" in printed
    expected, got = ([line for line in read_metrics(folder) if "loss" in line] for folder in (one, two))
    assert len(got) == 3
    for line, other in zip(got, expected, strict=True):
        for name in (*(name for name in other if "norm" in name), "loss", "num_tokens", "learning_rate"):
            assert line[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), name
    assert_same_training(one, two, composed())
    shutil.copytree(two / "checkpoint-2", tmp_path / "alone" / "checkpoint-2")
    fields |= {"resume_from_checkpoint": True, "resume_changed": True}
    launch(tmp_path, "--cpu", **fields, output_dir=str(tmp_path / "alone"))
    assert_same_training(one, tmp_path / "alone", composed())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_losses_are_those_of_one_process(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    # 25 rows in steps of 8: the last of each epoch has a single row, so other processes get an empty batch.
    (tmp_path / "rows.json").write_text(json.dumps(json.loads(data.read_text())[:25]))
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(composed()), "image_folder": str(data.parent)}
    fields |= {"dataset_name": str(tmp_path / "rows.json"), "global_batch_size": 8, "num_train_epochs": 2}
    runs = []
    for processes in (1, 2, 4):
        if not packing:
            fields["per_device_train_batch_size"] = 8 // processes
        out = tmp_path / str(processes)
        arguments = ("--cpu",) if processes == 1 else (*TWO, "--num_processes", str(processes))
        launch(tmp_path, *arguments, **fields, output_dir=str(out))
        runs.append([line for line in read_metrics(out) if "loss" in line])
    assert len(runs[0]) == 8
    for lines in runs[1:]:
        for line, expected in zip(lines, runs[0], strict=True):
            assert line["num_tokens"] == expected["num_tokens"]
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            for name in ("grad_norm", "norm/visual"):
                assert line[name] == pytest.approx(expected[name], rel=2e-4), name


def stream_of_shards(data: Path, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Fields of a run that reads a stream of three shards, with bad rows in each, and the names of these."""
    rows = json.loads(data.read_text())
    (folder / "shards").mkdir()
    bad: set[str] = set()
    for shard, (start, stop) in enumerate(((0, 9), (9, 16), (16, 22))):
        part = rows[start:stop]
        part.insert(shard, {"conversations": part[0]["conversations"][:1]})
        bad |= {f"{folder / 'shards'}, row {shard}.{number}" for number in (shard, len(part))}
        part.append({"image": "gone.png", "conversations": rows[5]["conversations"]})
        images = pa.array([[row["image"]] if "image" in row else [] for row in part], pa.list_(pa.string()))
        numbers = [f"{shard}.{number}" for number in range(len(part))]
        table = pa.table({"id": numbers, "images": images, "conversations": [row["conversations"] for row in part]})
        pq.write_table(table, folder / "shards" / f"train-{shard:05d}.parquet")
    return {"dataset_name": str(folder / "shards"), "image_folder": str(data.parent)}, bad


def listed(folder: Path) -> set[str]:
    return {json.loads(line)["source"] for line in (folder / "bad_rows.jsonl").read_text().splitlines()}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_share_a_stream_and_its_bad_rows_and_go_on_in_it(
    composed: Callable[..., Path], data: Path, tmp_path: Path, workers: int
) -> None:
    fields, bad = stream_of_shards(data, tmp_path)
    fields |= {"stage": "align", "model_name_or_path": str(composed()), "dataset_streaming": True, "save_steps": 5}
    fields |= {"bad_rows": "skip", "max_steps": 12, "dataloader_num_workers": workers}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    launch(tmp_path, *TWO, **fields, output_dir=str(unbroken))
    assert listed(unbroken) == bad
    shutil.copytree(unbroken / "checkpoint-5", broken / "checkpoint-5")
    launch(tmp_path, *TWO, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert changed_weights(unbroken, broken) == set()
    whole, rest = ([line["loss"] for line in read_metrics(folder) if "loss" in line] for folder in (unbroken, broken))
    assert whole[5:] == rest[-7:]


PADDED_AND_EVALUATED = {
    "per_device_train_batch_size": 5, "eval_strategy": "steps", "eval_steps": 1, "gradient_checkpointing": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fields"),
    [("qwen2", PACKED), pytest.param("gemma3", PADDED_AND_EVALUATED, marks=pytest.mark.slow)],  # Gemma's head is tied
    ids=["packed", "padded"],
)
def test_sharded_training_is_that_of_one_process(
    composed: Callable[..., Path], data: Path, tmp_path: Path, text: str, fields: dict[str, Any]
) -> None:
    fields = {**INSTRUCT, **fields, "model_name_or_path": str(composed(text=text)), "dataset_name": str(data)}
    fields |= {"global_batch_size": 10, "save_steps": 2}
    if "eval_strategy" in fields:
        fields["eval_dataset_name"] = str(data)
    one, two, fsdp2 = tmp_path / "one", tmp_path / "two", on_cpu("fsdp2", tmp_path)
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(two))
    expected, got = ([line for line in read_metrics(folder) if "loss" in line] for folder in (one, two))
    assert len(got) == 3
    for line, other in zip(got, expected, strict=True):
        for name in (*(name for name in other if "norm" in name or "eval" in name), "loss", "num_tokens"):
            if "per_second" not in name and "runtime" not in name:
                assert line[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), name
    files = {path.name for path in one.iterdir()} - {"training_args.bin"}
    assert {path.name for path in two.iterdir()} == files
    for file in ("config.json", "generation_config.json", "modeling_normllava.py"):
        assert (two / file).read_text() == (one / file).read_text()
    assert_same_training(one, two, composed(text=text))
    for step in (2, 3):  # in the middle, and before the result was there
        resumed = tmp_path / f"resumed at {step}"
        shutil.copytree(two / f"checkpoint-{step}", resumed / f"checkpoint-{step}")
        launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(resumed), resume_from_checkpoint=True)
        assert changed_weights(two, resumed) == set()


@pytest.mark.slow
def test_sharding_in_bfloat16_does_not_round_the_loss(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "bf16": True, "global_batch_size": 10, "max_steps": 1}
    fields |= {"model_name_or_path": str(composed()), "dataset_name": str(data)}
    fsdp2 = on_cpu("fsdp2", tmp_path, "bf16")
    launch(tmp_path, "--cpu", **fields, output_dir=str(tmp_path / "one"))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(tmp_path / "two"))
    expected, got = (read_metrics(tmp_path / name)[0]["loss"] for name in ("one", "two"))
    assert got == pytest.approx(expected, rel=1e-4)


COMPILED: dict[str, dict[str, Any]] = {
    # By "varlen", a CPU's default for packed rows, a checkpointed layer would run uncompiled.
    "fsdp2": {**INSTRUCT, **PACKED, "attn_implementation": "sdpa", "gradient_checkpointing": True},
    "cpu_ddp": {"stage": "adapt", "lora_r": 4, "per_device_train_batch_size": 5, "gradient_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", COMPILED)
def test_two_processes_with_compiled_layers_train_as_one_without(
    composed: Callable[..., Path], data: Path, tmp_path: Path, launcher: str
) -> None:
    fields = {**COMPILED[launcher], "model_name_or_path": str(composed()), "dataset_name": str(data)}
    fields["global_batch_size"] = 10
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    fields |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    script = FSDP_ON_CPU if launcher == "fsdp2" else "training/sft.py"
    launch(tmp_path, *on_cpu(launcher, tmp_path), script=script, **fields, output_dir=str(two))
    expected, got = ([line for line in read_metrics(folder) if "loss" in line] for folder in (one, two))
    assert len(got) == 3
    for line, other in zip(got, expected, strict=True):
        for name in (*(name for name in other if "norm" in name), "loss", "num_tokens"):
            assert line[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), name
    if launcher == "fsdp2":
        assert_same_training(one, two, composed())
