"""Several processes, with DDP and FSDP2, train as one process does, and save and resume what it would."""

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

from script_runs import (
    FAST,
    INSTRUCT,
    PACKED,
    ROOT,
    changed_weights,
    dump_recipe,
    load_weights,
    read_metrics,
    read_steps,
)


FSDP_ON_CPU = "tests/training/fsdp_cpu.py"
TWO_PROCESSES = ("--config_file", "training/accelerate/cpu_ddp.yaml")


def launch(folder: Path, *arguments: str, script: str = "training/sft.py", **fields: Any) -> str:
    """Run a script by accelerate with these arguments and recipe fields; returns what it prints to stderr."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, "logging_steps": 1, **fields}))
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port=0"]  # 0 takes any free port
    command = [sys.executable, *launcher, *arguments, script, "--config", recipe]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def on_cpu(name: str, folder: Path, mixed_precision: str = "no") -> tuple[str, str]:
    """Arguments of `launch` for two processes on the CPU with the configuration training/accelerate/`name`.yaml."""
    config = yaml.safe_load((ROOT / "training" / "accelerate" / f"{name}.yaml").read_text())
    path = folder / f"{name}.yaml"
    config |= {"num_processes": 2, "mixed_precision": mixed_precision, "use_cpu": True}
    path.write_text(yaml.safe_dump(config))
    return "--config_file", str(path)


def assert_same_weights(folder: Path, expected_folder: Path, start: Path) -> None:
    """Check that the weights of two folders differ by less than a hundredth of how far training has moved them."""
    got = load_weights(folder)
    expected = load_weights(expected_folder)
    before = load_weights(start)
    assert got.keys() == before.keys()
    for name, weight in got.items():
        # The gradient of a key's bias is only rounding, which Adam scales up.
        if not name.endswith("k_proj.bias"):
            distance = (expected[name] - before[name]).norm()
            assert (weight - expected[name]).norm() <= 0.01 * distance + 1e-6, name


def assert_same_log(folder: Path, expected_folder: Path, num_steps: int) -> None:
    """Check that two runs have logged the same losses, norms, numbers of tokens and learning rates.

    The lines of steps and of evaluations are compared, but not the last line, which is about the whole run.
    """
    assert len(read_steps(folder)) == num_steps
    names_to_compare = {"loss", "eval/loss", "eval/loss_blank", "num_tokens", "learning_rate"}
    for line, expected in zip(read_metrics(folder)[:-1], read_metrics(expected_folder)[:-1], strict=True):
        for name in expected:
            if "norm" in name or name in names_to_compare:
                assert line[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-7), name


def test_two_processes_train_as_one_and_one_can_resume_their_run(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "clip_by_module": True, "norm_learning_rate": 1e-4, "global_batch_size": 10}
    fields |= {"model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 2}
    one = tmp_path / "one"
    two = tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    printed = launch(tmp_path, *TWO_PROCESSES, **fields, output_dir=str(two))
    assert "2 processes x" in printed
    assert_same_log(two, one, num_steps=3)
    assert_same_weights(two, one, start=composed())

    resumed = tmp_path / "resumed by one"
    shutil.copytree(two / "checkpoint-2", resumed / "checkpoint-2")
    fields |= {"resume_from_checkpoint": True, "resume_changed": True}
    launch(tmp_path, "--cpu", **fields, output_dir=str(resumed))
    assert_same_weights(resumed, one, start=composed())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_losses_are_those_of_one_process(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    # An epoch of 25 rows has three steps of 8 rows and a last step of a single row, in which all processes but one get
    # an empty batch.
    rows = json.loads(data.read_text())[:25]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(composed()), "image_folder": str(data.parent)}
    fields |= {"dataset_name": str(tmp_path / "rows.json"), "global_batch_size": 8, "num_train_epochs": 2}

    def train(num_processes: int, *arguments: str) -> list[dict[str, float]]:
        out = tmp_path / str(num_processes)
        if not packing:
            fields["per_device_train_batch_size"] = 8 // num_processes
        launch(tmp_path, *arguments, **fields, output_dir=str(out))
        return read_steps(out)

    expected_steps = train(1, "--cpu")
    assert len(expected_steps) == 8
    for num_processes in (2, 4):
        steps = train(num_processes, *TWO_PROCESSES, "--num_processes", str(num_processes))
        for step, expected in zip(steps, expected_steps, strict=True):
            assert step["num_tokens"] == expected["num_tokens"]
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
            assert step["norm/visual"] == pytest.approx(expected["norm/visual"], rel=2e-4)


def write_shards(data: Path, folder: Path) -> set[str]:
    """Write three shards of rows into `folder`, each with two bad rows; returns how the bad rows are named."""
    rows = json.loads(data.read_text())
    folder.mkdir()
    bad_rows: set[str] = set()
    for shard, (start, stop) in enumerate(((0, 9), (9, 16), (16, 22))):
        shard_rows = rows[start:stop]
        without_answer = {"conversations": shard_rows[0]["conversations"][:1]}
        without_picture = {"image": "gone.png", "conversations": rows[5]["conversations"]}
        shard_rows.insert(shard, without_answer)
        shard_rows.append(without_picture)
        last = len(shard_rows) - 1
        bad_rows |= {f"{folder}, row {shard}.{shard}", f"{folder}, row {shard}.{last}"}

        images = [[row["image"]] if "image" in row else [] for row in shard_rows]
        columns = {
            "id": [f"{shard}.{number}" for number in range(len(shard_rows))],
            "images": pa.array(images, pa.list_(pa.string())),
            "conversations": [row["conversations"] for row in shard_rows],
        }
        pq.write_table(pa.table(columns), folder / f"train-{shard:05d}.parquet")
    return bad_rows


def listed_bad_rows(folder: Path) -> set[str]:
    lines = (folder / "bad_rows.jsonl").read_text().splitlines()
    return {json.loads(line)["source"] for line in lines}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_share_a_stream_with_bad_rows_and_resume_in_it(
    composed: Callable[..., Path], data: Path, tmp_path: Path, workers: int
) -> None:
    bad_rows = write_shards(data, tmp_path / "shards")
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "shards")}
    fields |= {"image_folder": str(data.parent), "dataset_streaming": True, "dataloader_num_workers": workers}
    fields |= {"bad_rows": "skip", "max_steps": 12, "save_steps": 5}
    uninterrupted = tmp_path / "uninterrupted"
    launch(tmp_path, *TWO_PROCESSES, **fields, output_dir=str(uninterrupted))
    assert listed_bad_rows(uninterrupted) == bad_rows

    resumed = tmp_path / "resumed"
    shutil.copytree(uninterrupted / "checkpoint-5", resumed / "checkpoint-5")
    launch(tmp_path, *TWO_PROCESSES, **fields, output_dir=str(resumed), resume_from_checkpoint=True)
    assert changed_weights(uninterrupted, resumed) == set()
    expected_losses = [step["loss"] for step in read_steps(uninterrupted)]
    losses = [step["loss"] for step in read_steps(resumed)]
    assert losses[-7:] == expected_losses[5:]


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
    one = tmp_path / "one"
    sharded = tmp_path / "sharded"
    fsdp2 = on_cpu("fsdp2", tmp_path)
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(sharded))
    assert_same_log(sharded, one, num_steps=3)
    assert_same_weights(sharded, one, start=composed(text=text))

    # Both save the same files, but only one process alone saves training_args.bin.
    files = {path.name for path in one.iterdir()} - {"training_args.bin"}
    assert {path.name for path in sharded.iterdir()} == files
    for name in ("config.json", "generation_config.json", "modeling_normllava.py"):
        assert (sharded / name).read_text() == (one / name).read_text()

    # Step 2 is in the middle of the run. Step 3 is its last, after which only the final model is left to save.
    for step in (2, 3):
        resumed = tmp_path / f"resumed at {step}"
        shutil.copytree(sharded / f"checkpoint-{step}", resumed / f"checkpoint-{step}")
        launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(resumed), resume_from_checkpoint=True)
        assert changed_weights(sharded, resumed) == set()


@pytest.mark.slow
def test_sharding_in_bfloat16_does_not_round_the_loss(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "bf16": True, "global_batch_size": 10, "max_steps": 1}
    fields |= {"model_name_or_path": str(composed()), "dataset_name": str(data)}
    fsdp2 = on_cpu("fsdp2", tmp_path, "bf16")
    launch(tmp_path, "--cpu", **fields, output_dir=str(tmp_path / "one"))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(tmp_path / "sharded"))
    expected_loss = read_metrics(tmp_path / "one")[0]["loss"]
    loss = read_metrics(tmp_path / "sharded")[0]["loss"]
    assert loss == pytest.approx(expected_loss, rel=1e-4)  # bfloat16 would round it to 4e-3


COMPILED: dict[str, dict[str, Any]] = {
    # On a CPU, packed rows run with attention "varlen" by default, with which a checkpointed layer isn't compiled.
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
    one = tmp_path / "one"
    two = tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    fields |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    script = FSDP_ON_CPU if launcher == "fsdp2" else "training/sft.py"
    launch(tmp_path, *on_cpu(launcher, tmp_path), script=script, **fields, output_dir=str(two))
    assert_same_log(two, one, num_steps=3)
    if launcher == "fsdp2":  # the other run saves an adapter, no whole model
        assert_same_weights(two, one, start=composed())
