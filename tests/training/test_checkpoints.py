"""Checkpoints: what is complete, what is refused, and what a run does when it can't go on."""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trl import SFTTrainer

from conversations.rows import BadRowError
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, ROOT, logged, moved, run
from training.checkpoints import checkpoint_problem, newest_complete, publish_checkpoint, write_sharded_weights
from training.run import Run


@pytest.fixture(scope="module")
def finished(composed: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of a run of eight steps, finished, with checkpoints 3, 6 and 8 in `output_dir`. Read-only."""
    folder = tmp_path_factory.mktemp("finished")
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, folder, **fields, output_dir=str(folder / "out"))
    return {**fields, "output_dir": str(folder / "out")}


@pytest.fixture
def copied(finished: dict[str, Any], tmp_path: Path) -> Path:
    """The finished run's folder as it was when it had checkpoints 3 and 6."""
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(Path(finished["output_dir"]) / name, tmp_path / "out" / name)
    shutil.copy(Path(finished["output_dir"]) / "metrics.jsonl", tmp_path / "out")
    return tmp_path / "out"


def test_checkpoints_are_readable_by_others(finished: dict[str, Any]) -> None:
    out = Path(finished["output_dir"])
    for path in (*out.glob("checkpoint-6/*"), out / "model.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, path
    assert not (out / ".saving").exists()
    assert checkpoint_problem(out / "checkpoint-6") is None


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


FAULTS: dict[str, Callable[[Path], object]] = {
    "weights torn": lambda folder: tear(folder / "model.safetensors"),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "optimizer torn": lambda folder: tear(folder / "optimizer.pt"),
    "optimizer gone": lambda folder: (folder / "optimizer.pt").unlink(),
    "scheduler torn": lambda folder: tear(folder / "scheduler.pt"),
    "random state gone": lambda folder: (folder / "rng_state.pth").unlink(),
    "state torn": lambda folder: tear(folder / "trainer_state.json"),
    "state of another step": lambda folder: shutil.copy(folder.parent / "checkpoint-3" / "trainer_state.json", folder),
    "another number of processes": lambda folder: change_json(folder / "run.json", num_processes=2),
    "run of an older version": lambda folder: (folder / "run.json").write_text('{"num_processes": 1}'),
    "run not recorded": lambda folder: (folder / "run.json").unlink(),
    "config torn": lambda folder: tear(folder / "config.json"),
    "config gone": lambda folder: (folder / "config.json").unlink(),
    "index without a map": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "tokenizer torn": lambda folder: tear(folder / "tokenizer.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_moved_aside_and_the_one_before_it_taken(
    copied: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    FAULTS[fault](copied / "checkpoint-6")
    assert newest_complete(copied, is_main_process=True) == copied / "checkpoint-3"
    assert not (copied / "checkpoint-6").exists()
    assert (copied / "broken" / "checkpoint-6").is_dir()
    assert "checkpoint-6 is not complete" in caplog.text


def make_sharded(folder: Path) -> None:
    """The layout of FSDP2's sharded checkpoints: what is not in a folder of its own is small."""
    for name, sharded in (("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.pt", "optimizer_0")):
        (folder / sharded).mkdir()
        (folder / name).rename(folder / sharded / "__0_0.distcp")


def test_sharded_checkpoints_are_complete(copied: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-6"):
        make_sharded(copied / name)
    (copied / "checkpoint-3" / "config.json").unlink()
    assert checkpoint_problem(copied / "checkpoint-3") is None
    assert newest_complete(copied, is_main_process=True) == copied / "checkpoint-6"
    with pytest.raises(
        ValueError, match=r"checkpoint-6 is the end of the run, but its weights are sharded. Merge them"
    ):
        publish_checkpoint(copied / "checkpoint-6", copied, {}, resumed=False)
    assert not (copied / "config.json").exists()
    (copied / "checkpoint-6" / "optimizer_0" / "__0_0.distcp").unlink()
    assert checkpoint_problem(copied / "checkpoint-6") == "optimizer_0 is empty"


def test_a_run_without_a_sound_checkpoint_is_not_started_again(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (copied / "metrics.jsonl").read_text()
    tear(copied / "checkpoint-3" / "optimizer.pt")
    (copied / "checkpoint-6" / "run.json").write_text('{"num_processes": 1}')  # of an older version
    message = (
        r"no checkpoint that can be resumed from:\n  checkpoint-6: .*run.json: no data.*\n  checkpoint-3: a file is"
    )
    with pytest.raises(ValueError, match=message):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})
    assert (copied / "checkpoint-6").is_dir()
    assert (copied / "metrics.jsonl").read_text() == before


def test_going_on_from_a_named_checkpoint_sets_aside_what_came_after_it(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    fields = {**finished, "output_dir": str(out), "learning_rate": 2e-3, "resume_changed": True, "save_steps": 100}
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=str(out / "checkpoint-3"), max_steps=5)
    assert {path.name for path in (out / "superseded").iterdir()} == {
        "checkpoint-6", "checkpoint-8", "trainer_state.json",
    }  # fmt: skip
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    assert Run.read(out).arguments["learning_rate"] == 2e-3
    # Of what was set aside nothing is replaced. The new intervals hold, and not the checkpoint's.
    fields |= {"save_steps": 1, "logging_steps": 1}
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=str(out / "checkpoint-3"), max_steps=6)
    assert {path.name for path in (out / "superseded").iterdir()} == {
        "checkpoint-5", "checkpoint-6", "checkpoint-8", "trainer_state.json", "trainer_state.json.1",
    }  # fmt: skip
    assert {path.name for path in out.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (3, 4, 5, 6)}
    # The newest are kept, whatever the clock was when they were written.
    for step in (3, 4):
        os.utime(out / f"checkpoint-{step}", (2e9, 2e9))
    fields |= {"save_total_limit": 2}
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=str(out / "checkpoint-4"), max_steps=5)
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5"}
    # Another run's checkpoint does not take the folder over.
    other = str(Path(finished["output_dir"]) / "checkpoint-3")
    with pytest.raises(ValueError, match="already holds a run"):
        run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=other)


def test_going_on_from_the_one_before_gives_the_same_weights(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tear(copied / "checkpoint-6" / "optimizer.pt")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # torn by the kill
    run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})
    assert moved(Path(finished["output_dir"]), copied) == set()
    assert [line["step"] for line in logged(copied)] == [2, 4, 6, 8, 8]


