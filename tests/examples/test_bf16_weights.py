"""The ablation's arm with weights in bfloat16, launched as the ablation launches it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, NORM, ROOT, moved


@pytest.fixture
def data(picture: Image.Image, tmp_path: Path) -> Path:
    """LLaVA JSON of 12 rows about one picture."""
    picture.save(tmp_path / "picture.png")
    answers = [[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"{number}"}] for number in range(12)]
    (tmp_path / "data.json").write_text(json.dumps([{"image": "picture.png", "conversations": a} for a in answers]))
    return tmp_path / "data.json"


def train(script: str, folder: Path, **fields: object) -> subprocess.CompletedProcess[str]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**FAST, "stage": "align", **fields}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", script, "--config", str(recipe)]
    return subprocess.run(launch, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("script", "moves"), [("training/sft.py", True), ("examples/digits/bf16_weights.py", False)], ids=str
)
def test_weights_in_bfloat16_lose_what_float32_keeps(
    composed: Callable[..., Path], data: Path, tmp_path: Path, script: str, moves: bool
) -> None:
    """A gain of 1 moves in steps of 0.004 or more in bfloat16, so updates of 1e-3 leave it where it is."""
    start, out = tmp_path / "gain1", tmp_path / "out"
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(projector_norm="layernorm"))
    torch.nn.init.ones_(model.model.multi_modal_projector.norm.weight)
    model.save_pretrained(start)
    AutoProcessor.from_pretrained(composed()).save_pretrained(start)
    result = train(script, tmp_path, model_name_or_path=str(start), dataset_name=str(data), output_dir=str(out))
    assert result.returncode == 0, result.stderr
    gain = load_file(out / "model.safetensors")[f"{NORM}.weight"]
    assert torch.equal(gain, torch.ones_like(gain)) != moves
    assert moved(start, out) - {f"{NORM}.weight"}  # the rest is trained either way


def test_mixed_precision_is_refused(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    fields = {"model_name_or_path": str(composed()), "dataset_name": str(data), "output_dir": str(tmp_path / "out")}
    result = train("examples/digits/bf16_weights.py", tmp_path, **fields, bf16=True)
    assert result.returncode != 0
    assert "With weights in bfloat16 set bf16: false" in result.stderr
