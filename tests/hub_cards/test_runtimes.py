"""Releases with a norm, key adapters or merged patches answer a stranger as the run's model does.

A stranger has transformers, but not this project.

`test_plain.py` and `test_tiles.py` show the same for plain Llavas and for models with tiles.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import find_faults
from strangers import ask_as_stranger, ask_here


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"projector_norm": "gwc"}, id="norm"),
        pytest.param({"key_adapter_rank": 4}, id="key adapters"),
        pytest.param({"spatial_merge_size": 2}, id="merged patches"),
    ],
)
def test_a_release_answers_as_the_run(
    options: dict[str, Any], make_model_folder: Callable[..., Path], prose: Path, picture: Image.Image, tmp_path: Path
) -> None:
    run = make_model_folder(**options)
    release = tmp_path / "release"
    build_release(run, release, BuildOptions(repo_id="me/Mine", prose=prose, license="apache-2.0"))
    assert find_faults(release) == []

    # A stranger asks the model's class, the pipeline and the endpoint's handler.
    model = AutoModelForImageTextToText.from_pretrained(run).eval()
    expected_logits, expected_answer = ask_here(model, AutoProcessor.from_pretrained(run), picture)
    answers = ask_as_stranger(release, picture, tmp_path, trusts_code=True)
    assert torch.equal(answers["logits"], expected_logits)
    assert answers["pipeline"] == answers["handler"] == expected_answer
