"""A release folder without faults, and every fault that is planted in it, found."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import TOKEN, find_faults, find_model_faults
from hub_cards.weights import read_weights
from plants import CONFIG, Plant, append_text, change_weights, delete_file, set_fields, split_weights, write_file


README = "README.md"
MODELING = "modeling_normllava.py"
NORM = "model.multi_modal_projector.norm"
VISION = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
SECRET = "hf_" + "a" * 34
OTHER_CODE = "you/repo--modeling.Class"
HOME = str(Path.home())


def link(folder: Path) -> None:
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def without_a_shard(folder: Path) -> None:
    split_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def fill(name: str, value: float) -> Plant:
    return change_weights(lambda weights: weights[name].view(-1)[:1].fill_(value))


# What is planted, and what the fault says.
FAULTS: dict[str, tuple[Plant, str]] = {
    "no card": (delete_file(README), "README.md: is missing"),
    "an earlier version's": (delete_file("release.json"), "no release.json: it is no release, or an earlier version"),
    "token": (append_text(README, f"\n{SECRET}\n"), "README.md: holds a Hugging Face token"),
    "path in a config": (
        set_fields(CONFIG, note=f"{HOME}/run"),
        f"config.json: holds a path of your home folder, {HOME}/",
    ),
    "pickle": (write_file("training_args.bin", b"x"), "training_args.bin: is not on the list"),
    "symlink": (link, "images/example9.png: is a symlink"),
    "a shard lost": (without_a_shard, "model-00002-of-00002.safetensors: the folder's weight files are not those of"),
    "no head": (change_weights(lambda w: w.pop("lm_head.weight")), "lm_head.weight"),
    "another shape": (change_weights(lambda w: w.update({VISION: w[VISION].T.contiguous()})), VISION),
    "no norm in the config": (set_fields(CONFIG, projector_norm="none"), f"unexpected_keys .*{NORM}"),
    "NaN": (fill(VISION, float("nan")), f"{VISION}: NaN or infinite values"),
    "no tokenizer": (delete_file("tokenizer.json"), "tokenizer.json: missing"),
    "not JSON": (write_file("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    "a config's field": (
        set_fields(CONFIG, projector_norm_eps="small"),
        "config.json can't be read: .*projector_norm_eps",
    ),
    "another class file": (append_text(MODELING, "\n"), "modeling_normllava.py: is not this version's file"),
    "another repository's class": (
        set_fields(CONFIG, auto_map__AutoModel=OTHER_CODE),
        "config.json: its auto_map is not",
    ),
    "code of a part": (
        set_fields(CONFIG, text_config__auto_map={"A": OTHER_CODE}),
        'config.json: holds an "auto_map"',
    ),
    "code of a tokenizer": (
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
    assert any(re.search(message, found) for found in faults), faults


def test_a_release_has_no_faults(release: Path) -> None:
    assert find_faults(release) == []


def test_a_build_says_all_faults_and_leaves_nothing(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "evaluation.json").unlink()  # of other weights
    planted = ("no head", "NaN")
    for fault in planted:
        plant, _ = FAULTS[fault]
        plant(run)
    options = BuildOptions(repo_id="me/Mine", prose=prose, license="apache-2.0")
    with pytest.raises(ValueError, match="run can't be published") as refused:
        build_release(run, tmp_path / "release", options)

    for fault in planted:
        _, message = FAULTS[fault]
        assert re.search(message, str(refused.value))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("vision", "text"), [("siglip2", "llama"), ("clip", "qwen3"), ("siglip", "gemma3")])
def test_every_family_as_composed_has_no_faults(vision: str, text: str, composed: Callable[..., Path]) -> None:
    folder = composed(vision=vision, text=text)
    assert find_model_faults(folder, read_weights(folder)) == []


def test_what_is_no_token() -> None:
    assert TOKEN.search(SECRET)
    assert not TOKEN.search("hf_hub_download")
