"""In a step that isn't logged, nothing is done on the device whose result's size or value Python has to wait for."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, masking_utils
from typing_extensions import override

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, changed_weights, read_steps, run
from training.loop import trainer as trainer_module
from training.loop.measurements import StepMeasurements
from training.loop.trainer import NormLlavaTrainer
from training.modules import attention


aten = torch.ops.aten
# Operations that make Python wait for a GPU: they read a value, or the size of their result depends on values.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_scatter_backward.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class NoWaits(TorchDispatchMode):
    """Raises an `AssertionError` at an operation that waits, except while `on_host`."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host = False
        self.num_operations = 0

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if not self.on_host:
            assert function not in WAITING, function
            if function in INDEXING:
                assert all(index is None or index.dtype != torch.bool for index in args[1]), function
        return function(*args, **(kwargs or {}))


class StepsWithoutWaits(TrainerCallback):
    """Enters the mode at the beginning of each step, and leaves it at the step's end."""

    def __init__(self, mode: NoWaits) -> None:
        self.mode = mode
        self.num_steps = 0

    @override
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Enter the mode."""
        self.mode.__enter__()

    @override
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the mode."""
        self.mode.__exit__(None, None, None)
        self.num_steps += 1


ADAPT = {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_alpha": 8}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": PACKED,
    "align, packed": {**PACKED, "stage": "align", "vision_learning_rate": None},
    "key adapters, packed": {**PACKED, **ADAPT},
    "key adapters, padded, checkpointed": {**ADAPT, "gradient_checkpointing": True},
}


def model_folder(kind: str, make_model_folder: Callable[..., Path]) -> str:
    options = {"key_adapter_rank": 4} if "key adapters" in kind else {}
    return str(make_model_folder(**options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_logged_does_not_wait(
    kind: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = NoWaits()
    steps = StepsWithoutWaits(mode)

    def on_host(owner: Any, name: str) -> None:
        """Let a function wait, which works on the batch before it is copied, or in the place of a GPU's kernel."""
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            mode.on_host = True
            try:
                return function(*args, **kwargs)
            finally:
                mode.on_host = False

        monkeypatch.setattr(owner, name, wrapper)

    on_host(NormLlavaTrainer, "_prepare_inputs")
    on_host(StepMeasurements, "count_tokens")
    on_host(attention, "attend_by_sample")
    if "padded" in kind:  # a batch in which nothing is padded has no mask, and its positions are searched for samples
        on_host(masking_utils, "find_packed_sequence_indices")
    # As on a GPU, where TRL looks for the supervised positions.
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    monkeypatch.setattr(trainer_module, "ConsoleTable", lambda: steps)

    fields = {**INSTRUCT, **KINDS[kind], "dataset_name": str(data), "output_dir": str(tmp_path / "out")}
    fields |= {"model_name_or_path": model_folder(kind, make_model_folder), "logging_steps": 1000}
    try:
        run(tmp_path, **fields, optim="adamw_torch_fused")
    except BaseException:
        mode.__exit__(None, None, None)
        raise
    assert steps.num_steps > 1
    assert mode.num_operations > 1000


@pytest.mark.parametrize("kind", ["padded", "key adapters, packed", "key adapters, padded, checkpointed"])
def test_known_positions_change_no_bit(
    kind: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, monitored norms and weights are those of a run in which Llava itself looks for the image tokens."""
    fields = {**INSTRUCT, **KINDS[kind], "dataset_name": str(data), "logging_steps": 1}
    fields |= {"model_name_or_path": model_folder(kind, make_model_folder)}
    if "key adapters" in kind:
        fields |= {"key_mmd_weight": 0.1, "key_gram_weight": 0.1}
    run(tmp_path, **fields, output_dir=str(tmp_path / "known"))

    monkeypatch.setattr(trainer_module, "images_at_positions", lambda *args: nullcontext())
    run(tmp_path, **fields, output_dir=str(tmp_path / "searched"))
    known, searched = read_steps(tmp_path / "known"), read_steps(tmp_path / "searched")
    assert len(known) > 1
    assert "norm/ratio" in known[0]
    for line, expected in zip(known, searched, strict=True):
        for name in expected:
            if not name.endswith(("runtime", "_per_second")):
                assert line[name] == expected[name], name
    (weights,) = (tmp_path / "known").glob("*model.safetensors")
    assert changed_weights(tmp_path / "known", tmp_path / "searched", weights.name) == set()


def test_image_features_of_another_number_than_the_positions_are_refused(
    make_model_folder: Callable[..., Path],
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    size = model.config.vision_config.image_size
    input_ids = torch.full((1, 9), model.config.image_token_id)
    positions = trainer_module.image_positions(input_ids, model.config.image_token_id)
    with (
        trainer_module.images_at_positions(model, positions),
        pytest.raises(ValueError, match="The batch has 9 image tokens and 4 image features"),
    ):
        model(input_ids=input_ids, pixel_values=torch.zeros(1, 3, size, size))
