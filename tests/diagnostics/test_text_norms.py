"""Norms of text embeddings: a language model beside the vision-language model that was composed from it."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from diagnostics.text_norms import compare_text_norms, main


def read_embeddings(folder: Path) -> torch.Tensor:
    """The weight of a folder's text embeddings, `(num_embeddings, hidden_size)`, without loading a model."""
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    return weights[name]


def test_a_language_model_beside_the_model_composed_from_it(
    backbones: Callable[[str], Path],
    composed: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = backbones("qwen2")
    trained = tmp_path / "trained"
    trained.mkdir()
    for file in composed().iterdir():
        (trained / file.name).write_bytes(file.read_bytes())
    weights = load_file(trained / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name] = 1.5 * weights[name]
    weights[name][3] = 0
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})

    main(["--model", str(base), str(composed()), str(trained), "--output_dir", str(tmp_path / "norms")])

    table = pd.read_csv(tmp_path / "norms" / "text_norms.csv").set_index("model")
    by_hand = torch.linalg.norm(read_embeddings(base).double(), dim=-1)
    assert table.loc[str(base), "mean"] == pytest.approx(by_hand.mean().item(), rel=1e-6)
    assert table.loc[str(base), "standard_deviation"] == pytest.approx(by_hand.numpy().std(), rel=1e-5)
    assert table.loc[str(base), "embeddings"] == len(by_hand)
    assert table.loc[str(composed()), "ratio"] == pytest.approx(1, rel=1e-6)  # composing leaves embeddings as they are

    by_hand = torch.linalg.norm(read_embeddings(trained).double(), dim=-1)
    kept = by_hand[by_hand > 0]
    assert table.loc[str(trained), "embeddings"] == len(kept) == len(by_hand) - 1
    assert table.loc[str(trained), "mean"] == pytest.approx(kept.mean().item(), rel=1e-6)
    assert table.loc[str(trained), "ratio"] == pytest.approx(1.5, rel=0.01)
    assert "standard_deviation" in caplog.text


def test_the_scale_of_a_decoder_counts(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma multiplies its embeddings by the root of its width before its first layer."""
    base = backbones("gemma3")
    main(["--model", str(base), "--output_dir", str(tmp_path)])
    by_hand = torch.linalg.norm(read_embeddings(base).double(), dim=-1)
    width = read_embeddings(base).shape[1]
    mean = pd.read_csv(tmp_path / "text_norms.csv")["mean"].item()
    assert mean == pytest.approx(width**0.5 * by_hand[by_hand > 0].mean().item(), rel=1e-5)


def test_what_can_not_be_compared() -> None:
    with pytest.raises(ValueError, match="new: all of its text embeddings are zero"):
        compare_text_norms({"base": torch.ones(3), "new": torch.zeros(3)})
    with pytest.raises(SystemExit, match="names a model twice"):
        main(["--model", "owner/one", "owner/one"])
