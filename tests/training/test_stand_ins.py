"""In a memory estimate, the stand-ins for bitsandbytes take as many bytes as bitsandbytes itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modeling_normllava import NormLlavaForConditionalGeneration
from training.modules.adapters import quantization_config
from training.modules.stand_ins import EightBitAdam, FourBitLinear, pack_layers
from training.plan import num_bytes


bitsandbytes = pytest.importorskip("bitsandbytes")


def bytes_of_quantized(layer: Any) -> int:
    """The bytes of a 4-bit weight of bitsandbytes, and of its scales, which may be quantized too."""
    state = layer.weight.quant_state
    scales = [state.absmax]
    scales_are_quantized = state.nested
    if scales_are_quantized:
        scales.append(state.state2.absmax)
    return num_bytes([layer.weight, *scales])


def layers_of_class(model: nn.Module, layer_class: type) -> dict[str, Any]:
    """The layers of a model that have this class, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, layer_class)}


@pytest.mark.parametrize("double_quant", [True, False])
def test_the_stand_ins_for_4_bit_layers_have_the_bytes_of_bitsandbytes(
    make_model_folder: Callable[..., Path], double_quant: bool
) -> None:
    config = quantization_config(torch.float32, double_quant=double_quant)
    options: dict[str, Any] = {"quantization_config": config, "device_map": {"": "cpu"}}
    quantized = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), **options)
    planned = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    pack_layers(planned.model.language_model.layers, double_quant)

    planned_layers = layers_of_class(planned, FourBitLinear)
    quantized_layers = layers_of_class(quantized, bitsandbytes.nn.Linear4bit)
    assert planned_layers.keys() == quantized_layers.keys()
    planned_bytes = sum(layer.weight.nbytes for layer in planned_layers.values())
    expected_bytes = sum(bytes_of_quantized(layer) for layer in quantized_layers.values())
    assert planned_bytes == pytest.approx(expected_bytes, rel=0.01)


def test_a_stand_in_keeps_no_unpacked_weights_for_the_backward_pass() -> None:
    layer = FourBitLinear(nn.Linear(64, 128), double_quant=True)  # the unpacked weights are [128, 64]
    inputs = torch.zeros(2, 3, 64, requires_grad=True)
    saved_shapes = []

    def note_shape(tensor: torch.Tensor) -> torch.Tensor:
        saved_shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_shape, lambda tensor: tensor):
        outputs = layer(inputs)
    assert outputs.shape == (2, 3, 128)
    assert (128, 64) not in saved_shapes
    outputs.sum().backward()
    assert inputs.grad is not None


def test_the_stand_in_for_8_bit_adam_has_the_bytes_of_bitsandbytes() -> None:
    # The states of embeddings and of small parameters stay in 32 bits. Both optimizers are told which parameters are
    # embeddings.
    embedding = nn.Embedding(100, 64)
    large = nn.Parameter(torch.zeros(100, 63))
    small = nn.Parameter(torch.zeros(70))
    parameters = [embedding.weight, large, small]
    planned = EightBitAdam(parameters, [embedding.weight])
    planned.step()

    optimizer = bitsandbytes.optim.AdamW8bit(parameters)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    optimizer.check_overrides()
    names = ("state1", "state2", "absmax1", "absmax2")  # without the codebooks, which all parameters share
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
        states = optimizer.state[parameter]
        expected = num_bytes(states[name] for name in names if name in states)
        assert num_bytes(planned.state[parameter].values()) == expected
