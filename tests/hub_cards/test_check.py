"""A stage folder without findings, and every fault that is planted in it, found."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hub_cards.build import build
from hub_cards.check import MACHINE_PATH, TOKEN, check, find_model_faults
from hub_cards.weights import read_weights
from plants import CONFIG, Plant, append, delete, put, shard, tensors, write


README, MODELING = "README.md", "modeling_normllava.py"
NORM, VISION = "model.multi_modal_projector.norm", "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
SECRET, OTHER_CODE = "hf_" + "a" * 34, "you/repo--modeling.Class"


def link(folder: Path) -> None:
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def without_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def fill(name: str, value: float) -> Plant:
    return tensors(lambda weights: weights[name].view(-1)[:1].fill_(value))


# What is planted, and what the finding says.
FAULTS: dict[str, tuple[Plant, str]] = {
    "no card": (delete(README), "README.md: no snippet that loads a repository at a revision"),
    "token": (append(README, f"\n{SECRET}\n"), "README.md: holds a Hugging Face token"),
    "path in a config": (put(CONFIG, note="/home/me/run"), "config.json: holds a path of a machine, /home/me/run"),
    "pickle": (write("training_args.bin", b"x"), "training_args.bin: is not on the list"),
    "symlink": (link, "images/example9.png: is a symlink"),
    "a shard lost": (without_a_shard, "model-00002-of-00002.safetensors: the folder's weight files are not those of"),
    "no head": (tensors(lambda w: w.pop("lm_head.weight")), "lm_head.weight"),
    "another shape": (tensors(lambda w: w.update({VISION: w[VISION].T.contiguous()})), VISION),
    "no norm in the config": (put(CONFIG, projector_norm="none"), f"unexpected_keys .*{NORM}"),
    "NaN": (fill(VISION, float("nan")), f"{VISION}: NaN or infinite values"),
    "no tokenizer": (delete("tokenizer.json"), "tokenizer.json: missing"),
    "not JSON": (write("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    "another class file": (append(MODELING, "\n"), "modeling_normllava.py: is not this version's file"),
    "another repository's class": (put(CONFIG, auto_map__AutoModel=OTHER_CODE), "config.json: its auto_map is not"),
    "code of a part": (put(CONFIG, text_config__auto_map={"A": OTHER_CODE}), 'config.json: holds "auto_map"'),
    "code elsewhere": (put("tokenizer_config.json", tokenizer_class=OTHER_CODE), "holds .you/repo--modeling.Class"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, staged: Path, tmp_path: Path) -> None:
    plant, message = FAULTS[fault]
    shutil.copytree(staged, tmp_path / "stage")
    plant(tmp_path / "stage")
    findings = check(tmp_path / "stage")
    assert any(re.search(message, finding) for finding in findings), findings


def test_build_says_all_faults_and_stages_nothing(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "evaluation.json").unlink()  # of other weights
    faults = ("no head", "NaN")
    for fault in faults:
        FAULTS[fault][0](run)
    tensors(lambda w: (w[f"{NORM}.weight"].fill_(0.0134), w[f"{NORM}.bias"].zero_()))(run)
    with pytest.raises(ValueError, match="run can't be published") as refused:
        build(run, "me/Mine", tmp_path / "stage", prose, license="apache-2.0")
    for reason in (*(FAULTS[fault][1] for fault in faults), "the norm is untrained after 8 steps"):
        assert re.search(reason, str(refused.value))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("vision", "text"), [("siglip2", "llama"), ("clip", "qwen3"), ("siglip", "gemma3")])
def test_every_family_as_composed_has_no_faults(vision: str, text: str, composed: Callable[..., Path]) -> None:
    folder = composed(vision=vision, text=text)
    assert [*find_model_faults(folder, read_weights(folder))] == []


def test_what_is_a_path_of_a_machine_and_what_is_none() -> None:
    for text in ("/data/models/llama", "~me/x", "C:\\\\Users\\\\me", '"/home/me/a.json"'):
        assert MACHINE_PATH.search(text), text
    for text in ("https://arxiv.org/abs/2512.08374", "/v1/models", "and/or", "--model runs/a/b"):
        assert not MACHINE_PATH.search(text), text
        assert not TOKEN.search(text + " hf_hub_download")
