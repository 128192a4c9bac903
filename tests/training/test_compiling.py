"""Compiled decoder layers train like uncompiled layers, and share their graphs among rows of any length."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, changed_weights, load_weights, read_metrics, run
from training.folders.run import Run
from training.modules.compiling import ONE_GRAPH, compile_modules, modules_to_compile


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test starts without compiled graphs, and with counters at 0."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def decoder_layers(model: Any) -> Any:
    return model.model.language_model.layers


def load_model(folder: Path, checkpointed: bool = False) -> Any:
    """The model in `folder`, in training mode, with gradient checkpointing if `checkpointed`."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa").train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_and_gradients(model: Any, length: int, num_padding: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of a batch of two rows of random tokens.

    The first row ends with `num_padding` tokens that the attention mask hides.
    """
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(5, 200, (2, length), generator=generator)  # tokens of text
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, length - num_padding :] = 0
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    # Any loss will do, so the logits at each position are compared with the token at the same position, not the next.
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
    model.zero_grad()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients


# Lengths of rows and numbers of padding tokens, for `loss_and_gradients`.
ROW_SIZES = ((16, 0), (16, 3), (23, 1), (40, 0), (77, 5), (64, 0))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["not checkpointed", "checkpointed"])
@pytest.mark.parametrize("text", ["qwen2", "gemma3"])  # some of Gemma's layers have a sliding window
def test_rows_of_any_length_share_graphs(
    make_model_folder: Callable[..., Path], text: str, checkpointed: bool
) -> None:
    model = load_model(make_model_folder(text=text), checkpointed).double()
    expected_results = [loss_and_gradients(model, length, num_padding) for length, num_padding in ROW_SIZES]

    compile_modules(decoder_layers(model), backend="eager")
    results = [loss_and_gradients(model, length, num_padding) for length, num_padding in ROW_SIZES]
    for (loss, gradients), (expected_loss, expected_gradients) in zip(results, expected_results, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-12)

    # transformers makes a mask only for batches with padding, so batches with padding have a graph of their own.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("vision", ["siglip", "clip", "dinov2"])
def test_the_encoder_and_the_projector_are_compiled_in_one_graph_each(
    make_model_folder: Callable[..., Path], vision: str, backend: str
) -> None:
    """With the norm and its own gradient, in float64."""
    model = load_model(make_model_folder(vision=vision)).double()
    size = model.config.vision_config.image_size

    def features_and_gradients(num_images: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(num_images)
        pixel_values = torch.randn(num_images, 3, size, size, generator=generator, dtype=torch.float64)
        features = torch.stack(model.get_image_features(pixel_values, return_dict=True).pooler_output)
        model.zero_grad()
        features.pow(3).sum().backward()
        return [features, *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]

    expected_results = [features_and_gradients(num_images) for num_images in (2, 5)]
    compile_modules(modules_to_compile(model), backend=backend)
    results = [features_and_gradients(num_images) for num_images in (2, 5)]
    for tensors, expected_tensors in zip(results, expected_results, strict=True):
        for tensor, expected in zip(tensors, expected_tensors, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-11)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_hooks_that_take_off_others_are_for_one_pass_of_what_is_compiled(
    make_model_folder: Callable[..., Path],
) -> None:
    model = load_model(make_model_folder())
    modules = modules_to_compile(model)

    def count_hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    assert count_hooks() == 0
    compile_modules(modules, backend="eager")
    assert count_hooks() == len(modules)

    size = model.config.vision_config.image_size
    input_ids = torch.full((1, 4), model.config.image_token_id)
    model(input_ids=input_ids, pixel_values=torch.zeros(1, 3, size, size), use_cache=False)
    assert count_hooks() == 0
    assert not counters["graph_break"]


@pytest.mark.skipif(ONE_GRAPH not in torch._inductor.config.get_config_copy(), reason="torch has no such option yet")
def test_inductor_alone_is_told_to_make_one_graph_for_a_norms_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    options = []
    monkeypatch.setattr(torch, "compile", lambda forward, options_of=options.append, **kwargs: options_of(kwargs))
    for backend in ("inductor", "aot_eager"):
        compile_modules([torch.nn.Identity()], backend)
    assert [given["options"] for given in options] == [{ONE_GRAPH: True}, None]


def test_hooks_on_layers_are_always_called_and_hooks_inside_layers_only_in_eval_mode(
    make_model_folder: Callable[..., Path],
) -> None:
    model = load_model(make_model_folder())
    compile_modules(decoder_layers(model), backend="eager")
    loss_and_gradients(model, length=16, num_padding=0)  # compiles the layers before they have hooks

    calls: list[str] = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *args: calls.append("before"))
        layer.mlp.register_forward_hook(lambda *args: calls.append("inside"))
        layer.register_forward_hook(lambda *args: calls.append("after"))
    loss_and_gradients(model, length=16, num_padding=0)
    assert calls == ["before", "after"] * 2  # the model has two layers

    # In eval mode layers run uncompiled.
    calls.clear()
    num_graphs = counters["stats"]["unique_graphs"]
    model.eval()
    loss_and_gradients(model, length=16, num_padding=0)
    assert calls == ["before", "inside", "after"] * 2
    assert counters["stats"]["unique_graphs"] == num_graphs


def count_saved_elements(model: Any) -> int:
    """The number of elements of all tensors that a forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def record_size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        model(input_ids=torch.full((2, 64), 5), use_cache=False)  # 5 is any token of text
    return sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["not sharded", "sharded"])
