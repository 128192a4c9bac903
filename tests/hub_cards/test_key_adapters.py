"""A model with key adapters: what its card says, what is found in it, and that all but vLLM answers with it."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import find_faults
from hub_cards.facts import collect_facts
from modeling_normllava import NormLlavaForConditionalGeneration
from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration as Adapted
from plants import set_fields
from training.add_key_adapters import add_key_adapters, main


RANK = 4


@pytest.fixture(scope="module")
def adapted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose model has key adapters that were trained."""
    run = tmp_path_factory.mktemp("adapted") / "adapt"
    shutil.copytree(trained, run)
    torch.manual_seed(0)
    model = add_key_adapters(NormLlavaForConditionalGeneration.from_pretrained(trained), RANK, 32, 0.05)
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.up.data.normal_()
    model.save_pretrained(run)
    (run / "evaluation.json").unlink()  # of the model before
    set_fields("run.json", arguments={"stage": "adapt", "key_mmd_weight": 0.1, "key_gram_weight": 0.0})(run)
    return run


def test_the_card_says_what_the_config_and_the_weights_say(adapted: Path, prose: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    options = BuildOptions(repo_id="me/Tiny-NormLlava", prose=prose, license="apache-2.0")
    build_release(adapted, release, options)
    assert find_faults(release) == []
    card = (release / "README.md").read_text()
    assert "The decoder's keys have adapters of rank 4, one for image and one for text tokens (MaLoRA-style" in card
    sizes = {name: parameter.numel() for name, parameter in Adapted.from_pretrained(adapted).named_parameters()}
    assert f"{sum(sizes.values()):,} weights" in card
    adapters = sum(size for name, size in sizes.items() if ".key_adapter." in name)
    assert f"| key adapters in it | new in this model | {adapters:,} |" in card
    assert "| `key_mmd_weight` | 0.1 |" in card


def test_training_before_the_adapters_were_added_is_recorded(
    trained: Path, adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(adapted, tmp_path / "run")
    keys = tmp_path / "keys"
    arguments = ["--model", trained, "--rank", RANK, "--output_dir", keys]
    monkeypatch.setattr(sys, "argv", ["add_key_adapters", *map(str, arguments)])
    main()
    set_fields("run.json", arguments={"stage": "adapt", "model_name_or_path": str(keys)})(run)
    facts = collect_facts(run)
    assert [stage.stage for stage in facts.stages] == ["instruct", "adapt"]
