"""Two processes: the training of one process, and the traps of sharded saving."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, PACKED, ROOT, dump_recipe, logged, moved, weights
from training.checkpoints import write_unsharded


FSDP_ON_CPU = "tests/training/fsdp_cpu.py"
TWO = ("--config_file", "training/accelerate/cpu_ddp.yaml")


def launch(folder: Path, *arguments: str, script: str = "training/sft.py", **fields: Any) -> str:
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, "logging_steps": 1, **fields}))
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments, script, "--config", recipe]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def assert_same_training(one: Path, two: Path, start: Path) -> None:
    """Weights of two folders are equal to a hundredth of how far they moved."""
    expected, got, before = weights(one), weights(two), weights(start)
    assert got.keys() == before.keys()
    for name, tensor in got.items():
        if not name.endswith("k_proj.bias"):  # no gradient but rounding, which Adam blows up
            distance = (expected[name] - before[name]).norm()
            assert (tensor - expected[name]).norm() <= 0.01 * distance + 1e-6, name


def test_two_processes_train_as_one_does(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    fields = {**INSTRUCT, **PACKED, "clip_by_module": True, "norm_learning_rate": 1e-4, "global_batch_size": 10}
    fields |= {"model_name_or_path": str(composed()), "dataset_name": str(data)}
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    printed = launch(tmp_path, *TWO, **fields, output_dir=str(two))
    assert "2 processes x" in printed
    expected, got = ([line for line in logged(folder) if "loss" in line] for folder in (one, two))
    assert len(got) == 3
    for line, other in zip(got, expected, strict=True):
        for name in (*(name for name in other if "norm" in name), "loss", "num_tokens", "learning_rate"):
            assert line[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), name
    assert_same_training(one, two, composed())


@pytest.mark.slow
def test_two_processes_repeat_no_row_at_the_end_of_an_epoch(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    # 29 rows in steps of 28: the last one has a single row, so one of two processes gets an empty batch.
    rows = json.loads(data.read_text())[1:]
    parts = {"rows.json": rows, "first.json": rows[:20], "last.json": rows[20:]}
    for name, part in parts.items():
        (tmp_path / name).write_text(json.dumps(part))
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "rows.json")}
    fields |= {"image_folder": str(data.parent), "global_batch_size": 28, "per_device_train_batch_size": 28}
    fields |= {"max_grad_norm": 0, "optim": "sgd", "num_train_epochs": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    fields["per_device_train_batch_size"] = 1
    del fields["dataset_name"], fields["image_folder"]  # the same rows from two files
    fields["datasets"] = [
        {"path": str(tmp_path / name), "image_folder": str(data.parent)} for name in ("first.json", "last.json")
    ]
    launch(tmp_path, *TWO, **fields, output_dir=str(two))
    expected, got = (logged(folder) for folder in (one, two))
    assert len(got) == 5
    for line, other in zip(got[:-1], expected[:-1], strict=True):
        for name in ("loss", "grad_norm", "num_tokens", "norm/visual", "norm/text"):
            assert line[name] == pytest.approx(other[name], rel=2e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("packing", [{"per_device_train_batch_size": 5}, PACKED], ids=["padded", "packed"])
def test_two_processes_resume_in_the_second_epoch(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    fields |= {"global_batch_size": 10, "num_train_epochs": 2, "save_steps": 5}
    launch(tmp_path, *TWO, **fields, output_dir=str(tmp_path / "unbroken"))
    shutil.copytree(tmp_path / "unbroken" / "checkpoint-5", tmp_path / "broken" / "checkpoint-5")
    launch(tmp_path, *TWO, **fields, output_dir=str(tmp_path / "broken"), resume_from_checkpoint=True)
    names = ["unbroken", "broken"]
    if packing is PACKED:  # the steps don't depend on who shares them
        shutil.copytree(tmp_path / "unbroken" / "checkpoint-5", tmp_path / "alone" / "checkpoint-5")
        fields |= {"resume_from_checkpoint": True, "resume_changed": True}
        launch(tmp_path, "--cpu", **fields, output_dir=str(tmp_path / "alone"))
        names.append("alone")
    expected, *others = ([line for line in logged(tmp_path / name) if "loss" in line] for name in names)
    assert len(expected) == 6
    for got in others:
        assert got[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)


def losses_on(num_processes: int, folder: Path, per_step: int, **fields: Any) -> list[dict[str, float]]:
    """What is logged of each step on so many processes that share the rows of a step."""
    if "packed_length" not in fields:
        fields["per_device_train_batch_size"] = per_step // num_processes
    arguments = ("--cpu",) if num_processes == 1 else (*TWO, "--num_processes", str(num_processes))
    out = folder / str(num_processes)
    launch(folder, *arguments, **fields, output_dir=str(out))
    return [line for line in logged(out) if "loss" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_losses_are_those_of_one_process(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    # 30 rows in steps of 8: the fourth of each epoch has 6, which 4 processes can't share evenly.
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    fields |= {"global_batch_size": 8, "num_train_epochs": 2}
    one, *others = (losses_on(number, tmp_path, 8, **fields) for number in (1, 2, 4))
    assert len(one) == 8
    for lines in others:
        for line, expected in zip(lines, one, strict=True):
            assert line["num_tokens"] == expected["num_tokens"]
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            for name in ("grad_norm", "norm/visual"):
                assert line[name] == pytest.approx(expected[name], rel=2e-4), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["one file", "four shards", "six shards"])
def test_a_stream_is_read_once_an_epoch_on_any_number_of_processes(
    composed: Callable[..., Path], data: Path, tmp_path: Path, kind: str
) -> None:
    # Rows with answers of one length, and a rate at which no weight moves: the mean of an epoch's losses is then that
    # of its rows, whatever the order.
    rows = [{"conversations": [{"from": "human", "value": "Say " + "it " * (number % 7)},
                               {"from": "gpt", "value": f"number {number:02}"}]} for number in range(48)]  # fmt: skip
    fields: dict[str, Any] = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_streaming": True}
    if kind == "one file":
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        fields["dataset_name"] = str(tmp_path / "rows.json")
    else:
        num_shards = 4 if kind == "four shards" else 6
        (tmp_path / "shards").mkdir()
        for shard in range(num_shards):
            part = [row["conversations"] for row in rows[shard::num_shards]]
            images = pa.array([[]] * len(part), pa.list_(pa.string()))
            table = pa.table({"images": images, "conversations": part})
            pq.write_table(table, tmp_path / "shards" / f"train-{shard}.parquet")
        fields["dataset_name"] = str(tmp_path / "shards")
    fields |= {"global_batch_size": 8, "max_steps": 12, "learning_rate": 1e-12, "vision_learning_rate": 1e-12}
    epochs = []
    for number in (1, 2, 4):
        lines = losses_on(number, tmp_path, 8, **fields)
        for epoch in (lines[:6], lines[6:]):
            epochs.append((sum(line["loss"] for line in epoch) / 6, epoch[-1]["num_tokens"]))
    losses, tokens = zip(*epochs, strict=True)
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)
    assert tokens == (tokens[0], 2 * tokens[0]) * 3


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


def stream_of_one_file(data: Path, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The same of a JSON file, which every process reads whole."""
    rows = json.loads(data.read_text())
    rows[4]["image"], rows[20]["conversations"] = "gone.png", []
    (folder / "bad.json").write_text(json.dumps(rows))
    fields = {"dataset_name": str(folder / "bad.json"), "image_folder": str(data.parent)}
    return fields, {f"{folder / 'bad.json'}, row {number}" for number in (4, 20)}


