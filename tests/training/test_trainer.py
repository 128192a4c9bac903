"""What the trainer changes of transformers' and TRL's, where no other file tests it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from diagnostics.dynamics import FILE, read_points
from script_runs import INSTRUCT, PACKED, logged, run


ADAPT = {"stage": "adapt", "lora_r": 4, "lora_alpha": 8, "vision_learning_rate": None}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled and nothing counted before."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({}, 2), ({"gradient_checkpointing": True}, 2), (PACKED, 4), pytest.param(ADAPT, 2, marks=pytest.mark.slow)],
)
def test_decoder_layers_are_compiled_and_train_as_eager_ones(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    graphs: int,
) -> None:
    fields = INSTRUCT | {
        "model_name_or_path": str(composed()),
        "dataset_name": str(data),
        "eval_dataset_name": str(data),
        "eval_strategy": "steps",
        "eval_steps": 4,
        "eval_samples": 6,
        "probe_steps": 4,
        "probe_samples": 4,
        "logging_steps": 1,
    }
    for name, compiled in (("eager", False), ("compiled", True)):
        run(monkeypatch, tmp_path, **{**fields, **changes}, torch_compile=compiled, output_dir=str(tmp_path / name))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
    # All layers share them: of batches with and without padding, or before and after attention over packed rows.
    assert counters["stats"]["unique_graphs"] == graphs
    for eager, compiled in zip(*(logged(tmp_path / name) for name in ("eager", "compiled")), strict=True):
        assert compiled.keys() == eager.keys()
        for key in (key for key in eager if not key.endswith(("runtime", "_per_second"))):
            assert compiled[key] == pytest.approx(eager[key], rel=1e-3, abs=1e-5), key
    turning, expected = (
        [point.layers.visual.cosine.mean for point in read_points(tmp_path / name / FILE)]
        for name in ("compiled", "eager")
    )
    assert len(turning) == 3
    for cosines, expected_cosines in zip(turning, expected, strict=True):
        assert cosines == pytest.approx(expected_cosines, abs=1e-4)
    given, expected_answers = ((tmp_path / name / "answers.jsonl").read_text() for name in ("compiled", "eager"))
    assert given == expected_answers
