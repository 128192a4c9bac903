"""The notebook runs, on any models and pictures."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image


NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "diagnose.ipynb"


@pytest.mark.slow
def test_the_notebook_measures_models(
    composed: Callable[..., Path], picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(4):
        picture.rotate(90 * turn).save(tmp_path / f"{turn}.png")
    models = {"with": str(composed()), "without": str(composed(projector_norm="none"))}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first, *cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert first.source.count("\nMODELS = ") == first.source.count("\nDATA = ") == 1
    first.source = f"MODELS, DATA = {json.dumps(models)}, {str(tmp_path)!r}"
    assert "../runs/digits/report" in cells[-1].source
    cells[-1].source = cells[-1].source.replace("../runs/digits/report", str(tmp_path / "report"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.get("outputs", []) for cell in cells])
    assert "visual tokens enter the decoder" in shown
    assert shown.count("image/png") == 2
    assert (tmp_path / "report" / "report.html").exists()


def test_the_notebook_names_no_machine() -> None:
    """What was printed when it was run is kept; folders of whoever ran it are not."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells)
    assert not any(place in NOTEBOOK.read_text(encoding="utf-8") for place in ("/home/", "/work/", "/root/", "/tmp/"))
