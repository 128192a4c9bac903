"""Training steps don't visit every module of the model, but modes still change and gradients are still cleared."""

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
        assert model[0].training  # `no_module_walks` begins with training mode
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


def count_visits(fields: dict[str, Any], num_steps: int, output_dir: Path) -> int:
    """How often the modes of the model's embedding layers are set in a run of `num_steps` steps.

    A walk that sets the modes of all modules visits these layers too.

    Args:
        fields: The recipe fields of a run.
        num_steps: Number of steps, less than an epoch has.
        output_dir: The run's folder.
    """
    visits = []

    def record_and_set_mode(embedding: nn.Embedding, mode: bool = True) -> nn.Module:
        visits.append(mode)
        return nn.Module.train(embedding, mode)

    output_dir.mkdir()
    fields = {**fields, "output_dir": str(output_dir), "max_steps": num_steps}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "train", record_and_set_mode)
        run(output_dir, **fields)
    return len(visits)


def test_more_steps_of_an_epoch_visit_the_modules_no_more_often(
    finished_fields: dict[str, Any], tmp_path: Path
) -> None:
    visits_of_two_steps = count_visits(finished_fields, num_steps=2, output_dir=tmp_path / "two")
    visits_of_six_steps = count_visits(finished_fields, num_steps=6, output_dir=tmp_path / "six")
    assert visits_of_two_steps > 0
    assert visits_of_six_steps == visits_of_two_steps
