"""vLLM refuses a model with key adapters, and answers as transformers does for other models.

vLLM runs a plain Llava with its own class, and other models with its Transformers backend. Sources: transformers' page
"Transformers as modeling backend", and vLLM's `vllm/model_executor/models/transformers/multimodal.py` at the commit
03e3bc8c1e9c and `base.py` of version 0.32.0.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hub_cards.build import BuildOptions, build_release
from modeling_normllava import NormLlavaForConditionalGeneration
from training.add_key_adapters import add_key_adapters
from training.compose import compose


ROOT = Path(__file__).parents[2]
# Seconds for a test that may install vLLM's environment first, which takes five to fifteen minutes.
TIMEOUT = 1800


def build_as_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build a folder's model without weights, as vLLM does.

    `Base.__init__` of vLLM 0.32 registers vLLM's attention and names it in the text config, then builds the model.
    """
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", lambda *args, **kwargs: None)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.get_text_config()._attn_implementation = "vllm"
    with torch.device("meta"):
        AutoModel.from_config(config=config, dtype=torch.float32, trust_remote_code=True)


def test_a_model_with_key_adapters_is_refused_when_vllm_builds_it(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    model = add_key_adapters(model, rank=4, alpha=32, dropout=0.05)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"vLLM can't run key adapters.*Serve with transformers"):
        build_as_vllm(tmp_path, monkeypatch)


def test_a_model_without_key_adapters_is_built_by_vllm(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    model.save_pretrained(tmp_path)
    build_as_vllm(tmp_path, monkeypatch)  # raises no error


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """The Python of an environment with vLLM. The environment is installed first if it is missing."""
    make = ["make", ".venv-vllm/installed", f"PYTHON={sys.executable}"]
    completed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, f"vLLM's environment could not be made:\n{completed.stderr[-3000:]}"
    return ROOT / ".venv-vllm/bin/python"


@pytest.fixture(scope="module")
def wide_text_model(backbones: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose attention heads have width 64. On a CPU, vLLM can't do width 8, which other tests use.

    vLLM's own Qwen2 doesn't read `head_dim`. It divides `hidden_size` by the number of heads: 64 here, too.
    """
    folder = tmp_path_factory.mktemp("wide") / "text"
    set_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = AutoConfig.from_pretrained(backbones("qwen2"), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(folder)
    return folder


def compose_wide(backbones: Callable[[str], Path], wide_text_model: Path, folder: Path, **options: Any) -> Path:
    """Compose a model with wide heads, with these options of `compose`, and save it into a folder."""
    model, processor = compose(str(backbones("siglip")), str(wide_text_model), **options)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def compare_answers(vllm_python: Path, folder: Path, implementation: str, scratch: Path) -> None:
    """Ask vLLM and transformers a question with a picture and a question without, and compare their answers.

    Args:
        vllm_python: The Python of vLLM's environment.
        folder: The folder of the model.
        implementation: vLLM's `model_impl`, as for `vllm_answers.py`.
        scratch: A folder for the answers and vLLM's cache.
    """
    # -I hides this repository's modules from Python, and a new HF_HOME has no cached class files. So only the folder's
    # class files can be used.
    script = Path(__file__).with_name("vllm_answers.py")
    command = [vllm_python, "-I", script, folder, scratch / "answers.json", implementation]
    environment = {
        **os.environ,
        "HF_HOME": str(scratch / "home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    completed = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-5000:]

    answers = json.loads((scratch / "answers.json").read_text())
    largest_differences = []
    for vllm_answer, transformers_answer in zip(answers["vllm"], answers["transformers"], strict=True):
        assert len(vllm_answer["tokens"]) == 8  # `NUM_TOKENS` of the script
        assert vllm_answer["tokens"] == transformers_answer["tokens"]
        differences = np.subtract(vllm_answer["log_probabilities"], transformers_answer["log_probabilities"])
        largest_differences.append(np.abs(differences).max())

    # On a CPU that can multiply bfloat16, vLLM's attention rounds to bfloat16. The question without a picture shows by
    # how much. A picture may double the difference. 1e-5 allows for a CPU that doesn't round.
    picture_difference, text_difference = largest_differences
    assert text_difference < 0.01
    assert picture_difference < 2 * text_difference + 1e-5


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"projector_norm": "gwc"}, id="norm"),
        pytest.param({"spatial_merge_size": 2}, id="merged patches"),
        pytest.param(
            {"max_tiles": 4},
            id="tiles",
            marks=pytest.mark.xfail(strict=True, reason="vLLM takes each tile for a picture of its own, and stops"),
        ),
    ],
)
def test_vllms_transformers_backend_answers_as_transformers_does(
    options: dict[str, Any],
    vllm_python: Path,
    backbones: Callable[[str], Path],
    wide_text_model: Path,
    tmp_path: Path,
) -> None:
    folder = compose_wide(backbones, wide_text_model, tmp_path / "model", **options)
    compare_answers(vllm_python, folder, "transformers", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_vllms_own_llava_answers_as_transformers_does(
    vllm_python: Path, backbones: Callable[[str], Path], wide_text_model: Path, prose: Path, tmp_path: Path
) -> None:
    run = compose_wide(backbones, wide_text_model, tmp_path / "run", projector_norm="none")
    release = tmp_path / "release"
    build_release(run, release, BuildOptions(repo_id="me/Plain", prose=prose, license="apache-2.0"))
    compare_answers(vllm_python, release, "vllm", tmp_path)
