"""The study's models: their shared start, their training, their measures, and the folders of their runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from examples.emoji import evaluate
from examples.emoji.pictures import Record
from examples.emoji.study import __main__ as study
from examples.emoji.study import measures, starts
from examples.emoji.study import run as study_run
from examples.emoji.study import train as study_train
from examples.emoji.study.cells import (
    BLOCK_1,
    LAYER_NORM,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    Arm,
)
from examples.emoji.study.run import second_layer_rate
from examples.emoji.study.starts import START_FILE, make_arm_model
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, dump_recipe, load_weights


# The arms' models and learning rates


def test_all_arms_start_from_the_shared_projector(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    # A seed's shared start. Its file says that the projector's second layer was divided by k = 4.
    model_folder = make_model_folder(projector_norm="none")
    shared = NormLlavaForConditionalGeneration.from_pretrained(model_folder)
    shared.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(model_folder).save_pretrained(tmp_path)
    (tmp_path / START_FILE).write_text(json.dumps({"seed": 1, "k": 4.0}))
    features = torch.randn(2, 4, 24)  # [num_pictures, num_patches, width of the vision encoder]
    shared_output = shared.model.multi_modal_projector(features)

    def load_arm(arm: Arm) -> NormLlavaForConditionalGeneration:
        """The arm's model, saved and loaded again, as it is for training."""
        model, _ = make_arm_model(arm, tmp_path)
        model.save_pretrained(tmp_path / "untrained")
        return NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "untrained")

    scaled = load_arm(SCALED)
    assert torch.equal(scaled.model.multi_modal_projector(features), shared_output)

    plain = load_arm(NOTHING)
    assert torch.equal(plain.model.multi_modal_projector(features), 4 * shared_output)

    # "LayerNorm at T" gives the plain projector's output the norm T, the mean norm of text embeddings.
    with_norm = load_arm(LAYER_NORM)
    embedding_norms = with_norm.get_input_embeddings().weight.norm(dim=-1)
    text_norm = embedding_norms[embedding_norms > 0].mean()  # without rows of zeros, which stand for no token
    hidden_size = 32  # width of the language model
    normalized = nn.functional.layer_norm(4 * shared_output, (hidden_size,))  # with the norm √hidden_size
    expected = normalized * text_norm / hidden_size**0.5
    assert torch.allclose(with_norm.model.multi_modal_projector(features), expected, atol=1e-5)
    assert with_norm.config.projector_norm == "gwc"


def test_the_second_layers_rate_is_that_of_the_arm() -> None:
    rates = {arm: second_layer_rate(arm, k=4.0) for arm in BLOCK_1.arms}
    assert rates == pytest.approx({
        SCALED: 2e-4,
        SCALED_SLOWLY: 5e-5,  # 2e-4 / 4
        NOTHING_FAST: 8e-4,  # 2e-4 x 4
        NOTHING: 2e-4,
    })  # fmt: skip


@pytest.mark.parametrize("k", [4.35, 0.5])  # 4.35 is about the study's k
def test_dividing_weights_and_rate_by_k_is_the_same_as_a_multiplier_of_one_over_k(k: float) -> None:
    """An arm of block 1 divides the weights and the learning rate of the projector's second layer by k.

    A multiplier 1/k behind the layer gives the same outputs, before training and after any number of steps.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **sizes}, text_config={"vocab_size": 9, **sizes}
    )
    multiplied = LlavaMultiModalProjector(config).double()
    nn.init.normal_(multiplied.linear_2.bias)  # it would be 0, and dividing it would not show

    divided = LlavaMultiModalProjector(config).double()
    divided.load_state_dict(multiplied.state_dict())
    with torch.no_grad():
        for parameter in divided.linear_2.parameters():
            parameter /= k

    features = torch.randn(5, 4, 12, dtype=torch.float64)
    wanted = torch.randn(5, 4, 12, dtype=torch.float64)

    def train(projector: nn.Module, multiplier: float, second_layer_rate: float) -> torch.Tensor:
        """Take twenty steps, and return the outputs from which the last step was computed."""
        groups = [
            {"params": projector.linear_1.parameters(), "lr": 2e-4},
            {"params": projector.linear_2.parameters(), "lr": second_layer_rate},
        ]
        # Adam's steps would depend on the gradients' scale if eps weren't far below the gradients.
        adam = torch.optim.AdamW(groups, eps=1e-30, weight_decay=0.0)
        for _ in range(20):
            output = multiplier * projector(features)
            adam.zero_grad()
            loss = (output - wanted).square().mean()
            loss.backward()
            adam.step()
        return output

    by_multiplier = train(multiplied, multiplier=1 / k, second_layer_rate=2e-4)
    by_division = train(divided, multiplier=1.0, second_layer_rate=2e-4 / k)
    assert torch.allclose(by_multiplier, by_division, rtol=1e-9, atol=1e-12)


# Training


@pytest.fixture
def trained_one_step(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """The folder of a model after one step, in which the projector's layers had the learning rates 1e-3 and 4e-3."""
    Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    rows = [{"image": "red.png", "conversations": turns}] * 4
    (tmp_path / "data.json").write_text(json.dumps(rows))

    fields: dict[str, Any] = {
        **FAST,  # makes training fast on a CPU
        **INSTRUCT,  # trains as in stage 2
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(tmp_path / "data.json"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "lr_scheduler_type": "constant",
        "projector_learning_rate": 1e-3,
        "clip_by_module": True,
        "logging_steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(dump_recipe(**fields))
    study_train.main(second_layer_rate=4e-3, argv=["--config", str(tmp_path / "recipe.yaml")])
    return tmp_path / "out"


def test_the_second_layer_learns_at_its_own_rate(
    make_model_folder: Callable[..., Path], trained_one_step: Path
) -> None:
    """Adam's first step moves every weight by the learning rate, so the largest change shows that rate."""
    before = load_weights(make_model_folder())
    after = load_weights(trained_one_step)
    for layer, rate in (("linear_1", 1e-3), ("linear_2", 4e-3)):
        name = f"model.multi_modal_projector.{layer}.weight"
        largest_change = (after[name] - before[name]).abs().max()
        assert largest_change.item() == pytest.approx(rate, rel=1e-2)


def test_gradients_of_both_layers_are_clipped_as_one_module(trained_one_step: Path) -> None:
    clipped = measures.read_training(trained_one_step)["clipped"]  # has a value for each module
    projector_modules = [name for name in clipped if "projector" in name]
    # Both layers are the first module. The norm behind them is the second.
    assert projector_modules == ["multi_modal_projector", "multi_modal_projector.norm"]


def test_rows_about_drawings_by_emojione_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "RUN", tmp_path)
    emojione_row = {"image": "emojione/a.png"}
    noto_row = {"image": "noto/a.png"}
    text_row: dict[str, Any] = {"conversations": []}
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "train.json").write_text(json.dumps([emojione_row, noto_row, text_row]))

    copy = starts.write_rows("train.json", tmp_path)
    assert json.loads(copy.read_text()) == [noto_row, text_row]


