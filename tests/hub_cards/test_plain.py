"""A Llava is published without code, under names that every runtime knows, and with the same logits."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import find_faults
from hub_cards.contents import read_json
from hub_cards.model_folder import ModelFolder
from hub_cards.push import push_release
from hub_cards.verify import verify_release
from hub_server import REPO_ID, HubServer
from local_server import make_data_url, make_messages, serve
from plants import FolderChange, change_weights, set_fields, split_weights
from stranger_script import NUM_TOKENS, QUESTION
from strangers import ask_as_stranger, ask_here


@pytest.fixture(scope="module")
def run(make_model_folder: Callable[..., Path]) -> Path:
    """The folder of a model without a norm layer. Treat it as read-only."""
    return make_model_folder(projector_norm="none")


@pytest.fixture(scope="module")
def release(run: Path, prose: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's release folder. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("plain") / "release"
    options = BuildOptions(repo_id=REPO_ID, prose=prose, widget_data=widget_data, license="apache-2.0")
    build_release(run, folder, options)
    return folder


def test_a_model_without_a_norm_layer_is_a_plain_llava(run: Path) -> None:
    assert ModelFolder(run).is_plain_llava


def test_a_normllava_is_no_plain_llava(make_model_folder: Callable[..., Path]) -> None:
    assert not ModelFolder(make_model_folder(projector_norm="none", spatial_merge_size=2)).is_plain_llava


@pytest.mark.parametrize(
    ("vision", "text"), [("siglip", "qwen2"), ("siglip2", "llama"), ("clip", "qwen3"), ("dinov2", "gemma3")]
)
def test_llavas_class_has_the_tensors_of_the_run(
    vision: str, text: str, make_model_folder: Callable[..., Path], prose: Path, tmp_path: Path
) -> None:
    """The weight files of run and release name tensors differently, so the loaded tensors are compared."""
    run = make_model_folder(vision=vision, text=text, projector_norm="none")
    build_release(run, tmp_path / "release", BuildOptions(repo_id=REPO_ID, prose=prose, license="apache-2.0"))
    assert find_faults(tmp_path / "release") == []

    tensors = LlavaForConditionalGeneration.from_pretrained(run).state_dict()
    llava_tensors = LlavaForConditionalGeneration.from_pretrained(tmp_path / "release").state_dict()
    assert list(llava_tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(llava_tensors[name], tensor), name


def test_weight_files_have_the_names_of_the_first_llava_checkpoints(release: Path) -> None:
    """vLLM's own Llava and older versions of transformers know only these names."""
    names = list(load_file(release / "model.safetensors"))
    prefixes = (
        "language_model.lm_head.",
        "language_model.model.",
        "multi_modal_projector.",
        "vision_tower.vision_model.",
    )
    assert all(name.startswith(prefixes) for name in names)
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in names), prefix
    assert "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight" in names


def test_a_model_in_shards_is_published_in_shards(run: Path, prose: Path, tmp_path: Path) -> None:
    sharded = shutil.copytree(run, tmp_path / "run")
    split_weights(sharded)
    build_release(sharded, tmp_path / "release", BuildOptions(repo_id=REPO_ID, prose=prose, license="apache-2.0"))
    assert find_faults(tmp_path / "release") == []

    # Each shard holds the tensors that the index says.
    weight_map = read_json(tmp_path / "release" / "model.safetensors.index.json")["weight_map"]
    assert len(set(weight_map.values())) == 2
    for name, file_name in weight_map.items():
        assert name in load_file(tmp_path / "release" / file_name)


def test_others_may_read_the_weights_of_a_release(release: Path) -> None:
    assert (release / "model.safetensors").stat().st_mode == (release / "README.md").stat().st_mode


def test_a_release_has_no_code_of_a_model(release: Path) -> None:
    # The release has two Python files, which are for an endpoint and aren't needed to load the model.
    assert {path.name for path in release.glob("*.py")} == {"handler.py", "pixels.py"}

    config = read_json(release / "config.json")
    assert config["model_type"] == "llava"
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    for path in release.glob("*.json"):
        assert "auto_map" not in path.read_text()
    assert not any(name.startswith("projector_norm") for name in config)


def test_the_card_asks_for_no_trust(release: Path) -> None:
    card = ModelCard.load(release / "README.md")
    assert "and no `trust_remote_code`" in card.text
    assert "trust_remote_code=True" not in card.text
    assert "The class files" not in card.text
    assert card.data.tags == ["conversational", "normllava"]
    assert "Not with `LlavaForConditionalGeneration`" not in card.text