STREAMED = {"dataset_streaming": True, "bad_rows": "skip", "global_batch_size": None, "max_steps": 12}


def listed(folder: Path) -> list[str]:
    return sorted({json.loads(line)["source"] for line in (folder / "bad_rows.jsonl").read_text().splitlines()})


def test_two_processes_share_a_stream_and_its_bad_rows(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields, bad = stream_of_shards(data, tmp_path)
    fields |= {**STREAMED, "stage": "align", "model_name_or_path": str(composed())}
    launch(tmp_path, *TWO, **fields, output_dir=str(tmp_path / "out"))
    assert listed(tmp_path / "out") == sorted(bad)
    assert len([line for line in logged(tmp_path / "out") if "loss" in line]) == 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [stream_of_shards, stream_of_one_file])
def test_two_processes_that_are_killed_go_on_in_the_stream(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    packing: dict[str, Any],
    workers: int,
    stream: Callable[[Path, Path], tuple[dict[str, Any], set[str]]],
) -> None:
    fields, bad = stream(data, tmp_path)
    fields |= {**INSTRUCT, **STREAMED, **packing, "model_name_or_path": str(composed()), "save_steps": 5}
    fields |= {"dataloader_num_workers": workers, "logging_steps": 1}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    launch(tmp_path, *TWO, **fields, output_dir=str(unbroken))
    assert listed(unbroken) == sorted(bad)

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(**{**FAST, **fields, "output_dir": str(broken)}))
    command = [sys.executable, "-m", "accelerate.commands.launch", *TWO, "training/sft.py", "--config", str(recipe)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as killed:
        while not (broken / "checkpoint-5").exists():
            assert killed.poll() is None
            time.sleep(0.01)
        for process in (*psutil.Process(killed.pid).children(recursive=True), killed):
            process.kill()
    assert not (broken / "checkpoint-12").exists()
    launch(tmp_path, *TWO, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert moved(unbroken, broken) == set()
    losses = ([line.get("loss") for line in logged(folder)] for folder in (unbroken, broken))
    assert next(losses) == next(losses)
    assert listed(broken) == sorted(bad)


@pytest.mark.slow
def test_zero3_trains_and_resumes_as_one_process_does(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = yaml.safe_load((ROOT / "training" / "accelerate" / "zero3.yaml").read_text())
    on_cpu = tmp_path / "zero3_cpu.yaml"
    on_cpu.write_text(yaml.safe_dump({**config, "num_processes": 2, "mixed_precision": "no", "use_cpu": True}))
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    fields |= {"global_batch_size": 10, "save_steps": 2}
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    launch(tmp_path, "--config_file", str(on_cpu), **fields, output_dir=str(two))
    shutil.copytree(two / "checkpoint-2", resumed / "checkpoint-2")
    launch(tmp_path, "--config_file", str(on_cpu), **fields, output_dir=str(resumed), resume_from_checkpoint=True)
    expected, got = ([line for line in logged(folder) if "loss" in line] for folder in (one, two))
    for line, other in zip(got, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert moved(two, resumed) == set()


@pytest.fixture
def fsdp2(tmp_path: Path) -> tuple[str, ...]:
    """Arguments that launch two processes with fsdp2.yaml, on the CPU."""
    config = yaml.safe_load((ROOT / "training" / "accelerate" / "fsdp2.yaml").read_text())
    on_cpu = tmp_path / "fsdp2_cpu.yaml"
    on_cpu.write_text(yaml.safe_dump({**config, "num_processes": 2, "mixed_precision": "no", "use_cpu": True}))
    return ("--config_file", str(on_cpu))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        pytest.param("qwen2", PACKED, id="packed"),
        pytest.param(
            "gemma3",
            {
                "per_device_train_batch_size": 5,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "gradient_checkpointing": True,
            },
            id="padded, tied, evaluated, checkpointed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sharded_training_is_that_of_one_process(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    fsdp2: tuple[str, ...],
    text: str,
    fields: dict[str, Any],
) -> None:
    fields = {**INSTRUCT, **fields, "model_name_or_path": str(composed(text=text)), "dataset_name": str(data)}
    fields |= {"global_batch_size": 10, "save_steps": 2}
    if "eval_strategy" in fields:
        fields["eval_dataset_name"] = str(data)
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **fields, output_dir=str(one))
    launch(tmp_path, *fsdp2, script=FSDP_ON_CPU, **fields, output_dir=str(two))
    expected, got = ([line for line in logged(folder) if "loss" in line] for folder in (one, two))
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
        assert moved(two, resumed) == set()


@pytest.mark.parametrize("text", ["qwen2", "gemma3"])
def test_a_sharded_model_is_saved_as_a_whole_one(composed: Callable[..., Path], tmp_path: Path, text: str) -> None:
    model: Any = NormLlavaForConditionalGeneration.from_pretrained(composed(text=text))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for module in (*model.model.language_model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # as accelerate gathers
        gathered = get_model_state_dict(model, options=options)
    finally:
        dist.destroy_process_group()
    write_unsharded(model, gathered, AutoProcessor.from_pretrained(composed(text=text)), tmp_path / "out")
    saved, expected = weights(tmp_path / "out"), weights(composed(text=text))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())
    for file in ("config.json", "generation_config.json", "modeling_normllava.py"):
        assert (tmp_path / "out" / file).read_text() == (composed(text=text) / file).read_text()