def test_a_broken_checkpoint_that_is_named_is_refused(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = copied / "checkpoint-6"
    tear(named / "optimizer.pt")
    with pytest.raises(ValueError, match=r"checkpoint-6 can't be resumed from: a file is missing or broken"):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": str(named)})


def test_a_checkpoint_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    named = tmp_path / "checkpoint-500"
    assert checkpoint_problem(named) == "there is no such folder"
    named.mkdir()
    assert checkpoint_problem(named) == "trainer_state.json is missing"


def test_weights_that_do_not_fit_are_an_error(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied / "checkpoint-6" / "model.safetensors"
    tensors = load_file(file)
    tensors["renamed"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing: \['lm_head.weight'\]; unexpected: \['renamed'\]"):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})


def test_a_model_of_tied_embeddings_is_resumed(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed(text="gemma3")), "dataset_name": str(data)}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(monkeypatch, tmp_path, **fields, save_steps=3, output_dir=str(unbroken))
    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    fields |= {"resume_from_checkpoint": True, "save_steps": 3}
    run(monkeypatch, tmp_path, **fields, output_dir=str(broken))
    assert "lm_head.weight" not in load_file(broken / "model.safetensors")
    assert moved(unbroken, broken) == set()


def test_another_run_is_refused_with_the_differences(
    finished: dict[str, Any], copied: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(data.read_text())
    rows[3]["conversations"][1]["value"] = "something else"
    for row in rows:
        if "image" in row:
            row["image"] = str(data.parent / row["image"])
    (tmp_path / "changed.json").write_text(json.dumps(rows))
    changed = {
        **finished,
        "output_dir": str(copied),
        "resume_from_checkpoint": True,
        "dataset_name": str(tmp_path / "changed.json"),
        "image_folder": "/",
        "learning_rate": 2e-3,
        "global_batch_size": 8,
    }
    with pytest.raises(ValueError, match="belongs to a different run") as error:
        run(monkeypatch, tmp_path, **changed)
    assert "learning_rate: 0.001 before, 0.002 now" in str(error.value)
    assert "global_batch_size: 4 before, 8 now" in str(error.value)
    assert "  data: " in str(error.value)
    run(monkeypatch, tmp_path, **changed, resume_changed=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"optim_args": "rank=1"},
        {"adam_beta2": 0.95},
        {"adam_epsilon": 1e-6},
        {"lr_scheduler_kwargs": {"num_cycles": 2}},
        {"data_seed": 3},
        {"neftune_noise_alpha": 5.0},
        {"loss_type": "dft"},
        {"train_sampling_strategy": "group_by_length"},
        {"warmup_steps": 3},
        {"attn_implementation": "eager"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_argument_that_changes_the_weights_is_compared(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, **changed}
    with pytest.raises(ValueError, match=rf"belongs to a different run.*\n(.*\n)*  {next(iter(changed))}: "):
        run(monkeypatch, copied, **fields)


def test_the_workers_of_a_stream_decide_its_order(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    fields = {**finished, "dataset_streaming": True, "max_steps": 4, "save_steps": 2, "output_dir": out}
    run(monkeypatch, tmp_path, **fields)
    fields |= {"resume_from_checkpoint": f"{out}/checkpoint-2", "dataloader_num_workers": 2}
    with pytest.raises(ValueError, match="dataloader_num_workers: 0 before, 2 now"):
        run(monkeypatch, tmp_path, **fields)


def test_what_does_not_matter_may_change(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "logging_steps": 1}
    run(monkeypatch, copied, **fields, save_total_limit=5, dataloader_num_workers=1, disable_tqdm=True)
    assert moved(Path(finished["output_dir"]), copied) == set()


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("resume", ["newest", "named"])
def test_examining_a_checkpoint_runs_no_code_in_it(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch, name: str, resume: str
) -> None:
    touched, checkpoint = copied / "touched", copied / "checkpoint-6"
    torch.save({"state": Payload(touched)}, checkpoint / name)
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True}
    if resume == "named":
        with pytest.raises(ValueError, match="can't be resumed from: a file is missing or broken"):
            run(monkeypatch, copied, **{**fields, "resume_from_checkpoint": str(checkpoint)})
    else:
        run(monkeypatch, copied, **fields)
        assert (copied / "broken" / "checkpoint-6").is_dir()
    assert not touched.exists()


LENGTHS = {"epochs": {}, "one and a half": {"num_train_epochs": 1.5}, "steps": {"max_steps": 5}}
LENGTHS["stream"] = {"dataset_streaming": True, "max_steps": 5}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("left", ["all of it", "its checkpoints"])
def test_a_finished_run_is_published_and_not_trained_on(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, left: str
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    # A rate that is not 0 at the end, so that a further step would show.
    fields = {**finished, **LENGTHS[length], "lr_scheduler_type": "constant", "output_dir": str(out)}
    run(monkeypatch, tmp_path, **fields)
    steps = {"epochs": 8, "one and a half": 12}.get(length, 5)
    if left == "all of it":
        shutil.copytree(out, again)
    else:  # killed before the result was there
        for path in out.glob("checkpoint-*"):
            shutil.copytree(path, again / path.name)
    fields |= {"output_dir": str(again), "resume_from_checkpoint": True, "resume_changed": True, "learning_rate": 1.0}
    for _ in range(2):
        run(monkeypatch, tmp_path, **fields)
    assert moved(out, again) == set()
    assert json.loads((again / "trainer_state.json").read_text())["global_step"] == steps
    assert {path.name for path in again.glob("checkpoint-*")} == {path.name for path in out.glob("checkpoint-*")}
    for name in ("config.json", "processor_config.json", "run.json", "modeling_normllava.py"):
        assert (again / name).exists(), name
    assert not list(again.glob("optimizer*"))
    assert Run.read(again) == Run.read(out)  # what it was trained with, not what it was published with


def test_a_finished_run_without_checkpoints_is_not_started_again(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    run(monkeypatch, tmp_path, **fields)
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before
    with pytest.raises(ValueError, match="a run of 8 steps, but no checkpoint to continue from to step 16"):
        run(
            monkeypatch, tmp_path, **{**fields, "num_train_epochs": 2}, resume_from_checkpoint=True,
            resume_changed=True,
        )  # fmt: skip


def test_two_runs_do_not_share_a_folder(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    script = (
        "import os, pathlib, sys, time\n"
        "from training.checkpoints import lock\n"
        "with lock(pathlib.Path(sys.argv[1])):\n"
        "    if os.fork():\n"  # a worker, which must not go on to hold it
        "        print('locked', flush=True)\n"
        "    time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    fields = {**finished, "output_dir": str(out), "max_steps": 1}
    with pytest.raises(ValueError, match="out is in use by another run"):
        run(monkeypatch, tmp_path, **fields)
    assert [path.name for path in out.iterdir()] == [".lock"]
    other.kill()  # SIGKILL; the worker lives on
    other.wait()
    run(monkeypatch, tmp_path, **fields)
    os.killpg(other.pid, signal.SIGKILL)


def test_tokens_and_mean_loss_of_a_resumed_run_are_those_of_the_whole(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})
    expected, got = logged(Path(finished["output_dir"])), logged(copied)
    assert [line["num_tokens"] for line in got[:-1]] == [line["num_tokens"] for line in expected[:-1]]
    assert got[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=1e-6)
    losses = [line["loss"] for line in expected[:-1]]
    assert expected[-1]["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0, 1.0])
def test_gradients_are_watched_also_where_none_is_clipped(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    out = tmp_path / "out"
    fields = {**finished, "max_grad_norm": max_grad_norm, "output_dir": str(out), "save_steps": 2, "optim": "sgd"}
    run(monkeypatch, tmp_path, **fields, max_steps=2)
    line = logged(out)[0]
    parts = [line[name] for name in line if name.startswith("grad_norm/")]
    assert len(parts) == 5
    assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-4)
    assert Run.read(out).arguments["max_grad_norm"] == max_grad_norm

    def spoil(model: Any, *args: Any, **kwargs: Any) -> None:
        model.model.multi_modal_projector.linear_1.weight.grad[0] = torch.inf

    monkeypatch.setattr("training.callbacks.InterfaceMonitor.on_step_begin", lambda self, *args, **kwargs: None)
    step = SFTTrainer.training_step

    def step_and_spoil(trainer: SFTTrainer, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(trainer, model, *args, **kwargs)
        spoil(model)
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", step_and_spoil)
    with pytest.raises(FloatingPointError, match="The gradient's norm is inf in step 1"):
        run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "spoilt")})


def change_size(rows: list[dict[str, Any]], folder: Path) -> None:
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes() + b" ")


def swap_pictures(rows: list[dict[str, Any]], folder: Path) -> None:
    rows[6]["image"], rows[7]["image"] = rows[7]["image"], rows[6]["image"]


@pytest.mark.parametrize("change", [change_size, swap_pictures])
def test_pictures_that_changed_are_another_run(
    finished: dict[str, Any],
    copied: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[dict[str, Any]], Path], None],
) -> None:
    shutil.copytree(data.parent, tmp_path / "data")
    moved_data = tmp_path / "data" / "data.json"
    rows = json.loads(moved_data.read_text())
    change(rows, tmp_path / "data")
    moved_data.write_text(json.dumps(rows))
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(moved_data)}
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: [^\n]*\nRestore these"):
        run(monkeypatch, copied, **fields)


def test_data_that_was_moved_is_the_same(
    finished: dict[str, Any], copied: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data.parent, tmp_path / "data")
    name = str(tmp_path / "data" / "data.json")
    run(
        monkeypatch,
        copied,
        **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": name},
    )
    assert moved(Path(finished["output_dir"]), copied) == set()


def test_another_split_of_a_stream_is_another_run(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": "Yes."}]
    rows = Dataset.from_dict({"images": [[]] * 4, "conversations": [turns] * 4})
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "stored")
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "stored")}
    fields |= {"dataset_streaming": True, "max_steps": 2, "save_steps": 1, "global_batch_size": None}
    fields |= {"output_dir": str(tmp_path / "out")}
    run(monkeypatch, tmp_path, **fields)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    fields |= {"resume_from_checkpoint": True}
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: "):
        run(monkeypatch, tmp_path, **fields, dataset_train_split="test")
    run(monkeypatch, tmp_path, **fields)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_checkpoint(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FloatingPointError, match="in step"):
        run(
            monkeypatch,
            tmp_path,
            **{**finished, "output_dir": str(tmp_path / "out"), "learning_rate": 1e30, "save_steps": 1},
            lr_scheduler_type="constant",
        )
    last = newest_complete(tmp_path / "out", is_main_process=True)
    assert last is not None


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = (Path(finished["output_dir"]) / "model.safetensors").stat().st_size
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit fails, as on a full disk
    rename = os.rename

    def full_after_the_first(source: Any, destination: Any) -> None:
        rename(source, destination)
        if str(destination).endswith("checkpoint-3"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (weights, before[1]))

    monkeypatch.setattr(os, "rename", full_after_the_first)
    try:
        with pytest.raises((OSError, RuntimeError), match=r"checkpoint-6.*checkpoint-3"):
            run(monkeypatch, tmp_path, **{**finished, "output_dir": str(output_dir)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (output_dir / "checkpoint-6").exists()
    run(monkeypatch, tmp_path, **{**finished, "output_dir": str(output_dir), "resume_from_checkpoint": True})
    assert moved(Path(finished["output_dir"]), output_dir) == set()


def test_a_full_disk_at_the_end_says_how_to_go_on(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "output_dir": str(tmp_path / "out")}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("training.trainer.publish_files", full)
        with pytest.raises(OSError, match=r"trained model could not be written .*No space.*resume_from.*checkpoint-8"):
            run(monkeypatch, tmp_path, **fields)
    assert not (tmp_path / "out" / "config.json").exists()
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=True)
    assert moved(Path(finished["output_dir"]), tmp_path / "out") == set()


def test_a_picture_that_vanishes_is_named(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data.parent, tmp_path / "data")
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed()), "num_train_epochs": 2, "save_steps": 2}

    def vanish(*args: Any, **kwargs: Any) -> None:
        (tmp_path / "data" / "5.png").unlink(missing_ok=True)

    monkeypatch.setattr("training.callbacks.MetricsFile.on_log", vanish)
    with pytest.raises(BadRowError, match=r"data.json, row \d+: image .*5.png can't be read"):
        run(
            monkeypatch,
            tmp_path,
            **fields,
            dataset_name=str(tmp_path / "data" / "data.json"),
            output_dir=str(tmp_path / "out"),
        )
    assert newest_complete(tmp_path / "out", is_main_process=True) is not None