def test_compiled_layers_are_checkpointed(
    make_model_folder: Callable[..., Path], tmp_path: Path, sharded: bool
) -> None:
    """Compiled layers keep fewer tensors for the backward pass with gradient checkpointing than without."""

    def count_after_compiling(checkpointed: bool) -> int:
        model = load_model(make_model_folder(), checkpointed)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for layer in decoder_layers(model):
                fully_shard(layer, mesh=mesh)
        compile_modules(decoder_layers(model), backend="aot_eager")
        return count_saved_elements(model)

    if sharded:
        # FSDP2 needs a process group, which has only this process here.
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        num_saved = count_after_compiling(checkpointed=True)
        num_saved_without_checkpointing = count_after_compiling(checkpointed=False)
    finally:
        if sharded:
            torch.distributed.destroy_process_group()
    assert num_saved < 0.7 * num_saved_without_checkpointing


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
# `None` takes a field of `INSTRUCT` out of the recipe.
ALIGN = {"stage": "align", "vision_learning_rate": None}
ADAPT = {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.2}
CHECKPOINTED = {"gradient_checkpointing": True}
# Packed rows have attention "varlen" by default. On a CPU, "varlen" breaks the graph of a layer into parts. The graph
# of a checkpointed layer can't be broken, so with "varlen" such a layer isn't compiled at all. Most packed runs here
# have sdpa instead.
PACKED_WITH_SDPA = {**PACKED, "attn_implementation": "sdpa"}
# The recipe fields of each kind of run, besides `INSTRUCT` and `COMPILED`.
FIELDS: dict[str, dict[str, Any]] = {
    "packed": PACKED_WITH_SDPA,
    "packed, varlen": PACKED,
    "padded, checkpointed": CHECKPOINTED,
    "align": ALIGN,
    "adapters": {**ADAPT, **CHECKPOINTED},
    "key adapters": ADAPT,
    "4 bits": {**ADAPT, **CHECKPOINTED, "load_in_4bit": True},
    "tied embeddings": CHECKPOINTED,
    "bfloat16": {**PACKED_WITH_SDPA, **CHECKPOINTED, "bf16": True},
    "inductor": {**PACKED_WITH_SDPA, **CHECKPOINTED, "torch_compile_backend": None},  # inductor is the default
}
# Arguments of the fixture `make_model_folder`, for kinds of run that start from another model than the usual one.
MODELS: dict[str, dict[str, Any]] = {"key adapters": {"key_adapter_rank": 4}, "tied embeddings": {"text": "gemma3"}}
# The most graphs that a run may need: two for the decoder's layers, for rows with and without a mask, and two each for
# the encoder's layers and the projector, for one picture and for several. With "varlen" a run needs more, because each
# part of a broken graph is a graph.
MAX_GRAPHS = 6
MAX_GRAPHS_OF_VARLEN = 11

SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in FIELDS if kind != "packed"]


@pytest.mark.parametrize("kind", ["packed", *SLOW_KINDS])
def test_a_compiled_run_logs_and_saves_what_an_uncompiled_run_does(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, kind: str
) -> None:
    fields = {**INSTRUCT, **COMPILED, **FIELDS[kind], "dataset_name": str(data), "logging_steps": 1}
    fields |= {"eval_dataset_name": str(data), "eval_strategy": "steps", "eval_steps": 4}
    fields["model_name_or_path"] = str(make_model_folder(**MODELS.get(kind, {})))

    uncompiled = tmp_path / "uncompiled"
    uncompiled_fields = {**fields, "torch_compile": None, "torch_compile_backend": None}
    run(tmp_path, **uncompiled_fields, output_dir=str(uncompiled))
    assert not counters["stats"]  # nothing was compiled

    compiled = tmp_path / "compiled"
    run(tmp_path, **fields, output_dir=str(compiled))
    max_graphs = MAX_GRAPHS_OF_VARLEN if kind == "packed, varlen" else MAX_GRAPHS
    assert 1 <= counters["stats"]["unique_graphs"] <= max_graphs

    for line, expected in zip(read_metrics(compiled), read_metrics(uncompiled), strict=True):
        assert line.keys() == expected.keys()
        for name in expected:
            if not name.endswith(("runtime", "_per_second")):  # times differ
                assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name

    # The compiled run saves the same files with the same weights, not with `_orig_mod` in their names.
    assert {path.name for path in compiled.iterdir()} == {path.name for path in uncompiled.iterdir()}
    (weight_file,) = compiled.glob("*.safetensors")
    names_in_compiled = set(load_weights(compiled, weight_file.name))
    assert names_in_compiled == set(load_weights(uncompiled, weight_file.name))
    assert Run.read(compiled).arguments["torch_compile"]


@pytest.mark.slow
def test_a_run_can_be_resumed_with_and_without_compiling(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {
        **INSTRUCT,
        **PACKED_WITH_SDPA,
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
    }
    fields["save_steps"] = 4
    fields_by_setting: dict[str, dict[str, Any]] = {"uncompiled": fields, "compiled": {**fields, **COMPILED}}
    for setting, setting_fields in fields_by_setting.items():
        run(tmp_path, **setting_fields, output_dir=str(tmp_path / setting))

    # The setting of the run that is broken off, and the setting with which it is resumed.
    for before, after in (("uncompiled", "compiled"), ("compiled", "uncompiled"), ("compiled", "compiled")):
        out = tmp_path / f"{before}, then {after}"
        shutil.copytree(tmp_path / before / "checkpoint-4", out / "checkpoint-4")
        resumed = {**fields_by_setting[after], "output_dir": str(out), "resume_from_checkpoint": True}
        if before != after:
            # A changed setting is refused unless `resume_changed` allows the change.
            was_compiled = before == "compiled"
            with pytest.raises(ValueError, match=f"torch_compile: {was_compiled} before"):
                run(tmp_path, **resumed)
            resumed["resume_changed"] = True
        run(tmp_path, **resumed)
        # aot_eager runs the same operators as an uncompiled model, and so rounds in the same way.
        assert changed_weights(tmp_path / "uncompiled", out) == set()
