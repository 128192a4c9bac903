"""What vLLM's Transformers backend asks of a released folder's class and processor, and, slow, what it answers.

Sources: transformers' page "Transformers as modeling backend", and vLLM's
`vllm/model_executor/models/transformers/multimodal.py` at 03e3bc8c1e9c and `base.py` of 0.32.0.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

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
    built = NormLlavaForConditionalGeneration.from_pretrained(composed())
    if rank:
        built = add_key_adapters(built, rank, 32, 0.05)
    built.save_pretrained(tmp_path)
    # As vLLM 0.32's `Base.__init__` does: its attention is registered and named in the text config before it builds.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", lambda *args, **kwargs: None)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config.get_text_config()._attn_implementation = "vllm"
    refusal = pytest.raises(ValueError, match=r"vLLM can't run key adapters.*Serve with transformers")
    with refusal if rank else nullcontext(), torch.device("meta"):
        AutoModel.from_config(config=config, dtype=torch.float32, trust_remote_code=True)


@pytest.fixture(scope="module")
def model_of_wide_heads(backbones: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 64, since vLLM's CPU attention takes no 8; beside it vLLM's environment is made."""
    make = ["make", ".venv-vllm/installed", f"PYTHON={sys.executable}"]
    installed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert installed.returncode == 0, f"vLLM's environment could not be made:\n{installed.stderr[-3000:]}"
    folder = tmp_path_factory.mktemp("wide")
    set_seed(0)
    config = AutoConfig.from_pretrained(backbones("qwen2"), head_dim=64)
    for part in AutoModelForCausalLM.from_config(config), AutoTokenizer.from_pretrained(backbones("qwen2")):
        part.save_pretrained(folder / "text")
    for part in compose(str(backbones("siglip")), str(folder / "text")):
        part.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of which five minutes, once, are the environment's
def test_vllm_answers_as_transformers_does(model_of_wide_heads: Path, tmp_path: Path) -> None:
    # Isolated, and with an empty cache of class files: what the folder holds is all there is.
    command = [ROOT / ".venv-vllm/bin/python", "-I", Path(__file__).with_name("vllm_answers.py"), model_of_wide_heads]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    ran = subprocess.run([*command, tmp_path / "answers.json"], **options)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    errors = []
    for given, expected in zip(answers["vllm"], answers["transformers"], strict=True):
        assert len(given["tokens"]) == 8
        assert given["tokens"] == expected["tokens"]
        pairs = zip(given["log_probabilities"], expected["log_probabilities"], strict=True)
        errors.append(max(abs(ours - theirs) for ours, theirs in pairs))
    # vLLM's attention rounds to bfloat16 where the processor has it. A picture must cost no more than text does.
    with_picture, text = errors
    assert text < 0.01
    assert with_picture < 2 * text + 1e-5
