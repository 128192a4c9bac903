"""Compiling decoder layers: they train as eager ones do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diagnostics.dynamics import FILE, read_points
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, logged, run
from training.compiling import compile_layers


ADAPT = {"stage": "adapt", "lora_r": 4, "lora_alpha": 8, "vision_learning_rate": None}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled and nothing counted before."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({}, 2), ({"gradient_checkpointing": True}, 2), (PACKED, 5), (ADAPT, 2)],
    ids=["padded", "checkpointed", "packed", "adapters"],
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
    # Both layers share them: one for batches with padding and one for those without. Attention over packed rows is not
    # compiled on the CPU, which cuts the layer in two, and its attention module too.
    assert counters["stats"]["unique_graphs"] <= graphs
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


def saved_elements(model: Any) -> int:
    """How many elements of tensors a forward pass keeps for the backward pass."""
    sizes = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=torch.full((2, 64), 5), use_cache=False)
    return sum(sizes)


@pytest.mark.parametrize("sharded", [False, True])
def test_compiled_layers_are_checkpointed(composed: Callable[..., Path], tmp_path: Path, sharded: bool) -> None:
    kept = {}
    for checkpointed in (False, True):
        model: Any = NormLlavaForConditionalGeneration.from_pretrained(composed()).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if sharded:
            store = torch.distributed.FileStore(str(tmp_path / f"store-{checkpointed}"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,)) if sharded else None
            for layer in model.model.language_model.layers if sharded else ():
                fully_shard(layer, mesh=mesh)
            compile_layers(model.model.language_model.layers, backend="aot_eager")
            kept[checkpointed] = saved_elements(model)
        finally:
            if sharded:
                torch.distributed.destroy_process_group()
    assert kept[True] < 0.7 * kept[False]


def test_key_losses_are_refused_under_a_launcher_that_compiles(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    fields = {**ADAPT, "key_gram_weight": 0.1, "model_name_or_path": str(composed()), "dataset_name": str(data)}
    with pytest.raises(ValueError, match="launch without --dynamo_backend"):
        run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "out"))
