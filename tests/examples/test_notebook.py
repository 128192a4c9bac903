"""Runs the notebooks with other models and pictures than their own, and checks the outputs that they are kept with."""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from modeling_normllava import NormLlavaForConditionalGeneration


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIAGNOSE = EXAMPLES / "diagnose.ipynb"
COMPOSE_AND_TRAIN = EXAMPLES / "compose_and_train.ipynb"
OWN_TRAINER = EXAMPLES / "own_trainer.ipynb"


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The notebook's cells with code, in their order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def set_parameters(notebook: nbformat.NotebookNode, **parameters: object) -> None:
    """Replace the notebook's first code cell, which sets all parameters, by a cell that sets them to these values."""
    first_cell = code_cells(notebook)[0]
    # The name at the beginning of each line with an assignment: `NAME = value` or `NAME: type = value`.
    names = re.findall(r"^(\w+)[^=\n]*=", first_cell.source, re.MULTILINE)
    assert names == list(parameters)  # no parameter keeps the notebook's value
    first_cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder, and return the outputs of its cells as JSON."""
    for cell in code_cells(notebook):
        cell.outputs = []  # the notebook has the outputs of an earlier run
    # The notebook imports the repository's packages.
    python_path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # Jupyter's backend for figures
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return json.dumps([cell.outputs for cell in code_cells(notebook)])


@pytest.mark.slow
def test_diagnose_measures_models(
    make_model_folder: Callable[..., Path], picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):  # four different pictures
        picture.rotate(90 * number).save(tmp_path / f"{number}.png")

    notebook = nbformat.read(DIAGNOSE, as_version=4)
    models = {"with norm": str(make_model_folder()), "without norm": str(make_model_folder(projector_norm="none"))}
    set_parameters(notebook, MODELS=models, DATA=str(tmp_path))
    # The last cell writes a report into a folder of the repository. Here it gets another folder.
    last_cell = code_cells(notebook)[-1]
    assert "../runs/digits/report" in last_cell.source
    last_cell.source = last_cell.source.replace("../runs/digits/report", str(tmp_path / "report"))

    outputs = execute(notebook, tmp_path, monkeypatch)
    assert "Image embeddings enter with" in outputs
    assert outputs.count("image/png") == 2  # the figures "overview" and "layers"
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.slow
def test_own_trainer_scales_watches_and_adds_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(OWN_TRAINER, as_version=4)
    set_parameters(notebook, STEPS=4, LEARNING_RATE=1e-3)
    outputs = execute(notebook, tmp_path, monkeypatch)
    assert "and have 1 times now" in outputs
    assert "'norm/ratio': " in outputs
    assert outputs.count("image/png") == 1
    assert "NormLlavaForConditionalGeneration GlobalWeightCompensatedLayerNorm" in outputs


@pytest.mark.slow
def test_compose_and_train_trains_both_stages(
    backbones: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The notebook trains no backbones if there are some in its folder. Here they have random weights.
    shutil.copytree(backbones("siglip"), tmp_path / "digits" / "vision")
    shutil.copytree(backbones("qwen2"), tmp_path / "digits" / "text")
    notebook = nbformat.read(COMPOSE_AND_TRAIN, as_version=4)
    output = tmp_path / "output"
    options = ["--max_steps", "2", "--logging_steps", "1"]
    set_parameters(notebook, DIGITS=str(tmp_path / "digits"), OUTPUT=str(output), OPTIONS=options)

    outputs = execute(notebook, tmp_path, monkeypatch)
    assert "image tokens before the norm" in outputs
    assert "stage: align" in outputs
    assert "stage: instruct" in outputs
    assert outputs.count("image/png") == 3  # curves of the training, pictures with answers, and norms by layer
    for name in ("without the norm", "composed", "trained"):
        assert f">{name}</td>" in outputs  # a row of the table of norm ratios

    for stage in ("stage1", "stage2"):
        lines = (output / stage / "metrics.jsonl").read_text().splitlines()
        *step_lines, summary_line = lines  # the last line is about the whole training
        assert len(step_lines) == 2
        assert all("norm/ratio" in json.loads(line) for line in step_lines)
        assert "norm/ratio" not in json.loads(summary_line)

    # Training has changed weights in all parts of the model. The part is the second word of a weight's name, as in
    # "model.vision_tower.embeddings.patch_embedding.weight".
    before = NormLlavaForConditionalGeneration.from_pretrained(output / "composed").state_dict()
    after = NormLlavaForConditionalGeneration.from_pretrained(output / "stage2").state_dict()
    changed_names = [name for name in before if not before[name].equal(after[name])]
    changed_parts = {name.split(".")[1] for name in changed_names}
    assert changed_parts.issuperset({"vision_tower", "multi_modal_projector", "language_model"})


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_what_the_notebook_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "digits"))  # a notebook adds this folder itself
    for cell in code_cells(nbformat.read(path, as_version=4)):
        python_lines = [line for line in cell.source.splitlines() if not line.startswith(("%", "!"))]
        for statement in ast.walk(ast.parse("\n".join(python_lines))):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                exec(ast.unparse(statement), {})  # raises an ImportError if a name isn't there


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_names_no_machine(path: Path) -> None:
    """The notebooks are kept with their outputs, which must not name folders of the machine that made them."""
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.outputs for cell in code_cells(notebook))
    text = path.read_text(encoding="utf-8")
    for folder in ("/home/", "/work/", "/root/", "/tmp/"):
        assert folder not in text
