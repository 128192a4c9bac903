"""Training steps without walks through all modules."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from script_runs import run
from training.module_walks import no_module_walks


def small_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model with a submodule, and an optimizer of its parameters."""
    model = nn.Sequential(nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters())


def test_the_mode_of_all_modules_still_changes() -> None:
    model, optimizer = small_model()
    model.eval()

    with no_module_walks(model, optimizer):
        assert model[0].training
        model.eval()
        assert not model[0].training
        model.train()
        assert model[0].training


def test_gradients_are_cleared() -> None:
    model, optimizer = small_model()
    model(torch.ones(1, 2)).sum().backward()

    with no_module_walks(model, optimizer):
        model.zero_grad()

    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_of_a_copy_is_its_own() -> None:
    model, optimizer = small_model()

    with no_module_walks(model, optimizer):
        copied = copy.deepcopy(model)
        copied.eval()
        assert model[0].training
        assert not copied[0].training


def test_after_an_error_the_model_has_its_own_methods_again() -> None:
    model, optimizer = small_model()

    with pytest.raises(RuntimeError), no_module_walks(model, optimizer):
        raise RuntimeError

    model[0].eval()
    model.train()  # visits the submodule again, although the model itself is in training mode
    assert model[0].training


def test_a_run_visits_the_modules_once_an_epoch(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_visits = 0

    def count_visit(module: nn.Module, mode: bool = True) -> nn.Module:
        nonlocal num_visits
        num_visits += mode
        return nn.Module.train(module, mode)

    # The model has one embedding of tokens, which is visited whenever the mode of all modules is set.
    monkeypatch.setattr(nn.Embedding, "train", count_visit, raising=False)
    run(tmp_path, **{**finished, "output_dir": str(tmp_path / "out"), "max_steps": 6, "num_train_epochs": None})
    num_visits_of_six_steps = num_visits

    num_visits = 0
    run(tmp_path, **{**finished, "output_dir": str(tmp_path / "shorter"), "max_steps": 2, "num_train_epochs": None})
    assert num_visits_of_six_steps == num_visits
