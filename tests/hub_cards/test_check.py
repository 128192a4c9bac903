"""Every fault that is planted in a release folder is found, and a folder without faults has none."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import TOKEN_PATTERN, find_faults, find_model_faults
from hub_cards.weights import read_weights
from plants import CONFIG, Plant, append_text, change_weights, delete_file, set_fields, split_weights, write_file


README = "README.md"
MODELING = "modeling_normllava.py"
NORM = "model.multi_modal_projector.norm"
VISION = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
SECRET = "hf_" + "a" * 34
OTHER_CODE = "you/repo--modeling.Class"
HOME = str(Path.home())


def add_symlink(folder: Path) -> None:
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def lose_shard(folder: Path) -> None:
    split_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def set_first_value(name: str, value: float) -> Plant:
    """Set the first value of a tensor."""
    return change_weights(lambda weights: weights[name].view(-1)[:1].fill_(value))


def transpose(name: str) -> Plant:
    """Transpose a matrix, which changes its shape."""
    return change_weights(lambda weights: weights.update({name: weights[name].T.contiguous()}))


# By the fault's name: the change that makes the fault, and a pattern of the message about it.
FAULTS: dict[str, tuple[Plant, str]] = {
    "no card": (delete_file(README), "README.md: is missing"),
    "an earlier version's folder": (
        delete_file("release.json"),
        "no release.json: it is no release, or an earlier version",
    ),
    "a token": (append_text(README, f"\n{SECRET}\n"), "README.md: holds a Hugging Face token"),
    "a path in a config": (
        set_fields(CONFIG, note=f"{HOME}/run"),
        f"config.json: holds a path of your home folder, {HOME}/",
    ),
    "a pickle": (write_file("training_args.bin", b"x"), "training_args.bin: is not on the list"),
    "a symlink": (add_symlink, "images/example9.png: is a symlink"),
    "a shard lost": (lose_shard, "model-00002-of-00002.safetensors: the folder's weight files are not those of"),
    "no head": (change_weights(lambda weights: weights.pop("lm_head.weight")), "lm_head.weight"),
    "another shape": (transpose(VISION), VISION),
    "no norm in the config": (set_fields(CONFIG, projector_norm="none"), f"unexpected_keys .*{NORM}"),
    "NaN": (set_first_value(VISION, float("nan")), f"{VISION}: NaN or infinite values"),
    "no tokenizer": (delete_file("tokenizer.json"), "tokenizer.json: missing"),
    "invalid JSON": (write_file("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    "a config's field of another type": (
        set_fields(CONFIG, projector_norm_eps="small"),
        "config.json can't be read: .*projector_norm_eps",
    ),
    "another class file": (append_text(MODELING, "\n"), "modeling_normllava.py: is not this version's file"),
    "another repository's class": (
        set_fields(CONFIG, auto_map__AutoModel=OTHER_CODE),
        "config.json: its auto_map is not",
    ),
    "another repository's code in a part's config": (
        set_fields(CONFIG, text_config__auto_map={"A": OTHER_CODE}),
        'config.json: holds an "auto_map"',
    ),
    "another repository's code in the tokenizer's config": (
        set_fields("tokenizer_config.json", auto_map={"A": OTHER_CODE}),
        'json: holds an "auto_map"',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, release: Path, tmp_path: Path) -> None:
    plant, message = FAULTS[fault]
    folder = shutil.copytree(release, tmp_path / "release")
    plant(folder)

    faults = find_faults(folder)
    assert any(re.search(message, fault) for fault in faults), faults


def test_a_release_has_no_faults(release: Path) -> None:
    assert find_faults(release) == []


def test_a_build_lists_all_faults_and_leaves_no_folder(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    planted_faults = ("no head", "NaN")
    for fault in planted_faults:
        plant, _ = FAULTS[fault]
        plant(run)
    (run / "evaluation.json").unlink()  # its results were measured with the weights before

    options = BuildOptions(repo_id="me/Mine", prose=prose, license="apache-2.0")
    with pytest.raises(ValueError, match="run can't be published") as refused:
        build_release(run, tmp_path / "release", options)

    for fault in planted_faults:
        _, message = FAULTS[fault]
        assert re.search(message, str(refused.value))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("vision", "text"), [("siglip2", "llama"), ("clip", "qwen3"), ("siglip", "gemma3")])
def test_every_family_as_composed_has_no_faults(vision: str, text: str, composed: Callable[..., Path]) -> None:
    folder = composed(vision=vision, text=text)
    assert find_model_faults(folder, read_weights(folder)) == []


def test_a_token_is_told_from_a_name_that_begins_like_one() -> None:
    assert TOKEN_PATTERN.search(SECRET)
    assert not TOKEN_PATTERN.search("hf_hub_download")
