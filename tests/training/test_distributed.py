"""Runs of several processes, with DDP or FSDP2: they train, save and resume as a run of one process does."""

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
    run,
)


# A script that runs training/sft.py with FSDP2 on CPUs.
FSDP_ON_CPU = "tests/training/fsdp_cpu.py"
# A script that runs training/sft.py with little memory, or with a loss that isn't finite.
STAGED_ON_CPU = "tests/training/staged_cpu.py"
# Arguments of `launch` for two processes with DDP on the CPU.
TWO_PROCESSES = ("--config_file", "training/accelerate/cpu_ddp.yaml")


def launch(
    folder: Path, *arguments: str, script: str = "training/sft.py", should_fail: bool = False, **fields: Any
) -> str:
    """Run a script by `accelerate launch`.

    Args:
        folder: The folder to write the recipe into.
        arguments: Options of `accelerate launch`.
        script: The script's path in the repository.
        should_fail: Whether the script must fail.
        fields: The recipe's fields, besides `FAST`.

    Returns:
        What the script prints to stderr.
    """
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, "logging_steps": 1, **fields}))
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port=0"]  # 0 takes any free port
    command = [sys.executable, *launcher, *arguments, script, "--config", recipe]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    has_failed = result.returncode != 0
    assert has_failed == should_fail, result.stderr[-3000:]
    return result.stderr


