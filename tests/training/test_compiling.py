"""Compiled decoder layers train like uncompiled ones, and share their graphs among rows of any length."""

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
    """Each test starts without compiled graphs, and with counters at 0."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def decoder_layers(model: Any) -> Any:
    return model.model.language_model.layers


def load(folder: Path, checkpointed: bool = False) -> Any:
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa").train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train_on(model: Any, length: int, padding: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of two rows of random tokens, of which the first ends with `padding` masked tokens."""
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(5, 200, (2, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, length - padding :] = 0
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
    model.zero_grad()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients


# Sequence lengths and numbers of padding tokens. Batches without padding have no mask, and so need a second graph.
ROWS = ((16, 0), (16, 3), (23, 1), (40, 0), (77, 5), (64, 0))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("text", ["qwen2", "gemma3"])  # Gemma's layers differ: some have a sliding window
def test_rows_of_any_length_share_graphs(composed: Callable[..., Path], text: str, checkpointed: bool) -> None:
    model = load(composed(text=text), checkpointed).double()
    expected = [train_on(model, *row) for row in ROWS]
    compile_layers(decoder_layers(model), backend="eager")
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
    compile_layers(decoder_layers(model), backend="eager")
    train_on(model, *ROWS[0])
    calls: list[str] = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *args: calls.append("before"))
        layer.mlp.register_forward_hook(lambda *args: calls.append("inside"))
        layer.register_forward_hook(lambda *args: calls.append("after"))
    train_on(model, *ROWS[0])
    assert calls == ["before", "after"] * 2  # two layers

    calls.clear()
    num_graphs = counters["stats"]["unique_graphs"]
    model.eval()
    train_on(model, *ROWS[0])
    assert calls == ["before", "inside", "after"] * 2
    assert counters["stats"]["unique_graphs"] == num_graphs


def count_saved_elements(model: Any) -> int:
    """The number of elements in all tensors that a forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def record_size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        model(input_ids=torch.full((2, 64), 5), use_cache=False)
    return sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_compiled_layers_are_checkpointed(composed: Callable[..., Path], tmp_path: Path, sharded: bool) -> None:
    if sharded:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def count_after_compiling(checkpointed: bool) -> int:
        model = load(composed(), checkpointed)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for layer in decoder_layers(model):
                fully_shard(layer, mesh=mesh)
        compile_layers(decoder_layers(model), backend="aot_eager")
        return count_saved_elements(model)

    try:
        assert count_after_compiling(checkpointed=True) < 0.7 * count_after_compiling(checkpointed=False)
    finally:
        if sharded:
            torch.distributed.destroy_process_group()


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
ADAPT = {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.2}
CHECKPOINTED = {"gradient_checkpointing": True}
MASKED = {**PACKED, "attn_implementation": "sdpa"}
KINDS: dict[str, dict[str, Any]] = {
    "packed": MASKED,
    # On a CPU, packed rows run with attention "varlen" by default, which isn't compiled and breaks a layer's graph in
    # two. Layers that are checkpointed too would not be compiled at all, so all kinds below use sdpa.
    "packed, varlen": PACKED,
    "padded, checkpointed": CHECKPOINTED,
    "align": {"stage": "align", "vision_learning_rate": None},  # None takes a field of INSTRUCT out of the recipe
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
    fields |= {"eval_dataset_name": str(data), "eval_strategy": "steps", "eval_steps": 4}
    # These two are no recipe fields, but say which model the run starts from.
    model_options = {name: fields.pop(name) for name in ("text", "key_adapter_rank") if name in fields}
    fields["model_name_or_path"] = str(composed(**model_options))

    eager = tmp_path / "eager"
    eager_fields = {**fields, "torch_compile": None, "torch_compile_backend": None}
    run(tmp_path, **eager_fields, output_dir=str(eager))
    assert not counters["stats"]  # nothing was compiled

    compiled = tmp_path / "compiled"
    run(tmp_path, **fields, output_dir=str(compiled))
    most_graphs = 7 if kind == "packed, varlen" else 2  # one with a mask and one without
    assert 1 <= counters["stats"]["unique_graphs"] <= most_graphs

    for line, expected in zip(read_metrics(compiled), read_metrics(eager), strict=True):
        assert line.keys() == expected.keys()
        for name in expected:
            if not name.endswith(("runtime", "_per_second")):
                assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name

    # The compiled run saves the same files, and weights under their own names.
    assert {path.name for path in compiled.iterdir()} == {path.name for path in eager.iterdir()}
    loaded = AutoModelForImageTextToText.from_pretrained(compiled)
    assert not any("_orig_mod" in name for name in loaded.state_dict())
    assert Run.read(compiled).arguments["torch_compile"]


@pytest.mark.slow
def test_a_run_can_be_resumed_with_and_without_compiling(
    composed: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {**INSTRUCT, **MASKED, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 4}
    settings: dict[str, dict[str, Any]] = {"eager": {}, "compiled": COMPILED}
    for name, setting in settings.items():
        run(tmp_path, **fields, **setting, output_dir=str(tmp_path / name))

    for before, after in (("eager", "compiled"), ("compiled", "eager"), ("compiled", "compiled")):
        out = tmp_path / f"{before}, then {after}"
        shutil.copytree(tmp_path / before / "checkpoint-4", out / "checkpoint-4")
        resumed = {**fields, **settings[after], "output_dir": str(out), "resume_from_checkpoint": True}
        if before != after:
            # A changed setting is refused unless the run says that it may change.
            was_compiled = before == "compiled"
            with pytest.raises(ValueError, match=f"torch_compile: {was_compiled} before"):
                run(tmp_path, **resumed)
        run(tmp_path, **resumed, resume_changed=before != after)
        # No weight differs from the eager run's: aot_eager runs the same operators, and so rounds in the same way.
        assert changed_weights(tmp_path / "eager", out) == set()
