"""The compensated norm against the paper's formula, in every dtype and setting that training uses."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modeling_normllava import GlobalWeightCompensatedLayerNorm


HIDDEN_SIZE = 48
EPS = 1e-5


def make_norm(gain: float = 0.0134, dtype: torch.dtype = torch.float32) -> GlobalWeightCompensatedLayerNorm:
    """A norm with a gain around `gain` of both signs and a bias, as after some training."""
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
    """Output's gradients by eq. 22 to 26 in float64, with the hook on the normalised input that App. D describes."""
    x = hidden_states.detach().double().requires_grad_()
    g = weight.detach().double().requires_grad_()
    b = bias.detach().double().requires_grad_()
    centred = x - x.mean(-1, keepdim=True)
    x_hat = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    x_hat.register_hook(lambda grad: grad / g.detach().abs().mean().clamp(min=1e-3))
    (x_hat * g + b).backward(grad_output.double())
    return x.grad, g.grad, b.grad


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("gain", [1.0, 0.0134, 1e-5])  # the last is below the clamp
def test_gradients_are_the_papers(gain: float) -> None:
    norm = make_norm(gain, torch.float64)
    x = (30 * torch.randn(5, 7, HIDDEN_SIZE, dtype=torch.float64)).requires_grad_()
    grad_output = torch.randn(5, 7, HIDDEN_SIZE, dtype=torch.float64)
    output = norm(x)
    output.backward(grad_output)

    (with_frozen_norm,) = torch.autograd.grad(norm.requires_grad_(False)(x), x, grad_output)
    assert torch.equal(with_frozen_norm, x.grad)
    reference = nn.functional.layer_norm(x, (HIDDEN_SIZE,), norm.weight, norm.bias, EPS)
    torch.testing.assert_close(output, reference, rtol=0, atol=0)
    for actual, expected in zip(
        (x.grad, norm.weight.grad, norm.bias.grad),
        paper_gradients(x, norm.weight, norm.bias, grad_output),
        strict=True,
    ):
        assert relative_error(actual, expected) < 1e-15


def test_second_derivatives_are_those_of_the_gradients() -> None:
    norm = make_norm(gain=0.2, dtype=torch.float64)
    x = torch.randn(3, HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(norm, x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_checkpointing(use_reentrant: bool) -> None:
    norm = make_norm(dtype=torch.float64)
    x = torch.randn(8, HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    grad_output = torch.randn(8, HIDDEN_SIZE, dtype=torch.float64)
    checkpoint(norm, x, use_reentrant=use_reentrant).backward(grad_output)
    for actual, expected in zip(
        (x.grad, norm.weight.grad, norm.bias.grad),
        paper_gradients(x, norm.weight, norm.bias, grad_output),
        strict=True,
    ):
        assert relative_error(actual, expected) < 1e-15


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_low_precision_inputs(dtype: torch.dtype, tolerance: float) -> None:
    norm = make_norm().to(dtype)
    assert torch.equal(norm.weight, make_norm().weight)  # which stays float32
    x = (30 * torch.randn(64, HIDDEN_SIZE)).to(dtype).requires_grad_()
    grad_output = (1e-5 * torch.randn(64, HIDDEN_SIZE)).to(dtype)  # small enough to underflow if scaled after float16
    output = norm(x)
    output.backward(grad_output)
    assert output.dtype == x.grad.dtype == dtype
    expected, expected_gain, expected_bias = paper_gradients(x, norm.weight, norm.bias, grad_output)
    # The input's gradient is about 1e-6 here, which float16 holds with few bits: compare what it would be rounded to.
    assert relative_error(x.grad, expected.to(dtype).double()) < tolerance
    assert relative_error(norm.weight.grad, expected_gain) < tolerance
    assert relative_error(norm.bias.grad, expected_bias) < tolerance


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph(backend: str) -> None:
    norm = make_norm()
    x = torch.randn(8, HIDDEN_SIZE, requires_grad=True)
    grad_output = torch.randn(8, HIDDEN_SIZE)
    torch.compile(norm, fullgraph=True, backend=backend)(x).backward(grad_output)
    expected, _, _ = paper_gradients(x, norm.weight, norm.bias, grad_output)
    assert relative_error(x.grad, expected) < 1e-5