def two_processes_on_cpu(name: str, folder: Path, mixed_precision: str = "no") -> tuple[str, str]:
    """Arguments of `launch` for two processes on the CPU.

    The arguments name a file with accelerate's configuration. The file is a copy of training/accelerate/`name`.yaml in
    `folder`, with another number of processes, precision and device.
    """
    config = yaml.safe_load((ROOT / "training" / "accelerate" / f"{name}.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": mixed_precision, "use_cpu": True}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return "--config_file", str(path)


def assert_same_weights(folder: Path, expected_folder: Path, start: Path) -> None:
    """Check that two runs have moved the weights of `start` in the same way.

    The weights of the runs may differ by a hundredth of how far they have moved.
    """
    weights = load_weights(folder)
    expected_weights = load_weights(expected_folder)
    weights_before = load_weights(start)
    assert weights.keys() == weights_before.keys()
    for name, weight in weights.items():
        # The softmax cancels the bias of keys, so its gradient is only a rounding error, which Adam scales up.
        if name.endswith("k_proj.bias"):
            continue
        distance_moved = (expected_weights[name] - weights_before[name]).norm()
        difference = (weight - expected_weights[name]).norm()
        assert difference <= 0.01 * distance_moved + 1e-6, name


def assert_same_log(folder: Path, expected_folder: Path, num_steps: int) -> None:
    """Check that two runs have logged the same losses, norms, numbers of tokens and learning rates.

    The lines on steps and evaluations are compared, but not the last line, which is on the whole run.
    """
    assert len(read_steps(folder)) == num_steps
    names_to_compare = {"loss", "eval/loss", "eval/loss_blank", "num_tokens", "learning_rate"}
    lines = read_metrics(folder)[:-1]
    expected_lines = read_metrics(expected_folder)[:-1]
    for line, expected in zip(lines, expected_lines, strict=True):
        for name in expected:
            is_norm = "norm" in name  # of tokens, or of a module's gradient
            if is_norm or name in names_to_compare:
                assert line[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-7), name


def test_two_processes_train_as_one_does_and_one_can_resume_their_run(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "clip_by_module": True, "norm_learning_rate": 1e-4, "global_batch_size": 10}
    fields |= {
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
        "save_steps": 2,
        "logging_steps": 1,
    }
    one = tmp_path / "one"
    two = tmp_path / "two"
    run(tmp_path, **fields, output_dir=str(one))
    printed = launch(tmp_path, *TWO_PROCESSES, **fields, output_dir=str(two))
    assert "2 processes x" in printed
    assert_same_log(two, one, num_steps=3)  # 30 rows in global batches of 10
    assert_same_weights(two, one, start=make_model_folder())

    # One process resumes the run of two processes, which `resume_changed` allows.
    resumed = tmp_path / "resumed"
    shutil.copytree(two / "checkpoint-2", resumed / "checkpoint-2")
    fields |= {"resume_from_checkpoint": True, "resume_changed": True}
    run(tmp_path, **fields, output_dir=str(resumed))
    assert_same_weights(resumed, one, start=make_model_folder())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_losses_are_those_of_one_process(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    # An epoch of 25 rows has three steps of 8 rows, and a fourth step of one row. In the fourth step, only one process
    # has a row, and the others get an empty batch.
    rows = json.loads(data.read_text())[:25]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(make_model_folder()), "image_folder": str(data.parent)}
    fields |= {"dataset_name": str(tmp_path / "rows.json"), "global_batch_size": 8, "num_train_epochs": 2}

    def train(num_processes: int, *arguments: str) -> list[dict[str, float]]:
        out = tmp_path / str(num_processes)
        if not packing:
            fields["per_device_train_batch_size"] = 8 // num_processes  # the processes' batches make one global batch
        launch(tmp_path, *arguments, **fields, output_dir=str(out))
        return read_steps(out)

    expected_steps = train(1, "--cpu")
    assert len(expected_steps) == 8  # four in each epoch
    for num_processes in (2, 4):
        arguments = (*TWO_PROCESSES, "--num_processes", str(num_processes))  # overrides the file's number
        steps = train(num_processes, *arguments)
        for step, expected in zip(steps, expected_steps, strict=True):
            assert step["num_tokens"] == expected["num_tokens"]
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
            assert step["norm/image"] == pytest.approx(expected["norm/image"], rel=2e-4)


def write_shards(data: Path, folder: Path) -> set[str]:
    """Write three shards of rows into `folder`, each with two bad rows.

    Returns:
        The sources of the bad rows, as a run lists them.
    """
    rows = json.loads(data.read_text())
    question = {"from": "human", "value": "Say."}
    without_answer = {"conversations": [question]}
    without_picture = {"image": "gone.png", "conversations": rows[5]["conversations"]}
    folder.mkdir()
    bad_rows: set[str] = set()
    for shard, good_rows in enumerate((rows[0:9], rows[9:16], rows[16:22])):
        # One bad row is near the start of the shard, at another position in each shard. The other is the last row.
        first_bad = shard
        shard_rows = [*good_rows[:first_bad], without_answer, *good_rows[first_bad:], without_picture]
        last_bad = len(shard_rows) - 1
        bad_rows |= {f"{folder}, row {shard}.{first_bad}", f"{folder}, row {shard}.{last_bad}"}

        images = []
        for row in shard_rows:
            has_picture = "image" in row
            images.append([row["image"]] if has_picture else [])
        columns = {
            "id": [f"{shard}.{number}" for number in range(len(shard_rows))],
            "images": pa.array(images, pa.list_(pa.string())),
            "conversations": [row["conversations"] for row in shard_rows],
        }
        pq.write_table(pa.table(columns), folder / f"train-{shard:05d}.parquet")
    return bad_rows


def listed_bad_rows(folder: Path) -> set[str]:
    """The sources of the bad rows that a run has listed."""
    lines = (folder / "bad_rows.jsonl").read_text().splitlines()
    return {json.loads(line)["source"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_processes_share_a_stream_with_bad_rows_and_resume_in_it(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, num_workers: int
) -> None:
    bad_rows = write_shards(data, tmp_path / "shards")
    fields = {
        "stage": "align",
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(tmp_path / "shards"),
    }
    fields |= {"image_folder": str(data.parent), "dataset_streaming": True, "dataloader_num_workers": num_workers}
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
    assert losses[-7:] == expected_losses[-7:]  # the losses of steps 6 to 12, after the checkpoint


PADDED_AND_EVALUATED = {
    "per_device_train_batch_size": 5, "eval_strategy": "steps", "eval_steps": 1, "gradient_checkpointing": True,
}  # fmt: skip


# `resumed_after` has the steps from whose checkpoints the run is resumed. Step 3 is the last step, so a run that is
# resumed after step 3 only has to save the final model.
@pytest.mark.parametrize(
    ("text", "kind_fields", "resumed_after"),
    [
        pytest.param("qwen2", PACKED, [2], id="packed"),
        pytest.param("qwen2", PACKED, [3], marks=pytest.mark.slow, id="packed, the last save"),
        # Gemma's LM head and embeddings are the same tensor.
        pytest.param("gemma3", PADDED_AND_EVALUATED, [2, 3], marks=pytest.mark.slow, id="evaluated, tied head"),
    ],
)
def test_sharded_training_is_that_of_one_process(
    make_model_folder: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    text: str,
    kind_fields: dict[str, Any],
    resumed_after: list[int],
) -> None:
    fields = {
        **INSTRUCT,
        **kind_fields,
        "model_name_or_path": str(make_model_folder(text=text)),
        "dataset_name": str(data),
    }
    fields |= {"global_batch_size": 10, "save_steps": 2, "logging_steps": 1}
    if "eval_strategy" in fields:
        fields["eval_dataset_name"] = str(data)
    one = tmp_path / "one"
    sharded = tmp_path / "sharded"
    fsdp2 = two_processes_on_cpu("fsdp2", tmp_path)
    run(tmp_path, **fields, output_dir=str(one))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(sharded))
    assert_same_log(sharded, one, num_steps=3)
    assert_same_weights(sharded, one, start=make_model_folder(text=text))

    # Both runs save the same files, except that the sharded run saves no training_args.bin.
    file_names = {path.name for path in one.iterdir()} - {"training_args.bin"}
    assert {path.name for path in sharded.iterdir()} == file_names
    for name in ("config.json", "generation_config.json", "modeling_normllava.py"):
        assert (sharded / name).read_text() == (one / name).read_text()

    for step in resumed_after:
        resumed = tmp_path / f"resumed at {step}"
        shutil.copytree(sharded / f"checkpoint-{step}", resumed / f"checkpoint-{step}")
        launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(resumed), resume_from_checkpoint=True)
        assert changed_weights(sharded, resumed) == set()


@pytest.mark.slow
def test_sharding_in_bfloat16_does_not_round_the_loss(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **PACKED, "bf16": True, "global_batch_size": 10, "max_steps": 1}
    fields |= {"model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    fsdp2 = two_processes_on_cpu("fsdp2", tmp_path, mixed_precision="bf16")
    launch(tmp_path, "--cpu", **fields, output_dir=str(tmp_path / "one"))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(tmp_path / "sharded"))
    expected_loss = read_metrics(tmp_path / "one")[0]["loss"]
    loss = read_metrics(tmp_path / "sharded")[0]["loss"]
    assert loss == pytest.approx(expected_loss, rel=1e-4)  # in bfloat16 the loss would be rounded by up to 0.4%


@pytest.mark.slow
def test_each_pass_leaves_sharded_gradients_in_float32(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each process would keep a whole gradient in bfloat16 until a step's last pass."""
    fields = {**INSTRUCT, "bf16": True, "per_device_train_batch_size": 1, "global_batch_size": 4, "max_steps": 2}
    fields |= {"model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    fsdp2 = two_processes_on_cpu("fsdp2", tmp_path, mixed_precision="bf16")
    monkeypatch.setenv("STAGED_FSDP", "1")
    monkeypatch.setenv("STAGED_SHARDED", "1")
    launch(tmp_path, *fsdp2, script=STAGED_ON_CPU, **fields, output_dir=str(tmp_path / "sharded"))
    assert len(read_steps(tmp_path / "sharded")) == 2


# Recipe fields of compiled runs, by the name of accelerate's configuration.
COMPILED: dict[str, dict[str, Any]] = {
    # With "varlen", the default for packed rows, a checkpointed layer isn't compiled on a CPU.
    "fsdp2": {**INSTRUCT, **PACKED, "attn_implementation": "sdpa", "gradient_checkpointing": True},
    "cpu_ddp": {"stage": "adapt", "lora_r": 4, "per_device_train_batch_size": 5, "gradient_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config_name", COMPILED)
def test_two_processes_with_compiled_layers_train_as_one_process_without(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, config_name: str
) -> None:
    fields = {**COMPILED[config_name], "model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    fields["global_batch_size"] = 10
    one = tmp_path / "one"
    two = tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    fields |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    script = FSDP_ON_CPU if config_name == "fsdp2" else "training/sft.py"
    two_processes = two_processes_on_cpu(config_name, tmp_path)
    launch(tmp_path, *two_processes, script=script, **fields, output_dir=str(two))
    assert_same_log(two, one, num_steps=3)
    if config_name == "fsdp2":  # the run of "cpu_ddp" saves an adapter instead of a whole model
        assert_same_weights(two, one, start=make_model_folder())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_stops_both(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data), "save_steps": 3}
    fields |= {"logging_steps": 10, "output_dir": str(tmp_path / "out")}
    monkeypatch.setenv("STAGED_NAN", "1")
    printed = launch(tmp_path, *TWO_PROCESSES, script=STAGED_ON_CPU, should_fail=True, **fields)
    message = "UserError: The loss or the gradient's norm was not finite in one of the steps 1 to 3;"
    assert printed.count(message) == 2  # one message of each process
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config_name", ["cpu_ddp", "fsdp2"])
def test_processes_agree_on_checkpointing(
    make_model_folder: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config_name: str,
) -> None:
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}
    fields |= {"gradient_checkpointing": None, "global_batch_size": 10}
    config = two_processes_on_cpu(config_name, tmp_path)
    if config_name == "fsdp2":
        monkeypatch.setenv("STAGED_FSDP", "1")

    # staged_cpu.py says that a pass takes 1000 bytes. A pass may take 90% of a process's memory.
    memory_of_processes = {"enough": "2000,2000", "too little on one": "2000,1100"}
    checkpointed = {}
    for name, memory in memory_of_processes.items():
        monkeypatch.setenv("STAGED_MEMORY", memory)
        launch(tmp_path, *config, script=STAGED_ON_CPU, **fields, output_dir=str(tmp_path / name))
        run_record = json.loads((tmp_path / name / "run.json").read_text())
        checkpointed[name] = run_record["arguments"]["gradient_checkpointing"]
    assert checkpointed == {"enough": False, "too little on one": True}
    assert_same_log(tmp_path / "enough", tmp_path / "too little on one", num_steps=3)
    assert changed_weights(tmp_path / "enough", tmp_path / "too little on one") == set()