def test_the_optimizer_holds_what_is_trained_and_nothing_else(finished: dict[str, Any]) -> None:
    state = torch.load(Path(finished["output_dir"]) / "checkpoint-8" / "optimizer.pt", weights_only=False)
    names = [group["module"] for group in state["param_groups"]]
    assert list(dict.fromkeys(names)) == [
        "multi_modal_projector",
        "multi_modal_projector.norm",
        "language_model",
        "lm_head",
        "vision_tower",
    ]
    # Llava reads the second of three layers: 16 tensors each, and the embeddings.
    vision = [group for group in state["param_groups"] if group["module"] == "vision_tower"]
    assert sum(len(group["params"]) for group in vision) == 2 * 16 + 3


def test_norms_and_biases_do_not_decay(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "weight_decay": 0.1, "max_steps": 1, "save_steps": 1, "output_dir": str(tmp_path / "out")}
    run(monkeypatch, tmp_path, **fields)
    groups = torch.load(tmp_path / "out" / "checkpoint-1" / "optimizer.pt", weights_only=False)["param_groups"]
    decays = [(group["module"], group["weight_decay"], len(group["params"])) for group in groups]
    assert [decay for decay in decays if "projector" in decay[0]] == [
        ("multi_modal_projector", 0.1, 2),
        ("multi_modal_projector", 0.0, 2),
        ("multi_modal_projector.norm", 0.0, 2),
    ]
    assert ("lm_head", 0.1, 1) in decays


def test_weights_keep_their_names_under_fsdps_activation_checkpointing(
    composed: Callable[..., Path], tmp_path: Path
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    names = set(dict(model.named_parameters()))
    layers = model.model.language_model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert set(dict(model.named_parameters())) != names
    write_sharded_weights(model, tmp_path, is_main_process=True)
    assert set(load_file(tmp_path / "model.safetensors")) == names
