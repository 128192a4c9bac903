"""The compensated norm computes the paper's formula, in every dtype and setting that training uses."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modeling_normllava import GlobalWeightCompensatedLayerNorm


HIDDEN_SIZE = 48
EPS = 1e-5


def make_norm(gain: float = 0.0134, dtype: torch.dtype = torch.float32) -> GlobalWeightCompensatedLayerNorm:
    """A norm with a bias and with gains around `gain`, every seventh of which is negative, as after some training.

    The default gain is that of Qwen2.5-7B. Each call seeds torch, also for what a test draws after the call.
    """
    torch.manual_seed(0)
    norm = GlobalWeightCompensatedLayerNorm(HIDDEN_SIZE, eps=EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(gain * (1 + 0.3 * torch.randn(HIDDEN_SIZE)))
        norm.weight[::7] *= -1
        norm.bias.copy_(0.01 * torch.randn(HIDDEN_SIZE))
    return norm


def paper_gradients(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, gain and bias by eq. 22 to 26 of the paper (arXiv 2512.08374), in float64.

    The forward pass is LayerNorm's. In the backward pass, the gradient at the normalised input is divided by the mean
    of the absolute gains, which is at least δ = 0.001. A hook does this, as in the paper's App. D.
    """
    x = hidden_states.detach().double().requires_grad_()
    gain = weight.detach().double().requires_grad_()
    offset = bias.detach().double().requires_grad_()
    mean_gain = gain.detach().abs().mean().clamp(min=1e-3)

    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normalised = centred / (variance + EPS).sqrt()
    normalised.register_hook(lambda gradient: gradient / mean_gain)
    output = normalised * gain + offset
    output.backward(grad_output.double())
    return x.grad, gain.grad, offset.grad


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the error over that of the expected tensor."""
    error = actual.double() - expected
    return (error.norm() / expected.norm()).item()


def assert_gradients_are_those_of_the_paper(
    norm: GlobalWeightCompensatedLayerNorm, x: torch.Tensor, grad_output: torch.Tensor
) -> None:
    """Compare `paper_gradients` with the gradients that a backward pass has left in a float64 norm and its input."""
    input_gradient, gain_gradient, bias_gradient = paper_gradients(x, norm.weight, norm.bias, grad_output)
    assert relative_error(x.grad, input_gradient) < 1e-15
    assert relative_error(norm.weight.grad, gain_gradient) < 1e-15
    assert relative_error(norm.bias.grad, bias_gradient) < 1e-15


@pytest.mark.parametrize("gain", [1.0, 0.0134, 1e-5], ids=["large", "that of Qwen2.5-7B", "below δ = 0.001"])
def test_gradients_are_those_of_the_paper(gain: float) -> None:
    norm = make_norm(gain, torch.float64)
    x = 30 * torch.randn(5, 7, HIDDEN_SIZE, dtype=torch.float64)  # a standard deviation far from 1
    x.requires_grad_()
    grad_output = torch.randn(5, 7, HIDDEN_SIZE, dtype=torch.float64)
    norm(x).backward(grad_output)
    assert_gradients_are_those_of_the_paper(norm, x, grad_output)


def test_a_frozen_norm_gives_the_same_input_gradient() -> None:
    norm = make_norm()
    x = torch.randn(5, HIDDEN_SIZE, requires_grad=True)
    grad_output = torch.randn(5, HIDDEN_SIZE)
    (expected,) = torch.autograd.grad(norm(x), x, grad_output)
    norm.requires_grad_(False)
    (with_frozen_norm,) = torch.autograd.grad(norm(x), x, grad_output)
    assert torch.equal(with_frozen_norm, expected)


def test_the_output_is_that_of_layer_norm() -> None:
    norm = make_norm()
    x = 30 * torch.randn(5, 7, HIDDEN_SIZE)
    expected = nn.functional.layer_norm(x, (HIDDEN_SIZE,), norm.weight, norm.bias, EPS)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=0)


def test_second_derivatives_are_those_of_finite_differences() -> None:
    norm = make_norm(gain=0.2, dtype=torch.float64)
    x = torch.randn(3, HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(norm, x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_checkpointing_are_those_of_the_paper(use_reentrant: bool) -> None:
    norm = make_norm(dtype=torch.float64)
    x = torch.randn(8, HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    grad_output = torch.randn(8, HIDDEN_SIZE, dtype=torch.float64)
    checkpoint(norm, x, use_reentrant=use_reentrant).backward(grad_output)
    assert_gradients_are_those_of_the_paper(norm, x, grad_output)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_gradients_of_low_precision_inputs_are_those_of_the_paper(dtype: torch.dtype, tolerance: float) -> None:
    norm = make_norm().to(dtype)
    assert torch.equal(norm.weight, make_norm().weight)  # the gain stays float32, unrounded
    x = (30 * torch.randn(64, HIDDEN_SIZE)).to(dtype).requires_grad_()
    # This gradient is so small that its product with the gain would underflow in float16.
    grad_output = (1e-5 * torch.randn(64, HIDDEN_SIZE)).to(dtype)
    output = norm(x)
    output.backward(grad_output)
    assert output.dtype == dtype
    assert x.grad.dtype == dtype

    input_gradient, gain_gradient, bias_gradient = paper_gradients(x, norm.weight, norm.bias, grad_output)
    # The input's gradient is so small that float16 has few bits for it. So the expected gradient is rounded too.
    assert relative_error(x.grad, input_gradient.to(dtype).double()) < tolerance
    assert relative_error(norm.weight.grad, gain_gradient) < tolerance
    assert relative_error(norm.bias.grad, bias_gradient) < tolerance


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_norm_compiles_into_one_graph(backend: str) -> None:
    norm = make_norm()
    x = torch.randn(8, HIDDEN_SIZE, requires_grad=True)
    grad_output = torch.randn(8, HIDDEN_SIZE)
    compiled_norm = torch.compile(norm, fullgraph=True, backend=backend)
    compiled_norm(x).backward(grad_output)
    input_gradient, _, _ = paper_gradients(x, norm.weight, norm.bias, grad_output)
    assert relative_error(x.grad, input_gradient) < 1e-5
