"""The release of a model whose pictures are cut into tiles: its files, its check, its card and its answers."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from hub_cards.build import BuildOptions, build_release
from hub_cards.check import find_faults
from modeling_normllava import NormLlavaForConditionalGeneration
from plants import FolderChange, append_text, delete_file, set_fields
from stranger_script import ask_handler
from strangers import ask_as_stranger, ask_here


MAX_TILES = 4


@pytest.fixture(scope="module")
def run(make_model_folder: Callable[..., Path]) -> Path:
    """The folder of a model whose pictures are cut into four tiles at most. Treat it as read-only."""
    return make_model_folder(max_tiles=MAX_TILES)


@pytest.fixture(scope="module")
def release(run: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's release folder. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("tiled") / "release"
    build_release(run, folder, BuildOptions(repo_id="me/Tiled", prose=prose, license="apache-2.0"))
    return folder


@pytest.fixture(scope="module")
def wide_picture() -> Image.Image:
    """A picture of noise that becomes two tiles of 28 × 28 pixels, and the thumbnail."""
    torch.manual_seed(0)
    noise = torch.randint(256, (28, 56, 3), dtype=torch.uint8)  # [height, width, channels]
    return Image.fromarray(noise.numpy())


def test_a_release_with_the_processors_code_has_no_faults(release: Path) -> None:
    assert (release / "processing_normllava.py").is_file()
    assert find_faults(release) == []


# An `auto_map` that names a class in another repository.
OTHER_CODE = {"AutoProcessor": "you/repo--processing.Class"}
# By the fault's name: the change that makes the fault, and a pattern for the message about the fault.
FAULTS: dict[str, tuple[FolderChange, str]] = {
    "no code of the processor": (
        delete_file("processing_normllava.py"),
        "processing_normllava.py: is not this version's file",
    ),
    "other code of the processor": (
        append_text("processing_normllava.py", "\n"),
        "processing_normllava.py: is not this version's file",
    ),
    "no auto_map of the processor": (
        set_fields("processor_config.json", auto_map=None),
        "processor_config.json: its auto_map is not",
    ),
    "another repository's processor": (
        set_fields("processor_config.json", auto_map=OTHER_CODE),
        "processor_config.json: its auto_map is not",
    ),
    "another repository's image processor": (
        set_fields("processor_config.json", image_processor__auto_map=OTHER_CODE),
        'processor_config.json: holds an "auto_map"',
    ),
    "another repository's tokenizer": (
        set_fields("tokenizer_config.json", auto_map=OTHER_CODE),
        "tokenizer_config.json: its auto_map is not",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_processors_code_is_found(fault: str, release: Path, tmp_path: Path) -> None:
    make_fault, pattern = FAULTS[fault]
    folder = shutil.copytree(release, tmp_path / "release")
    make_fault(folder)
    messages = find_faults(folder)
    assert any(re.search(pattern, message) for message in messages), messages


def test_the_card_counts_the_tokens_of_a_tile_and_the_most_tiles(release: Path) -> None:
    card = (release / "README.md").read_text()
    # The thumbnail is the fifth tile.
    assert "cut into at most 4 tiles of 28 pixels a side, and each tile becomes 4 tokens." in card
    assert "so a picture has at most 5 tiles and 20 tokens." in card
    assert "configuration_normllava.py, modeling_normllava.py and processing_normllava.py of this repository" in card
    assert "brought to the size of a few tiles" in card


@pytest.fixture(scope="module")
def expected(run: Path, wide_picture: Image.Image) -> tuple[torch.Tensor, str]:
    """The logits and the greedy answer of the run's model to a question about the picture."""
    model = NormLlavaForConditionalGeneration.from_pretrained(run).eval()
    processor = AutoProcessor.from_pretrained(run)
    return ask_here(model, processor, wide_picture)


def test_the_handler_gives_the_models_answer(
    release: Path, wide_picture: Image.Image, expected: tuple[torch.Tensor, str], tmp_path: Path
) -> None:
    wide_picture.save(tmp_path / "picture.png")
    _, answer = expected
    assert ask_handler(release, tmp_path / "picture.png") == answer


@pytest.mark.slow
def test_a_stranger_gets_the_models_answers(
    release: Path, wide_picture: Image.Image, expected: tuple[torch.Tensor, str], tmp_path: Path
) -> None:
    """A stranger has transformers, but not this project."""
    expected_logits, expected_answer = expected
    answers = ask_as_stranger(release, wide_picture, tmp_path, trusts_code=True)
    assert torch.equal(answers["logits"], expected_logits)
    assert answers["pipeline"] == answers["handler"] == expected_answer
    # The classes of the model and the processor are the release's own.
    assert all(module.startswith("transformers_modules.") for module in answers["modules"])
