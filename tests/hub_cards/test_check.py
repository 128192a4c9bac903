"""The check finds every fault that a test makes in a release folder, and finds none in a folder without faults."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import TOKEN_PATTERN, find_faults, find_model_faults
from hub_cards.model_folder import ModelFolder
from plants import (
    CONFIG,
    FolderChange,
    append_text,
    change_weights,
    delete_file,
    set_fields,
    split_weights,
    write_file,
)


README = "README.md"
MODELING = "modeling_normllava.py"
# The prefix of the names of the norm layer's tensors.
NORM_PREFIX = "model.multi_modal_projector.norm"
# The name of a tensor of the vision encoder.
VISION_TENSOR = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
# A text in the form of a user's token of the Hub.
SECRET = "hf_" + "a" * 34
# An entry of an `auto_map` that names a class in another repository.
OTHER_CODE = "you/repo--modeling.Class"
HOME = str(Path.home())


def add_symlink(folder: Path) -> None:
    """Add a symbolic link with the name of a file that may be published."""
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def lose_shard(folder: Path) -> None:
    """Split the weights into two files, and delete the second."""
    split_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def set_first_value(name: str, value: float) -> FolderChange:
    """Set the first value of a tensor."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].view(-1)[0] = value

    return change_weights(change)


def transpose_tensor(name: str) -> FolderChange:
    """Transpose a matrix, which changes its shape."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = weights[name].T.contiguous()

    return change_weights(change)


# By the fault's name: the change that makes the fault, and a pattern for the message about the fault.
FAULTS: dict[str, tuple[FolderChange, str]] = {
    "no card": (delete_file(README), "README.md: is missing"),
    "a folder that is no release": (
        delete_file("release.json"),
        "holds no release.json, so it is no release",
    ),
    "a token": (append_text(README, f"\n{SECRET}\n"), "README.md: holds a Hugging Face token"),
    "a token in the handler": (append_text("handler.py", f"\n# {SECRET}\n"), "handler.py: holds a Hugging Face token"),
    "an edited handler": (append_text("handler.py", "\n"), "handler.py: is not this version's file"),
    "no pixels.py": (delete_file("pixels.py"), "pixels.py: is not this version's file"),
    "a path in a config": (
        set_fields(CONFIG, note=f"{HOME}/run"),
        rf"config.json: holds a path of your home folder, {re.escape(HOME)}/",
    ),
    "a pickle": (write_file("training_args.bin", b"x"), "training_args.bin: is not on the list"),
    "a symlink": (add_symlink, "images/example9.png: is a symlink"),
    "a shard lost": (lose_shard, "model-00002-of-00002.safetensors: the folder's weight files are not those of"),
    "no lm_head": (
        change_weights(lambda weights: weights.pop("lm_head.weight")),
        "The model can't be loaded: .*lm_head.weight",
    ),
    "another shape": (transpose_tensor(VISION_TENSOR), f"mismatched_keys .*{VISION_TENSOR}"),
    "no norm in the config": (set_fields(CONFIG, projector_norm="none"), f"unexpected_keys .*{NORM_PREFIX}"),
    "NaN": (set_first_value(VISION_TENSOR, float("nan")), f"{VISION_TENSOR}: NaN or infinite values"),
    "no tokenizer": (delete_file("tokenizer.json"), "tokenizer.json: missing"),
    "invalid JSON": (write_file("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    "a field of another type in the config": (
        set_fields(CONFIG, projector_norm_eps="small"),
        "config.json can't be read: .*projector_norm_eps",
    ),
    "a changed class file": (append_text(MODELING, "\n"), "modeling_normllava.py: is not this version's file"),
    # `auto_map__AutoModel` is the field `AutoModel` inside of the field `auto_map`.
    "another repository's class": (
        set_fields(CONFIG, auto_map__AutoModel=OTHER_CODE),
        "config.json: its auto_map is not",
    ),
    "another repository's code in the config of the language model": (
        set_fields(CONFIG, text_config__auto_map={"A": OTHER_CODE}),
        'config.json: holds an "auto_map"',
    ),
    "another repository's code in the tokenizer's config": (
        set_fields("tokenizer_config.json", auto_map={"A": OTHER_CODE}),
        'tokenizer_config.json: holds an "auto_map"',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, release: Path, tmp_path: Path) -> None:
    make_fault, pattern = FAULTS[fault]
    folder = shutil.copytree(release, tmp_path / "release")
    make_fault(folder)

    messages = find_faults(folder)
    assert any(re.search(pattern, message) for message in messages), messages


def test_a_release_has_no_faults(release: Path) -> None:
    assert find_faults(release) == []


def test_urls_are_no_paths_of_the_home_folder(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without a user, the home folder is "/"."""
    assert "https://" in (release / README).read_text()
    monkeypatch.setenv("HOME", "/")
    assert find_faults(release) == []


def test_a_build_lists_all_faults_and_leaves_no_folder(trained_run: Path, prose: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    planted_faults = ("no lm_head", "NaN")
    for fault in planted_faults:
        make_fault, _ = FAULTS[fault]
        make_fault(run)
    (run / "evaluation.json").unlink()  # a build refuses results that were measured with other weights

    options = BuildOptions(repo_id="me/Mine", prose=prose, license="apache-2.0")
    with pytest.raises(ValueError, match="run can't be published") as refused:
        build_release(run, tmp_path / "release", options)

    for fault in planted_faults:
        _, pattern = FAULTS[fault]
        assert re.search(pattern, str(refused.value))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no release folder, whole or partial


@pytest.mark.parametrize(("vision", "text"), [("siglip2", "llama"), ("clip", "qwen3"), ("siglip", "gemma3")])
def test_composed_models_of_other_families_have_no_faults(
    vision: str, text: str, make_model_folder: Callable[..., Path]
) -> None:
    folder = make_model_folder(vision=vision, text=text)
    assert find_model_faults(ModelFolder(folder)) == []


def test_a_name_that_begins_like_a_token_is_no_token() -> None:
    assert TOKEN_PATTERN.search(SECRET)
    assert not TOKEN_PATTERN.search("hf_hub_download")
