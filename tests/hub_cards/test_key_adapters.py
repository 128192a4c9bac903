"""The release and the card of a model with key adapters."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import find_faults
from hub_cards.facts import collect_facts
from modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaKeyAdapterForConditionalGeneration
from plants import set_fields
from training.add_key_adapters import add_key_adapters
from training.add_key_adapters import main as run_add_key_adapters


RANK = 4


@pytest.fixture(scope="module")
def adapted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose model has key adapters with other values than at their start, as after training."""
    run = tmp_path_factory.mktemp("adapted") / "adapt"
    shutil.copytree(trained, run)
    torch.manual_seed(0)
    model = NormLlavaForConditionalGeneration.from_pretrained(trained)
    model = add_key_adapters(model, RANK, 32, 0.05)
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.up.data.normal_()
    model.save_pretrained(run)
    (run / "evaluation.json").unlink()  # its results were measured without the adapters
    set_fields("run.json", arguments={"stage": "adapt", "key_mmd_weight": 0.1, "key_gram_weight": 0.0})(run)
    return run


def test_the_card_says_what_the_config_and_the_weights_say(adapted: Path, prose: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    options = BuildOptions(repo_id="me/Tiny-NormLlava", prose=prose, license="apache-2.0")
    build_release(adapted, release, options)
    assert find_faults(release) == []

    card = (release / "README.md").read_text()
    assert "The decoder's keys have adapters of rank 4, one for image and one for text tokens (MaLoRA-style" in card

    model = NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(adapted)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"{total:,} weights" in card
    adapter_parameters = [parameter for name, parameter in model.named_parameters() if ".key_adapter." in name]
    num_adapter_weights = sum(parameter.numel() for parameter in adapter_parameters)
    assert f"| key adapters in it | new in this model | {num_adapter_weights:,} |" in card
    assert "| `key_mmd_weight` | 0.1 |" in card


def test_training_before_the_adapters_were_added_is_recorded(
    trained: Path, adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(adapted, tmp_path / "run")
    with_adapters = tmp_path / "with_adapters"
    arguments = ["--model", str(trained), "--rank", str(RANK), "--output_dir", str(with_adapters)]
    monkeypatch.setattr(sys, "argv", ["add_key_adapters", *arguments])
    run_add_key_adapters()
    set_fields("run.json", arguments={"stage": "adapt", "model_name_or_path": str(with_adapters)})(run)

    facts = collect_facts(run)
    assert [stage.name for stage in facts.stages] == ["instruct", "adapt"]
