"""Errors in loading a model name the model's folder, unless they are bugs of ours."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from normllava.errors import UserError, errors_named_after
from training.folders.loading import load_base, load_config
from training.options.arguments import RunArguments, TrainingConfig


def test_an_error_names_the_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"^{tmp_path} can't be loaded: .*model_type"):
        load_config(str(tmp_path))


def test_an_error_names_the_model_that_lacks_weights(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_args = RunArguments(model_name_or_path=str(folder), dataset_name="", stage="align")
    args = TrainingConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False)
    with pytest.raises(UserError, match=f"^{folder} can't be loaded: .*lm_head.weight"):
        load_base(run_args, args)


def test_a_key_error_does_not_become_a_user_error() -> None:
    """A command prints the traceback of a KeyError, which shows a bug, but only the message of a UserError."""
    with pytest.raises(KeyError), errors_named_after("model"):
        {}["a bug"]
