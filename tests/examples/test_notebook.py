"""The notebooks run, on any models and pictures."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from modeling_normllava import NormLlavaForConditionalGeneration


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIAGNOSE, COMPOSE_AND_TRAIN = EXAMPLES / "diagnose.ipynb", EXAMPLES / "compose_and_train.ipynb"


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def set_parameters(notebook: nbformat.NotebookNode, **values: object) -> None:
    """Put other values in place of those of the first cell, which holds nothing else."""
    first = code_cells(notebook)[0]
    names = [line.split("=")[0].split(":")[0].strip() for line in first.source.splitlines() if "=" in line]
    assert names == list(values)
    first.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder; what its cells show, as JSON."""
    for cell in code_cells(notebook):
        cell.outputs = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # what Jupyter shows figures by
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return json.dumps([cell.outputs for cell in code_cells(notebook)])


@pytest.mark.slow
def test_the_notebook_measures_models(
    composed: Callable[..., Path], picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(4):
        picture.rotate(90 * turn).save(tmp_path / f"{turn}.png")
    notebook = nbformat.read(DIAGNOSE, as_version=4)
    models = {"with": str(composed()), "without": str(composed(projector_norm="none"))}
    set_parameters(notebook, MODELS=models, DATA=str(tmp_path))
    last = code_cells(notebook)[-1]
    assert "../runs/digits/report" in last.source
    last.source = last.source.replace("../runs/digits/report", str(tmp_path / "report"))
    shown = execute(notebook, tmp_path, monkeypatch)
    assert "image tokens enter the decoder" in shown
    assert shown.count("image/png") == 2
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.slow
def test_the_notebook_composes_and_trains(
    backbones: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From random backbones, which it keeps, and data that it makes, in two steps a stage."""
    for name, family in (("vision", "siglip"), ("text", "qwen2")):
        shutil.copytree(backbones(family), tmp_path / "digits" / name)
    notebook = nbformat.read(COMPOSE_AND_TRAIN, as_version=4)
    output = tmp_path / "output"
    options = ["--max_steps", "2", "--logging_steps", "1"]
    set_parameters(notebook, DIGITS=str(tmp_path / "digits"), OUTPUT=str(output), OPTIONS=options)
    shown = execute(notebook, tmp_path, monkeypatch)
    assert "image tokens before the norm" in shown
    assert "stage: align" in shown
    assert "stage: instruct" in shown
    assert shown.count("image/png") == 3
    assert all(f">{name}</td>" in shown for name in ("without the norm", "composed", "trained"))
    for stage in ("stage1", "stage2"):
        metrics = (output / stage / "metrics.jsonl").read_text().splitlines()
        assert ["norm/ratio" in json.loads(line) for line in metrics] == [True, True, False]
    before, after = (
        NormLlavaForConditionalGeneration.from_pretrained(folder).state_dict()
        for folder in (output / "composed", output / "stage2")
    )
    assert {name.split(".")[1] for name in before if not before[name].equal(after[name])} >= {
        "vision_tower",
        "multi_modal_projector",
        "language_model",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_names_no_machine(path: Path) -> None:
    """What was printed when it was run is kept; folders of whoever ran it are not."""
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.outputs for cell in code_cells(notebook))
    assert not any(place in path.read_text(encoding="utf-8") for place in ("/home/", "/work/", "/root/", "/tmp/"))