# By the fault's name: the change that makes the fault, and a pattern for the message about the fault.
FAULTS: dict[str, tuple[FolderChange, str]] = {
    "code": (set_fields("config.json", auto_map={"AutoModel": "modeling.Class"}), 'config.json: holds an "auto_map"'),
    "a tensor that Llava lacks": (
        change_weights(lambda weights: weights.update({"multi_modal_projector.norm.weight": torch.ones(32)})),
        "unexpected_keys .*multi_modal_projector.norm.weight",
    ),
    "a tensor missing": (
        change_weights(lambda weights: weights.pop("multi_modal_projector.linear_1.weight")),
        "missing_keys .*multi_modal_projector.linear_1.weight",
    ),
    "another model's config": (
        set_fields("config.json", model_type="qwen2"),
        "only a NormLlava or a Llava can be published",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_plain_llava_is_found(fault: str, release: Path, tmp_path: Path) -> None:
    make_fault, pattern = FAULTS[fault]
    folder = shutil.copytree(release, tmp_path / "release")
    make_fault(folder)
    messages = find_faults(folder)
    assert any(re.search(pattern, message) for message in messages), messages


def test_a_run_with_a_tensor_that_llava_lacks_is_refused(run: Path, prose: Path, tmp_path: Path) -> None:
    with_norm = shutil.copytree(run, tmp_path / "run")
    norm_weights = {"multi_modal_projector.norm.weight": torch.ones(32)}
    change_weights(lambda weights: weights.update(norm_weights))(with_norm)
    options = BuildOptions(repo_id=REPO_ID, prose=prose, license="apache-2.0")
    with pytest.raises(ValueError, match=r"unexpected_keys .*projector\.norm\.weight"):
        build_release(with_norm, tmp_path / "release", options)


@pytest.mark.slow
def test_a_plain_llava_is_pushed_and_verified(release: Path, hub: HubServer, api: HfApi) -> None:
    push_release(release, api, public=True)
    verdict = verify_release(REPO_ID, "v1.0", release)  # runs the card's snippet
    assert verdict.problems == []


@pytest.fixture(scope="module")
def red_picture() -> Image.Image:
    """A picture in one colour."""
    return Image.new("RGB", (30, 20), (200, 20, 90))


@pytest.fixture(scope="module")
def expected(run: Path, red_picture: Image.Image) -> tuple[torch.Tensor, str]:
    """The logits and the greedy answer of the run's model to a question about the picture."""
    model = LlavaForConditionalGeneration.from_pretrained(run).eval()
    return ask_here(model, AutoProcessor.from_pretrained(run), red_picture)


def test_llavas_class_gives_the_logits_of_the_run(
    release: Path, red_picture: Image.Image, expected: tuple[torch.Tensor, str]
) -> None:
    llava = LlavaForConditionalGeneration.from_pretrained(release).eval()
    logits, answer = ask_here(llava, AutoProcessor.from_pretrained(release), red_picture)
    expected_logits, expected_answer = expected
    assert torch.equal(logits, expected_logits)
    assert answer == expected_answer


@pytest.mark.slow
def test_a_stranger_gets_the_runs_logits_and_answers_without_a_flag(
    release: Path, red_picture: Image.Image, expected: tuple[torch.Tensor, str], tmp_path: Path
) -> None:
    """A stranger has transformers, but not this project."""
    expected_logits, expected_answer = expected
    answers = ask_as_stranger(release, red_picture, tmp_path, trusts_code=False)
    assert torch.equal(answers["logits"], expected_logits)
    assert answers["pipeline"] == answers["handler"] == expected_answer
    assert all(module.startswith("transformers.models.llava.") for module in answers["modules"])


@pytest.mark.slow
def test_the_command_transformers_serve_gives_the_runs_answer(
    release: Path, red_picture: Image.Image, expected: tuple[torch.Tensor, str], tmp_path: Path
) -> None:
    """transformers' own command needs neither this project nor a flag to serve a plain Llava."""
    transformers_command = Path(sys.executable).with_name("transformers")
    messages: Any = make_messages(make_data_url(red_picture), QUESTION)
    with serve([transformers_command, "serve", release], tmp_path, tmp_path / "log") as client:
        completion = client.chat.completions.create(
            model=str(release), messages=messages, max_tokens=NUM_TOKENS, temperature=0
        )
    _, answer = expected
    assert completion.choices[0].message.content.strip() == answer
