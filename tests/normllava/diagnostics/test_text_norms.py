"""Tests of comparing the norms of text embeddings of a language model and of models composed from it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from normllava.diagnostics.text_norms import compare_text_norms, main


def find_embeddings(weights: dict[str, torch.Tensor]) -> str:
    """The name of the text embeddings among a model's weights."""
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    return name


def read_embeddings(folder: Path) -> torch.Tensor:
    """The text embeddings of the model in a folder, `(num_embeddings, hidden_size)`, without loading the model."""
    weights = load_file(folder / "model.safetensors")
    return weights[find_embeddings(weights)]


def test_a_language_model_beside_two_models_composed_from_it(
    backbones: Callable[[str], Path],
    make_model_folder: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One model is only composed. In the other, the embeddings are 1.5 times as large, and one embedding is 0."""
    base = backbones("qwen2")
    trained = shutil.copytree(make_model_folder(), tmp_path / "trained")
    weights = load_file(trained / "model.safetensors")
    name = find_embeddings(weights)
    weights[name] = 1.5 * weights[name]
    weights[name][3] = 0
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})

    main(["--model", str(base), str(make_model_folder()), str(trained), "--output_dir", str(tmp_path / "norms")])

    table = pd.read_csv(tmp_path / "norms" / "text_norms.csv").set_index("model")
    norms_of_base = torch.linalg.norm(read_embeddings(base).double(), dim=-1)
    row_of_base = table.loc[str(base)]
    assert row_of_base["mean"] == pytest.approx(norms_of_base.mean().item(), rel=1e-6)
    assert row_of_base["standard_deviation"] == pytest.approx(norms_of_base.numpy().std(), rel=1e-5)
    assert row_of_base["embeddings"] == len(norms_of_base)

    assert table.loc[str(make_model_folder()), "ratio"] == pytest.approx(
        1, rel=1e-6
    )  # composing leaves embeddings as they are

    norms_of_trained = torch.linalg.norm(read_embeddings(trained).double(), dim=-1)
    nonzero = norms_of_trained[norms_of_trained > 0]
    row_of_trained = table.loc[str(trained)]
    assert len(nonzero) == len(norms_of_trained) - 1
    assert row_of_trained["embeddings"] == len(nonzero)
    assert row_of_trained["mean"] == pytest.approx(nonzero.mean().item(), rel=1e-6)
    # Not exactly 1.5, because the zero embedding is left out.
    assert row_of_trained["ratio"] == pytest.approx(1.5, rel=0.01)

    assert "standard_deviation" in caplog.text  # the table is also logged


def test_the_scale_of_a_decoder_counts(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma multiplies embeddings by the square root of their width before the first layer."""
    base = backbones("gemma3")
    main(["--model", str(base), "--output_dir", str(tmp_path)])
    embeddings = read_embeddings(base)
    width = embeddings.shape[1]
    norms = torch.linalg.norm(embeddings.double(), dim=-1)
    nonzero = norms[norms > 0]  # embeddings of zeros don't count
    mean = pd.read_csv(tmp_path / "text_norms.csv")["mean"].item()
    assert mean == pytest.approx(width**0.5 * nonzero.mean().item(), rel=1e-5)


def test_a_model_whose_embeddings_are_all_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="new: all of its text embeddings are zero"):
        compare_text_norms({"base": torch.ones(3), "new": torch.zeros(3)})


def test_a_model_that_is_named_twice_is_refused() -> None:
    with pytest.raises(SystemExit, match="names a model twice"):
        main(["--model", "owner/one", "owner/one"])
