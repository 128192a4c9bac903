"""A trained NormLlava and its release folder, which are made once for all tests here."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi
from PIL import Image

from common.files import weights_fingerprint
from diagnostics.__main__ import main as run_diagnostics
from hub_cards.build import BuildOptions, build_release
from hub_server import NAME, TOKEN, HubServer, serve_hub


PROSE = {
    "summary": "Answers questions.",
    "intended_use": "Tests.",
    "out_of_scope": "All else.",
    "training_data": "Random rows.",
    "limits": "It knows nothing.",
    "language": ["en", "de"],
    "datasets": ["owner/rows"],
}
EVALUATION = {
    "task": "Visual question answering",
    "dataset": "owner/rows",
    "split": "test",
    "metric": "exact_match",
    "value": 0.5,
    "n": 200,
    "standard_error": 0.035,
    "command": "python evaluate.py",
    "baseline": 0.1,
    "baseline_name": "guessing",
}


@pytest.fixture(scope="session")
def trained(composed: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as training leaves it: the model, the run's records, and files that must never be published.

    Treat it as read-only.
    """
    run = tmp_path_factory.mktemp("trained") / "stage2"
    shutil.copytree(composed(), run)

    # The records of training and evaluation, which the card shows.
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 8, "log_history": []}))
    metrics = [
        {"step": 4, "loss": 2.5},
        {"step": 8, "loss": 1.5, "num_tokens": 200.0},
        {"step": 8, "train_runtime": 30.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))

    environment = {"device": "x86_64", "num_processes": 1, "commit": "0" * 40}
    # The folder of the stage before is not on this machine.
    arguments = {"stage": "instruct", "learning_rate": 1e-5, "model_name_or_path": str(run.parent / "gone")}
    (run / "run.json").write_text(json.dumps({"arguments": arguments, "environment": environment, "recipe": None}))
    (run / "evaluation.json").write_text(json.dumps([{**EVALUATION, "weights": weights_fingerprint(run)}]))

    # Files that stay behind.
    (run / "training_args.bin").write_bytes(b"\x80\x02.")
    (run / "optimizer.pt").write_bytes(b"PK")
    (run / "checkpoint-8").mkdir()
    return run


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file with the card's prose."""
    path = tmp_path_factory.mktemp("prose") / "card.yaml"
    path.write_text(yaml.safe_dump(PROSE))
    return path


@pytest.fixture(scope="session")
def widget_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two rows, each of one picture and one question."""
    folder = tmp_path_factory.mktemp("widgets")
    rows = []
    for number in range(2):
        Image.new("RGB", (30, 20), (90 * number, 20, 200)).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def report(trained: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the diagnostics write about the model. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("report") / "diagnostics"
    arguments = ["--model", str(trained), "--data", str(widget_data), "--output_dir", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diagnostics", *arguments])
        run_diagnostics()
    return folder


@pytest.fixture(scope="session")
def release(trained: Path, prose: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release folder. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("released") / "release"
    options = BuildOptions(repo_id=NAME, prose=prose, widget_data=widget_data, license="apache-2.0")
    build_release(trained, folder, options)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server in place of the Hub."""
    with serve_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    """The Hub's client, with a token that the server accepts."""
    return HfApi(endpoint=hub.url, token=TOKEN)
