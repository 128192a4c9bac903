"""How training has changed the norm after the projector (Table 5 of "The Unseen Bias", arXiv 2512.08374)."""

from math import sqrt

import torch
from accelerate.utils import align_module_device
from transformers import PreTrainedModel

from diagnostics.parts import find_norm
from diagnostics.results import ProjectorNorm


DEFINITIONS = {
    "gain_l2": "L2 norm of the gain",
    "gain_mean_abs": "mean of |g_i|",
    "bias_l2": "L2 norm of the bias",
    "bias_mean_abs": "mean of |b_i|",
    "gain_start": "value of every g_i when the model was composed: T/√d, or 1 without alignment; b = 0",
    "gain_drift": "L2 norm of the gain minus its start",
    "gain_drift_relative": "the same over the L2 norm of the start",
    "yields": "norm of visual tokens that gain and bias imply, √(Σg² + Σb²): exact if the normalised coordinates have "
    "mean square 1 each and mean 0 over tokens",
}


def measure_projector_norm(model: PreTrainedModel) -> ProjectorNorm | None:
    """The measures of `DEFINITIONS`; `None` for a model whose projector does not end in a norm."""
    norm = find_norm(model)
    if norm is None:
        return None
    with align_module_device(norm):  # offloaded weights are on the meta device otherwise
        gain = norm.weight.detach().double().cpu()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double().cpu()
    target = getattr(model.config, "projector_norm_target", None)
    start = 1.0 if target is None else target / sqrt(len(gain))
    drift = torch.linalg.vector_norm(gain - start).item()
    return ProjectorNorm(
        gain_l2=gain.norm().item(),
        gain_mean_abs=gain.abs().mean().item(),
        bias_l2=bias.norm().item(),
        bias_mean_abs=bias.abs().mean().item(),
        gain_start=start,
        gain_drift=drift,
        gain_drift_relative=drift / (start * sqrt(len(gain))),
        yields=(gain.square().sum() + bias.square().sum()).sqrt().item(),
    )
