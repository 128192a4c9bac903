"""Checkpoints: what is complete, what is refused, and what a run does when it can't go on."""

import json
import os
import pickle
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
from safetensors.torch import load_file, save_file
from trl import SFTTrainer

from conversations.rows import BadRowError
from script_runs import INSTRUCT, PACKED, ROOT, logged, moved, run
from training import checkpoints
from training.checkpoints import SIZES_FILE, find, problem, publish_checkpoint, save, steps_done
from training.run import Run
from training.trainer import NormLlavaTrainer


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


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


FAULTS: dict[str, Callable[[Path], object]] = {
    "weights torn": lambda folder: tear(folder / "model.safetensors"),
    "optimizer gone": lambda folder: (folder / "optimizer.pt").unlink(),
    "random state torn": lambda folder: tear(folder / "rng_state.pth"),
    "state torn": lambda folder: tear(folder / "trainer_state.json"),
    "state of another step": lambda folder: shutil.copy(folder.parent / "checkpoint-3" / "trainer_state.json", folder),
    "run of another version": lambda folder: (folder / "run.json").write_text('{"num_processes": 1}'),
    "sizes torn": lambda folder: tear(folder / SIZES_FILE),
    "nothing but a folder": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_passed_over(copied: Path, fault: str) -> None:
    FAULTS[fault](copied / "checkpoint-6")
    assert find(copied, True) == copied / "checkpoint-3"
    with pytest.raises(ValueError, match=r"checkpoint-6 can't be resumed from: .* (missing|not complete|torn)"):
        find(copied, str(copied / "checkpoint-6"))
    tear(copied / "checkpoint-3" / "optimizer.pt")
    with pytest.raises(ValueError, match=r"no checkpoint to resume from .*-6: .*-3: optimizer.pt is torn"):
        find(copied, True)


def test_a_checkpoint_of_an_older_version_needs_no_sizes(copied: Path) -> None:
    (copied / "checkpoint-6" / SIZES_FILE).unlink()
    assert find(copied, True) == copied / "checkpoint-6"


def test_a_saved_folder_is_whole_and_as_open_as_the_umask_lets_it(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        folder, place = tmp_path / "aside", tmp_path / "checkpoint-1"
        (folder / "shards").mkdir(parents=True)
        (folder / "shards" / "0.distcp").write_bytes(b"weights")
        (folder / "shards" / "0.distcp").chmod(0o600)  # as safetensors leaves it
        before = os.umask(mask)
        try:
            save(folder, place)
        finally:
            os.umask(before)
        assert stat.S_IMODE((place / "shards" / "0.distcp").stat().st_mode) == mode
        assert json.loads((place / SIZES_FILE).read_text()) == {"shards/0.distcp": 7}
        assert not folder.exists()


def test_sharded_weights_are_no_result(copied: Path) -> None:
    (copied / "checkpoint-6" / "model.safetensors").rename(copied / "checkpoint-6" / "__0_0.distcp")
    with pytest.raises(ValueError, match="checkpoint-6 is the end of the run, but its weights are sharded"):
        publish_checkpoint(copied / "checkpoint-6", copied)
    assert not (copied / "config.json").exists()


# Runs that are stopped after their first checkpoint; what they train is in tests of its own.
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "packed, second epoch": {**PACKED, "num_train_epochs": 2, "global_batch_size": 8, "save_steps": 6},
    "packed, workers": {**PACKED, "dataloader_num_workers": 2},
    "checkpointed in bfloat16": {"bf16": True, "gradient_checkpointing": True, "clip_by_module": True},
    "align": {"stage": "align", "vision_learning_rate": None},
    "adapt": {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_dropout": 0.1},
    "tied embeddings": {**PACKED, "text": "gemma3"},
    "stream": {"dataset_streaming": True, "max_steps": 6},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_gives_the_weights_of_an_unbroken_one(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fields = {"save_steps": 3, **INSTRUCT, "dataset_name": str(data), **KINDS[kind]}
    fields["model_name_or_path"] = str(composed(text=fields.pop("text", "qwen2")))
    fields = {name: value for name, value in fields.items() if value is not None}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(monkeypatch, tmp_path, **fields, output_dir=str(unbroken))
    first = f"checkpoint-{fields['save_steps']}"
    shutil.copytree(unbroken / first, broken / first)
    shutil.copytree(unbroken / first, broken / "checkpoint-99")  # newer, and not complete
    shutil.copy(unbroken / "metrics.jsonl", broken)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # torn by the kill
    with pytest.raises(ValueError, match="already holds a run"):
        run(monkeypatch, tmp_path, **fields, output_dir=str(broken))
    run(monkeypatch, tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert moved(unbroken, broken, "adapter_model.safetensors" if kind == "adapt" else "model.safetensors") == set()
    assert (broken / "superseded" / "checkpoint-99").is_dir()
    assert [Run.read(folder).environment.resumed for folder in (unbroken, broken)] == [False, True]
    lines, expected = ([line for line in logged(folder) if "loss" in line] for folder in (broken, unbroken))
    # Not the loss: its first value after a restart averages over the steps since then, not since the last log.
    for name in ("step", "norm/visual", "num_tokens"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected]


def test_a_named_checkpoint_is_gone_on_from_and_later_ones_are_moved_away(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    fields = {**finished, "output_dir": str(out), "learning_rate": 2e-3, "resume_changed": True, "save_steps": 100}
    fields["resume_from_checkpoint"] = str(out / "checkpoint-3")
    run(monkeypatch, tmp_path, **fields, max_steps=5)
    away = {"checkpoint-6", "checkpoint-8", "trainer_state.json"}
    assert {path.name for path in (out / "superseded").iterdir()} == away
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    assert Run.read(out).arguments["learning_rate"] == 2e-3
    # Of what was moved away nothing is replaced. The new intervals hold, and the newest are kept.
    fields |= {"save_steps": 1, "logging_steps": 1, "save_total_limit": 2}
    run(monkeypatch, tmp_path, **fields, max_steps=6)
    away |= {"checkpoint-5", "trainer_state.json.1"}
    assert {path.name for path in (out / "superseded").iterdir()} == away
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}
    # Another run's checkpoint does not take the folder over.
    with pytest.raises(ValueError, match="already holds a run"):
        find(out, str(Path(finished["output_dir"]) / "checkpoint-3"))


CHANGED: dict[str, Any] = {
    "learning_rate": 2e-3, "adam_beta2": 0.95, "lr_scheduler_kwargs": {"num_cycles": 2}, "data_seed": 3,
    "neftune_noise_alpha": 5.0, "loss_type": "dft", "train_sampling_strategy": "group_by_length", "warmup_steps": 3,
    "attn_implementation": "eager", "bf16": True,
}  # fmt: skip


def test_another_run_is_refused_with_the_differences(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, **CHANGED}
    with pytest.raises(ValueError, match="belongs to a different run") as error:
        run(monkeypatch, copied, **fields)
    assert "  learning_rate: 0.001 before, 0.002 now" in str(error.value)
    found = {line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]}
    assert found == set(CHANGED)


def test_what_an_upgrade_adds_to_the_record_stops_no_run(
    finished: dict[str, Any], copied: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what the weights don't depend on, or where the same data lies."""
    file = copied / "checkpoint-6" / "run.json"
    record = json.loads(file.read_text())
    del record["arguments"]["neftune_noise_alpha"]  # as if a later version were the first to record it
    record["arguments"]["a_field_of_an_older_version"] = 1
    file.write_text(json.dumps(record))
    (copied / "checkpoint-6" / SIZES_FILE).unlink()
    elsewhere = Path(shutil.copytree(data.parent, copied.parent / "data")) / data.name
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(elsewhere)}
    run(monkeypatch, copied, **fields, save_total_limit=5, dataloader_num_workers=1, disable_tqdm=True)
    assert moved(Path(finished["output_dir"]), copied) == set()


@pytest.mark.parametrize("change", ["content", "order", "size"])
def test_data_that_changed_is_another_run(
    finished: dict[str, Any], copied: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    changed = Path(shutil.copytree(data.parent, tmp_path / "data")) / data.name
    rows = json.loads(changed.read_text())
    if change == "content":
        rows[3]["conversations"][1]["value"] = "something else"
    elif change == "order":
        rows[6]["image"], rows[7]["image"] = rows[7]["image"], rows[6]["image"]
    else:
        picture = tmp_path / "data" / "5.png"
        picture.write_bytes(picture.read_bytes() + b" ")
    changed.write_text(json.dumps(rows))
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(changed)}
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: [^\n]*\nRestore these"):
        run(monkeypatch, copied, **fields)


def test_the_workers_of_a_stream_decide_its_order(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    fields = {**finished, "dataset_streaming": True, "max_steps": 2, "save_steps": 1, "output_dir": out}
    run(monkeypatch, tmp_path, **fields)
    fields |= {"resume_from_checkpoint": f"{out}/checkpoint-1", "dataloader_num_workers": 2}
    with pytest.raises(ValueError, match="dataloader_num_workers: 0 before, 2 now"):
        run(monkeypatch, tmp_path, **fields)


def test_weights_that_do_not_fit_are_an_error(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "checkpoint-6" / SIZES_FILE).unlink()
    file = copied / "checkpoint-6" / "model.safetensors"
    tensors = load_file(file)
    tensors["renamed"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing: \['lm_head.weight'\]; unexpected: \['renamed'\]"):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resuming_runs_no_code_of_a_checkpoint(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    touched, checkpoint = copied / "touched", copied / "checkpoint-6"
    torch.save({"state": Payload(touched)}, checkpoint / name)
    assert problem(checkpoint) == f"{name} is torn"
    (checkpoint / SIZES_FILE).unlink()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})
    assert not touched.exists()


LENGTHS = {"one and a half": {"num_train_epochs": 1.5}, "stream": {"dataset_streaming": True, "max_steps": 5}}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("left", ["all of it", "its checkpoints"])
def test_a_finished_run_is_published_and_not_trained_on(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, left: str
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    # A rate that is not 0 at the end, so that a further step would show.
    fields = {**finished, **LENGTHS[length], "lr_scheduler_type": "constant", "output_dir": str(out)}
    run(monkeypatch, tmp_path, **fields)
    steps = 12 if length == "one and a half" else 5
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


def test_tokens_and_mean_loss_of_a_resumed_run_are_those_of_the_whole(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})
    expected, got = logged(Path(finished["output_dir"])), logged(copied)
    assert [line["num_tokens"] for line in got[:-1]] == [line["num_tokens"] for line in expected[:-1]]
    assert got[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=1e-6)
    losses = [line["loss"] for line in expected[:-1]]
    assert expected[-1]["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


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


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("NCCL error")], ids=["full disk", "another error"]
)
@pytest.mark.parametrize(("place", "what"), [("save", "checkpoint-6"), ("publish", "The trained model")])
def test_what_can_not_be_written_is_said_with_its_own_cause(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str, what: str
) -> None:
    fields, out = {**finished, "output_dir": str(tmp_path / "out")}, tmp_path / "out"
    write = getattr(checkpoints, place)

    def fail(folder: Path, destination: Path) -> None:
        if destination.name in ("checkpoint-6", "out"):
            raise error
        write(folder, destination)

    with monkeypatch.context() as patched:
        patched.setattr(f"training.trainer.{place}", fail)
        with pytest.raises(type(error), match=str(error).replace("[", r"\[").replace("]", r"\]")) as raised:
            run(monkeypatch, tmp_path, **fields)
    (note,) = raised.value.__notes__
    last = find(out, True)
    assert last is not None
    assert note.startswith(f"{what} was not written. Last checkpoint: {last};")
    raised.value.__notes__.clear()
    assert not (out / "config.json").exists()
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=True)
    assert moved(Path(finished["output_dir"]), out) == set()
    assert steps_done(out) == 8


def test_a_picture_that_vanishes_is_named(
    finished: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Path(shutil.copytree(data.parent, tmp_path / "data")) / data.name
    fields = {**finished, **PACKED, "num_train_epochs": 2, "save_steps": 2, "output_dir": str(tmp_path / "out")}

    def vanish(*args: Any, **kwargs: Any) -> None:
        (tmp_path / "data" / "5.png").unlink(missing_ok=True)

    monkeypatch.setattr("training.monitor.MetricsFile.on_log", vanish)
    with pytest.raises(BadRowError, match=r"data.json, row \d+: image .*5.png can't be read"):
        run(monkeypatch, tmp_path, **{**fields, "dataset_name": str(rows)})
    assert find(tmp_path / "out", True) is not None


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

    monkeypatch.setattr("training.monitor.InterfaceMonitor.on_step_begin", lambda self, *args, **kwargs: None)
    step = SFTTrainer.training_step

    def step_and_spoil(trainer: SFTTrainer, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(trainer, model, *args, **kwargs)
        spoil(model)
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", step_and_spoil)
    with pytest.raises(FloatingPointError, match="The gradient's norm is inf in step 1"):
        run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "spoilt")})


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
    assert find(tmp_path / "out", True) is not None


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


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_the_rehearsal_leaves_no_trace(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    fields = {**finished, "optim": optim, "weight_decay": 0.1, "max_steps": 3, "lr_scheduler_type": "constant"}
    fields |= {"vision_learning_rate": 1e-3, "dataloader_num_workers": 1, "logging_steps": 1}
    rehearsed: list[list[int]] = []
    rehearse = NormLlavaTrainer._rehearse

    def note(trainer: NormLlavaTrainer, model: Any, rows: list[int]) -> None:
        rehearsed.append(rows)
        rehearse(trainer, model, rows)

    monkeypatch.setattr(NormLlavaTrainer, "_rehearse", note)
    run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "with")})
    assert [len(rows) for rows in rehearsed] == [2]
    monkeypatch.setattr(NormLlavaTrainer, "_rehearse", lambda *args: None)
    run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "without")})
    assert moved(tmp_path / "with", tmp_path / "without") == set()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "norm/ratio")
    got, expected = ([[line.get(name) for name in kept] for line in logged(tmp_path / n)] for n in ("with", "without"))
    assert got == expected


def test_what_does_not_fit_fails_before_the_first_step(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NormLlavaTrainer, "_rehearse", full)
    with pytest.raises(MemoryError, match="largest batch does not fit into memory: lower packed_length or per_device"):
        run(monkeypatch, tmp_path, **{**finished, "output_dir": str(tmp_path / "out")})
