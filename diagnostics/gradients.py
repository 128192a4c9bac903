"""How much of the loss's gradient reaches the projector, the vision encoder and the embeddings, with GWC and without.

The compensation of "The Unseen Bias" (arXiv 2512.08374, eq. 12, 24-26) changes the gradient at the norm's input by a
factor of `1 / max(mean|gain|, 1e-3)` and nothing else.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.hooks import InterfaceHooks
from diagnostics.parts import find_encoder, find_norm
from diagnostics.results import GradientNorms, Gradients
from diagnostics.samples import Answered
from modeling_normllava.modeling_normllava import Float32LayerNorm, GlobalWeightCompensatedLayerNorm


DEFINITIONS = {
    "loss": "mean next-token cross-entropy over the tokens of the training loss: those that the chat template marks "
    "as the assistant's, or if it marks none, the first answer up to the end of its turn; mean over a batch of at "
    "most 4 samples with an answer",
    "projector_input": "L2 norm of the loss's gradient at the projector's input, over all tokens",
    "vision_encoder": "L2 norm of the loss's gradient over all parameters of the vision encoder",
    "visual_embeddings": "L2 norm of the loss's gradient at the visual tokens that enter the decoder",
    "text_embeddings": "the same at all other tokens that enter the decoder",
}


@contextmanager
def _norm_as(model: PreTrainedModel, compensated: bool) -> Iterator[None]:
    """The projector's norm with or without compensation, with the same parameters."""
    norm = find_norm(model)
    assert norm is not None
    # PEFT wraps a projector that it trains a copy of: what is set on the wrapper changes nothing.
    holder = next(module for module in model.modules() if module._modules.get("norm") is norm)
    kind = GlobalWeightCompensatedLayerNorm if compensated else Float32LayerNorm
    with torch.device("meta"):
        other = kind(len(norm.weight), norm.eps)
    other.weight, other.bias = norm.weight, norm.bias
    holder.norm = other
    try:
        yield
    finally:
        holder.norm = norm


def measure_gradients(model: PreTrainedModel, batch: Sequence[Answered], title: str | None = None) -> Gradients | None:
    """The numbers of `DEFINITIONS` under `"compensated"` and `"plain"`; for a model whose projector does not end in a
    LayerNorm, under `"no norm"` or its `projector_norm`; `None` if no sample has a token to predict.

    Weights are not changed and have no gradient afterwards. Quantized encoder weights have no gradients: then
    `vision_encoder` is left out. With a `title`, progress is shown.
    """
    batch = [sample for sample in batch if len(_targets(sample))]
    if not batch:
        return None
    arm = getattr(model.config, "projector_norm", "none")
    arms: dict[str, bool | None] = {"no norm" if arm == "none" else arm: None}
    if arm in ("gwc", "layernorm"):  # one can stand in for the other
        arms = {"compensated": True, "plain": False}
    norms = {}
    with tqdm(total=len(arms) * len(batch), desc=title, unit="sample", disable=title is None) as progress:
        for name, compensated in arms.items():
            with nullcontext() if compensated is None else _norm_as(model, compensated):
                norms[name] = _gradient_norms(model, batch, progress)
    return Gradients(len(batch), sum(len(_targets(sample)) for sample in batch), norms)


def _targets(sample: Answered) -> torch.Tensor:
    """Positions of the tokens to predict, `(num_targets,)`; the sample's first token can't be predicted."""
    positions = sample.targets.nonzero()[:, 0]
    return positions[positions > 0]


@contextmanager
def _needing_gradients(model: PreTrainedModel, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which only these parameters require gradients."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in required:
        parameter.requires_grad_(False)
    for parameter in weights:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, before in required.items():
            parameter.requires_grad_(before)


@torch.enable_grad()
def _gradient_norms(model: PreTrainedModel, batch: Sequence[Answered], progress: tqdm) -> GradientNorms:
    encoder = find_encoder(model)
    weights = [] if encoder is None else [weight for weight in encoder.parameters() if weight.is_floating_point()]
    sums: dict[str, torch.Tensor] = {}
    weight_sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    losses = []
    # Some parameter must require a gradient, or the tokens have none.
    with _needing_gradients(model, weights or [model.get_input_embeddings().weight]):
        for sample in batch:
            loss, squares, gradients = _sample_gradients(model, weights, sample)
            losses.append(loss)
            for name, square in squares.items():
                # The batch's loss is the mean over its samples.
                sums[name] = sums.get(name, torch.zeros(())) + square / len(batch) ** 2
            for total, gradient in zip(weight_sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient.float() / len(batch)
            progress.update()
    norms = {name: square.sqrt().item() for name, square in sums.items()}
    if weight_sums:
        norms["vision_encoder"] = torch.stack([total.norm().cpu() for total in weight_sums]).norm().item()
    return GradientNorms(loss=sum(losses) / len(losses), **norms)


def _sample_gradients(
    model: PreTrainedModel, weights: list[nn.Parameter], sample: Answered
) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Loss, squared gradient norms at the watched tokens, and gradients of the weights, of one sample."""
    inputs = sample.for_model(model)
    seen: list[tuple[str, torch.Tensor]] = []  # a place several times where tiles pass one by one

    def see(place: str, features: torch.Tensor) -> None:
        if place in ("projector_input", "decoder") and features.requires_grad:
            seen.append((place, features))

    with InterfaceHooks(model, see):
        logits = model(**inputs).logits[0]  # [S, vocab_size]
    targets = _targets(sample).to(logits.device)
    input_ids = inputs["input_ids"][0].to(logits.device)
    loss = nn.functional.cross_entropy(logits[targets - 1].float(), input_ids[targets])
    gradients = torch.autograd.grad(loss, [*(features for _, features in seen), *weights], allow_unused=True)
    squares: dict[str, torch.Tensor] = {}
    for (place, _), gradient in zip(seen, gradients, strict=False):
        if gradient is None:
            continue
        per_token = gradient.float().square().sum(-1).cpu()
        if place == "decoder":
            squares["visual_embeddings"] = per_token[0, sample.tokens.visual].sum()
            squares["text_embeddings"] = per_token[0, ~sample.tokens.visual].sum()
        else:
            squares[place] = squares.get(place, torch.zeros(())) + per_token.sum()
    return loss.item(), squares, list(gradients[len(seen) :])
