"""The examples' language model: a long training may be stopped, and compiling changes no more than its speed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

import pretrain
from pretrain import TextSettings, train_text


SETTINGS = TextSettings(num_hidden_layers=2, hidden_size=32, vocab_size=300, num_steps=6)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(pretrain, "SAVE_STEPS", 2)
    return [
        {
            "description": f"The digit is {n}.",
            "caption": f" It is {n}",
            "conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": str(n)}],
        }
        for n in range(24)
    ]


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in this step."""
    clip, calls = torch.nn.utils.clip_grad_norm_, iter(range(step))

    def clip_or_stop(*args: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return clip(*args)

    monkeypatch.setattr(pretrain.nn.utils, "clip_grad_norm_", clip_or_stop)


def test_a_stopped_training_goes_on_to_the_same_weights(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = train_text(rows, tmp_path / "whole", SETTINGS)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as context:
        stop_at(5, context)
        with pytest.raises(KeyboardInterrupt):
            train_text(rows, stopped, SETTINGS)
    assert not (stopped / "tokenizer.json").exists()  # by which a finished one is known
    with monkeypatch.context() as context:
        stop_at(2, context)  # two are left
        assert train_text(rows, stopped, SETTINGS) == losses
    weights = load_file(stopped / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert not (stopped / "progress.pt").exists()
    # What was stopped on other rows is not gone on with.
    with monkeypatch.context() as context:
        stop_at(5, context)
        with pytest.raises(KeyboardInterrupt):
            train_text(rows[1:], stopped, SETTINGS)
    train_text(rows, stopped, SETTINGS)
    assert torch.equal(load_file(stopped / "model.safetensors")["lm_head.weight"], expected["lm_head.weight"])


@pytest.mark.slow
def test_compiled_layers_learn_the_same(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    eager = train_text(rows, tmp_path / "eager", SETTINGS)
    assert train_text(rows, tmp_path / "compiled", SETTINGS, compiled=True) == pytest.approx(eager, rel=1e-4)
    assert (
        load_file(tmp_path / "compiled" / "model.safetensors").keys()
        == load_file(tmp_path / "eager" / "model.safetensors").keys()
    )