# Measures


@pytest.fixture
def pictures_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the study looks for drawings and their list. It has one picture, `red.png`."""
    for module in (measures, evaluate):
        monkeypatch.setattr(module, "RUN", tmp_path)
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (28, 28), "red").save(folder / "red.png")
    return folder


def write_list(folder: Path, names_by_artist: dict[str, list[str]]) -> None:
    """Write the list of drawings: for each artist, a drawing of each name. All have the picture `red.png`."""
    records = []
    for artist, names in names_by_artist.items():
        for name in names:
            records.append({"image": "red.png", "set": artist, "name": name})
    (folder / "pictures.json").write_text(json.dumps(records))


def test_a_name_is_right_for_its_drawing_and_for_a_near_copy(
    always_a: Callable[..., Path], pictures_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model names every drawing "A". A drawing of "AA" is a near copy of a drawing of "A".
    monkeypatch.setattr(measures, "SAME_DRAWING", {"AA": "A"})
    names_by_artist = {
        "twemoji": ["A", "AA", "b", "c"],
        "emojione": ["A", "b", "b", "b"],
        "openmoji": ["b"],
        "noto": ["A"],
    }
    write_list(pictures_folder, names_by_artist)

    model = NormLlavaForConditionalGeneration.from_pretrained(always_a()).eval()
    processor = AutoProcessor.from_pretrained(always_a())
    measured = measures.measure_model(model, processor)
    # "1" stands for a right name. Models are trained on noto's drawings, so the names of these aren't measured.
    assert measured["hits"] == {"twemoji": "1100", "emojione": "1000", "openmoji": "0"}


def test_tokens_point_at_the_name_that_they_are_made_from(
    make_model_folder: Callable[..., Path], pictures_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ant", "bee", "cat"]
    write_list(pictures_folder, {"twemoji": names, "emojione": names})
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    embedding_norms = model.get_input_embeddings().weight.norm(dim=-1)
    text_norm = embedding_norms[embedding_norms > 0].mean()  # T, without rows of zeros, which stand for no token

    def make_image_tokens(model: Any, processor: Any, records: list[Record]) -> torch.Tensor:
        """Four equal image tokens for each drawing: its name's mean text embedding, with three times the norm T."""
        tokens = []
        for record in records:
            name = f" {record['name']}"  # with the space before a word inside a sentence
            ids = processor.tokenizer(name, add_special_tokens=False, return_tensors="pt").input_ids
            mean_embedding = model.get_input_embeddings()(ids)[0].mean(dim=0)  # [hidden_size]
            token = 3 * text_norm * nn.functional.normalize(mean_embedding, dim=-1)
            tokens.append(token.expand(4, -1))
        return torch.stack(tokens).detach()  # [num_drawings, 4, hidden_size]

    monkeypatch.setattr(measures, "image_tokens", make_image_tokens)
    measured = measures.measure_tokens(model, processor)
    assert measured["names_by_tokens"] == 100
    assert measured["norm"] == pytest.approx(3, rel=1e-4)  # in units of T


# A run's commit and folder


@pytest.mark.parametrize("given", [None, "0123"])
def test_the_commit_is_that_of_the_repository(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123")
    assert study.find_commit(given) == "0123"


def test_another_commit_than_the_repositorys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123")
    with pytest.raises(ValueError, match="this is 0123"):
        study.find_commit("4567")


def test_a_commit_with_changed_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123-dirty")
    with pytest.raises(ValueError, match="commit them"):
        study.find_commit(None)


def test_a_copy_without_a_repository_needs_a_given_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: None)
    assert study.find_commit("4567") == "4567"
    with pytest.raises(ValueError, match="give --commit"):
        study.find_commit(None)


def test_a_run_starts_again_on_another_cpu_or_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoint-60"
    monkeypatch.setattr(study_run, "processor_name", lambda: "a CPU")
    study_run.claim_folder(folder, commit="0123")
    checkpoint.mkdir()

    study_run.claim_folder(folder, commit="0123")
    assert checkpoint.exists()

    monkeypatch.setattr(study_run, "processor_name", lambda: "a GPU")
    study_run.claim_folder(folder, commit="0123")
    assert not checkpoint.exists()
