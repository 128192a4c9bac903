"""Compiled decoder layers: they train as the layers themselves do, and rows of any length share their graphs."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, changed_weights, read_metrics, run
from training.compiling import compile_layers
from training.run import Run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled and nothing counted before."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def layers_of(model: Any) -> Any:
    return model.model.language_model.layers


def load(folder: Path, checkpointed: bool = False) -> Any:
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa").train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train_on(model: Any, length: int, padding: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of two rows of random tokens, the first with padding, and the gradients."""
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(5, 200, (2, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, length - padding :] = 0
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
    model.zero_grad()
    loss.backward()
    gradients = {name: of.grad.clone() for name, of in model.named_parameters() if of.grad is not None}
    return loss.item(), gradients


# Without padding there is no mask, which makes a second graph.
ROWS = ((16, 0), (16, 3), (23, 1), (40, 0), (77, 5), (64, 0))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("text", ["qwen2", "gemma3"])  # Gemma's layers differ: some have a sliding window
def test_rows_of_any_length_share_graphs(composed: Callable[..., Path], text: str, checkpointed: bool) -> None:
    model = load(composed(text=text), checkpointed).double()
    expected = [train_on(model, *row) for row in ROWS]
    compile_layers(layers_of(model), backend="eager")
    for row, (expected_loss, expected_gradients) in zip(ROWS, expected, strict=True):
        loss, gradients = train_on(model, *row)
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_hooks_on_layers_are_called_and_inner_ones_in_eval_mode(composed: Callable[..., Path]) -> None:
    model = load(composed())
    compile_layers(layers_of(model), backend="eager")
    train_on(model, *ROWS[0])
    called: list[str] = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda *args: called.append("before"))
        layer.mlp.register_forward_hook(lambda *args: called.append("inside"))
        layer.register_forward_hook(lambda *args: called.append("after"))
    train_on(model, *ROWS[0])
    assert called == ["before", "after"] * 2
    called.clear()
    graphs = counters["stats"]["unique_graphs"]
    model.eval()
    train_on(model, *ROWS[0])
    assert called == ["before", "inside", "after"] * 2
    assert counters["stats"]["unique_graphs"] == graphs


def saved_elements(model: Any) -> int:
    """How many elements of tensors a forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=torch.full((2, 64), 5), use_cache=False)
    return sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_compiled_layers_are_checkpointed(composed: Callable[..., Path], tmp_path: Path, sharded: bool) -> None:
    kept = {}
    for checkpointed in (False, True):
        model = load(composed(), checkpointed)
        if sharded:
            store = torch.distributed.FileStore(str(tmp_path / f"store-{checkpointed}"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,)) if sharded else None
            for layer in layers_of(model) if sharded else ():
                fully_shard(layer, mesh=mesh)
            compile_layers(layers_of(model), backend="aot_eager")
            kept[checkpointed] = saved_elements(model)
        finally:
            if sharded:
                torch.distributed.destroy_process_group()
    assert kept[True] < 0.7 * kept[False]


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
ADAPT = {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.2}
CHECKPOINTED = {"gradient_checkpointing": True}
MASKED = {**PACKED, "attn_implementation": "sdpa"}
KINDS: dict[str, dict[str, Any]] = {
    "packed": MASKED,
    # On a CPU attention by sample isn't compiled: it parts the graph of a layer, which all layers and lengths share.
    # Where layers are checkpointed too, torch compiles nothing of them, so those kinds below take sdpa.
    "packed, by sample": PACKED,
    "padded, checkpointed": CHECKPOINTED,
    "align": {"stage": "align", "vision_learning_rate": None},
    "adapters": {**ADAPT, **CHECKPOINTED},
    "key adapters": {**ADAPT, "key_adapter_rank": 4},
    "4 bits": {**ADAPT, **CHECKPOINTED, "load_in_4bit": True},
    "tied embeddings": {**CHECKPOINTED, "text": "gemma3"},
    "bfloat16": {**MASKED, **CHECKPOINTED, "bf16": True},
    "inductor": {**MASKED, **CHECKPOINTED, "torch_compile_backend": None},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind != "packed" else ()) for kind in KINDS]
)
def test_a_compiled_run_logs_what_an_eager_one_does(
    composed: Callable[..., Path], data: Path, tmp_path: Path, kind: str
) -> None:
    fields = {**INSTRUCT, **COMPILED, **KINDS[kind], "dataset_name": str(data), "logging_steps": 1}
    parts = {name: fields.pop(name) for name in ("text", "key_adapter_rank") if name in fields}
    fields["model_name_or_path"] = str(composed(**parts))
    fields |= {"eval_dataset_name": str(data), "eval_strategy": "steps", "eval_steps": 4}
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    run(
        tmp_path,
        **{**fields, "torch_compile": None, "torch_compile_backend": None},
        output_dir=str(eager),
    )
    assert not counters["stats"]
    run(tmp_path, **fields, output_dir=str(compiled))
    most_graphs = 7 if kind == "packed, by sample" else 2  # with and without a mask
    assert 1 <= counters["stats"]["unique_graphs"] <= most_graphs

    for line, expected in zip(read_metrics(compiled), read_metrics(eager), strict=True):
        assert line.keys() == expected.keys()
        for name in expected:
            if not name.endswith(("runtime", "_per_second")):
                assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    files = {path.name for path in compiled.iterdir()}
    assert files == {path.name for path in eager.iterdir()}
    loaded = AutoModelForImageTextToText.from_pretrained(compiled)
    assert not any("_orig_mod" in name for name in loaded.state_dict())
    assert Run.read(compiled).arguments["torch_compile"]


@pytest.mark.slow
def test_runs_go_on_compiled_or_not(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    fields = {**INSTRUCT, **MASKED, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 4}
    settings: dict[str, dict[str, Any]] = {"eager": {}, "compiled": COMPILED}
    for name, setting in settings.items():
        run(tmp_path, **fields, **setting, output_dir=str(tmp_path / name))
    for before, after in (("eager", "compiled"), ("compiled", "eager"), ("compiled", "compiled")):
        out = tmp_path / f"{before}, then {after}"
        shutil.copytree(tmp_path / before / "checkpoint-4", out / "checkpoint-4")
        more = {**fields, **settings[after], "output_dir": str(out), "resume_from_checkpoint": True}
        if before != after:
            with pytest.raises(ValueError, match=f"torch_compile: {before == 'compiled'} before"):
                run(tmp_path, **more)
        run(tmp_path, **more, resume_changed=before != after)
        # aot_eager runs the same operators, so that nothing is rounded differently.
        assert changed_weights(tmp_path / "eager", out) == set()
