"""The release and the card of a model with key adapters."""

import shutil
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
def adapted_run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which key adapters were trained. Treat it as read-only."""
    run = tmp_path_factory.mktemp("adapted") / "adapt"
    shutil.copytree(trained_run, run)
    torch.manual_seed(0)
    model = NormLlavaForConditionalGeneration.from_pretrained(trained_run)
    model = add_key_adapters(model, RANK, alpha=32, dropout=0.05)

    # The matrices `up` of new adapters are zero. Training would change them.
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.up.data.normal_()
    model.save_pretrained(run)
    (run / "evaluation.json").unlink()  # the results in this file were measured without the adapters
    set_fields("run.json", arguments={"stage": "adapt", "key_mmd_weight": 0.1, "key_gram_weight": 0.0})(run)
    return run


def test_the_card_shows_the_key_adapters_of_the_config_and_the_weights(
    adapted_run: Path, prose: Path, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    options = BuildOptions(repo_id="me/Tiny-NormLlava", prose=prose, license="apache-2.0")
    build_release(adapted_run, release, options)
    assert find_faults(release) == []

    card = (release / "README.md").read_text()
    assert "The decoder's keys have adapters of rank 4, one for image and one for text tokens (MaLoRA-style" in card
    assert "| `key_mmd_weight` | 0.1 |" in card

    num_weights = 0
    num_adapter_weights = 0
    model = NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(adapted_run)
    for name, parameter in model.named_parameters():
        num_weights += parameter.numel()
        if ".key_adapter." in name:
            num_adapter_weights += parameter.numel()
    assert f"{num_weights:,} weights" in card
    assert f"| key adapters in it | new in this model | {num_adapter_weights:,} |" in card


def test_training_before_the_adapters_were_added_is_recorded(
    trained_run: Path, adapted_run: Path, tmp_path: Path
) -> None:
    # `training/add_key_adapters.py` makes the folder `with_adapters` from the model of `trained_run`.
    with_adapters = tmp_path / "with_adapters"
    arguments = ["--model", str(trained_run), "--rank", str(RANK), "--output_dir", str(with_adapters)]
    run_add_key_adapters(arguments)

    # The run starts from that folder.
    run = shutil.copytree(adapted_run, tmp_path / "run")
    set_fields("run.json", arguments={"stage": "adapt", "model_name_or_path": str(with_adapters)})(run)

    facts = collect_facts(run)
    assert [stage.name for stage in facts.stages] == ["instruct", "adapt"]
