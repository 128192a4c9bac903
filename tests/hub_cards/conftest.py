"""Fixtures for these tests: a run with a small model and its release folder, and a server in place of the Hub."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi
from PIL import Image

from hub_cards.build import BuildOptions, build_release
from hub_server import REPO_ID, TOKEN, HubServer, serve_hub
from normllava.diagnostics.command import main as run_diagnostics
from normllava.files import weights_fingerprint


# The content of a recipe's `card.yaml`.
PROSE = {
    "summary": "Answers questions.",
    "intended_use": "Tests.",
    "out_of_scope": "All else.",
    "training_data": "Random rows.",
    "limits": "It knows nothing.",
    "language": ["en", "de"],
    "datasets": ["owner/rows"],
}
# The one row of the run's `evaluation.json`, still without the hash of the weights.
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
def trained_run(make_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run as training leaves it: a model, made-up records, and files that must not be published.

    Treat it as read-only.
    """
    run = tmp_path_factory.mktemp("trained") / "stage2"
    shutil.copytree(make_model_folder(), run)  # a small random model

    # A log of eight steps.
    logs = [
        {"step": 4, "loss": 2.5},
        {"step": 8, "loss": 1.5, "num_tokens": 200.0},
        {"step": 8, "train_runtime": 30.0},
    ]
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 8, "log_history": logs}))

    run_record = {
        "arguments": {
            "stage": "instruct",
            "learning_rate": 1e-5,
            "model_name_or_path": str(run.parent / "gone"),  # the folder of the stage before doesn't exist
        },
        "environment": {"device": "x86_64", "num_processes": 1, "commit": "0" * 40},
        "recipe": None,
        "composed": {"projector_scaled": False, "projector_aligned": False, "llava_name_or_path": None},
    }
    (run / "run.json").write_text(json.dumps(run_record))
    evaluation = {**EVALUATION, "weights": weights_fingerprint(run)}
    (run / "evaluation.json").write_text(json.dumps([evaluation]))

    # Files and a folder that must not be published.
    (run / "training_args.bin").write_bytes(b"x")
    (run / "optimizer.pt").write_bytes(b"x")
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
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}]
    for name, colour in (("blue.png", "blue"), ("red.png", "red")):
        Image.new("RGB", (30, 20), colour).save(folder / name)
        rows.append({"image": name, "conversations": turns})
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def report(trained_run: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `normllava diagnose` writes about the run's model. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("report") / "diagnostics"
    arguments = ["--model", str(trained_run), "--data", str(widget_data), "--output_dir", str(folder)]
    run_diagnostics(arguments)
    return folder


@pytest.fixture(scope="session")
def release(trained_run: Path, prose: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release folder of the run, with two examples, beside the Space's folder. Treat both as read-only."""
    folder = tmp_path_factory.mktemp("released") / "release"
    options = BuildOptions(repo_id=REPO_ID, prose=prose, widget_data=widget_data, license="apache-2.0")
    build_release(trained_run, folder, options)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server that the Hub's client asks instead of the Hub. It has no repository yet."""
    with serve_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    """The Hub's client, with a token that the server accepts."""
    return HfApi(endpoint=hub.url, token=TOKEN)
