"""How much of the loss's gradient reaches the projector, the vision encoder and the embeddings, with GWC and without.

The compensation of "The Unseen Bias" (arXiv 2512.08374, eq. 12, 24-26) changes the gradient at the norm's input by a
factor of `1 / max(mean|gain|, 1e-3)` and nothing else.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.capture import classify, find_encoder, find_projector
from diagnostics.projector_norm import find_norm
from modeling_normllava.modeling_normllava import Float32LayerNorm, GlobalWeightCompensatedLayerNorm


DEFINITIONS = {
    "loss": "mean cross-entropy of the next token over the ordinary text tokens from the first answer on, or where "
    "there is none past the first picture; mean over a batch of up to 4 samples, of which those without such a token "
    "are left out",
    "projector_input": "L2 norm of the loss's gradient at what enters the projector, all tokens together",
    "vision_encoder": "L2 norm of the loss's gradient over all parameters of the vision encoder",
    "visual_embeddings": "L2 norm of the loss's gradient at the visual tokens that enter the decoder",
    "text_embeddings": "the same at all other tokens that enter the decoder",
}


@contextmanager
def _norm_as(model: PreTrainedModel, compensated: bool) -> Iterator[None]:
    """The projector's norm with or without compensation, with the same parameters."""
    projector, norm = find_projector(model), find_norm(model)
    assert projector is not None
    assert norm is not None
    kind = GlobalWeightCompensatedLayerNorm if compensated else Float32LayerNorm
    with torch.device("meta"):
        other = kind(len(norm.weight), norm.eps)
    other.weight, other.bias = norm.weight, norm.bias
    projector.norm = other
    try:
        yield
    finally:
        projector.norm = norm


def measure_gradients(
    model: PreTrainedModel, batch: Sequence[tuple[dict[str, Any], int]], special_ids: Iterable[int] = ()
) -> dict[str, dict[str, float]] | None:
    """The numbers of `DEFINITIONS` under `"compensated"` and `"plain"`; of a model whose projector does not end in a
    norm, under `"no norm"`; `None` if no sample has a token to be predicted.

    Weights are only read, and have no gradient after it. Quantized encoders have none for their weights: then
    `vision_encoder` is left out.

    Args:
        model: The model.
        batch: Inputs of one sample each, `input_ids` of shape `(1, S)`, and the position that its loss begins at.
        special_ids: As in [`Probe`].
    """
    samples = [_Sample(model, inputs, start, special_ids) for inputs, start in batch]
    samples = [sample for sample in samples if len(sample.targets)]
    if not samples:
        return None
    if find_norm(model) is None:
        return {"no norm": _gradient_norms(model, samples)}
    measured = {}
    for name, compensated in (("compensated", True), ("plain", False)):
        with _norm_as(model, compensated):
            measured[name] = _gradient_norms(model, samples)
    return measured


class _Sample:
    """Inputs of one sample, which of its positions are visual, and which tokens are to be predicted."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any], start: int, special_ids: Iterable[int]) -> None:
        tokens = classify(model, inputs, special_ids)
        self.inputs, self.visual = inputs, tokens.visual
        self.targets = (tokens.text & (torch.arange(len(tokens.text)) >= max(start, 1))).nonzero()[:, 0]


def _gradient_norms(model: PreTrainedModel, samples: Sequence[_Sample]) -> dict[str, float]:
    encoder, projector = find_encoder(model), find_projector(model)
    weights = [] if encoder is None else [weight for weight in encoder.parameters() if weight.is_floating_point()]
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in required:
        parameter.requires_grad_(False)
    for parameter in weights or [model.get_input_embeddings().weight]:  # something has to, for tokens to have any
        parameter.requires_grad_(True)
    sums: dict[str, torch.Tensor] = {}
    weight_sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    losses = []
    try:
        for sample in samples:
            loss, squares, gradients = _sample_gradients(model, projector, weights, sample)
            losses.append(loss)
            for name, square in squares.items():
                # The batch's loss is the mean over its samples.
                sums[name] = sums.get(name, torch.zeros(())) + square / len(samples) ** 2
            for total, gradient in zip(weight_sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient.float() / len(samples)
    finally:
        for parameter, before in required.items():
            parameter.requires_grad_(before)
    norms = {name: square.sqrt().item() for name, square in sums.items()}
    if weight_sums:
        norms["vision_encoder"] = torch.stack([total.norm().cpu() for total in weight_sums]).norm().item()
    return {"loss": sum(losses) / len(losses), **norms}


def _sample_gradients(
    model: PreTrainedModel, projector: nn.Module | None, weights: list[nn.Parameter], sample: _Sample
) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Loss, squared gradient norms at the watched tokens, and gradients of the weights, of one sample."""
    seen: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))

        return hook

    hooks = [model.get_decoder().layers[0].register_forward_pre_hook(see("embeddings"), with_kwargs=True)]
    if projector is not None:
        hooks.append(projector.register_forward_pre_hook(see("projector_input"), with_kwargs=True))
    try:
        with torch.enable_grad():
            logits = model(**sample.inputs).logits[0]  # [S, vocab_size]
    finally:
        for hook in hooks:
            hook.remove()
    targets = sample.targets.to(logits.device)
    input_ids = sample.inputs["input_ids"][0].to(logits.device)
    loss = nn.functional.cross_entropy(logits[targets - 1].float(), input_ids[targets])
    places = [value for value in seen.values() if value.requires_grad]
    gradients = torch.autograd.grad(loss, [*places, *weights], allow_unused=True)
    squares = {}
    by_place = dict(zip([id(place) for place in places], gradients[: len(places)], strict=True))
    for name, value in seen.items():
        gradient = by_place.get(id(value))
        if gradient is None:
            continue
        per_token = gradient.float().square().sum(-1).cpu()
        if name == "projector_input":
            squares[name] = per_token.sum()
        else:
            squares["visual_embeddings"] = per_token[0, sample.visual].sum()
            squares["text_embeddings"] = per_token[0, ~sample.visual].sum()
    return loss.item(), squares, list(gradients[len(places) :])
