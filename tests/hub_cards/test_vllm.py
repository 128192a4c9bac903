"""vLLM's Transformers backend refuses key adapters; on other models it answers as transformers does (a slow test).

Sources: transformers' page "Transformers as modeling backend", and vLLM's
`vllm/model_executor/models/transformers/multimodal.py` at 03e3bc8c1e9c and `base.py` of 0.32.0.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_normllava import NormLlavaForConditionalGeneration
from training.add_key_adapters import add_key_adapters
from training.compose import compose


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rank", [0, 4])
def test_key_adapters_are_refused_where_vllm_builds_the_model(
    rank: int, composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed())
    if rank > 0:
        model = add_key_adapters(model, rank, 32, 0.05)
    model.save_pretrained(tmp_path)

    # vLLM 0.32's `Base.__init__` registers its attention and names it in the text config, then builds the model.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", lambda *args, **kwargs: None)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config.get_text_config()._attn_implementation = "vllm"
    expectation: AbstractContextManager[Any] = nullcontext()
    if rank > 0:
        expectation = pytest.raises(ValueError, match=r"vLLM can't run key adapters.*Serve with transformers")
    with expectation, torch.device("meta"):
        AutoModel.from_config(config=config, dtype=torch.float32, trust_remote_code=True)


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """The Python of vLLM's own environment, which is installed first if it is missing."""
    make = ["make", ".venv-vllm/installed", f"PYTHON={sys.executable}"]
    completed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, f"vLLM's environment could not be made:\n{completed.stderr[-3000:]}"
    return ROOT / ".venv-vllm/bin/python"


@pytest.fixture(scope="module")
def model_with_wide_heads(backbones: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention heads have width 64. vLLM's attention on a CPU can't do the tests' usual 8."""
    folder = tmp_path_factory.mktemp("wide")
    set_seed(0)
    config = AutoConfig.from_pretrained(backbones("qwen2"), head_dim=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(folder / "text")

    model, processor = compose(str(backbones("siglip")), str(folder / "text"))
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing vLLM's environment takes five minutes
def test_vllm_answers_as_transformers_does(vllm_python: Path, model_with_wide_heads: Path, tmp_path: Path) -> None:
    # -I and an empty cache of class files make sure that only the folder's own class files are used.
    script = Path(__file__).with_name("vllm_answers.py")
    command = [vllm_python, "-I", script, model_with_wide_heads, tmp_path / "answers.json"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-5000:]

    answers = json.loads((tmp_path / "answers.json").read_text())
    largest_differences = []
    for vllm_answer, transformers_answer in zip(answers["vllm"], answers["transformers"], strict=True):
        assert len(vllm_answer["tokens"]) == 8
        assert vllm_answer["tokens"] == transformers_answer["tokens"]
        differences = np.subtract(vllm_answer["log_probabilities"], transformers_answer["log_probabilities"])
        largest_differences.append(np.abs(differences).max())

    # vLLM's attention rounds to bfloat16 on CPUs that multiply it. A question with a picture must not differ more than
    # the rounding explains, which the question without a picture shows.
    with_picture, without_picture = largest_differences
    assert without_picture < 0.01
    assert with_picture < 2 * without_picture + 1e-5
