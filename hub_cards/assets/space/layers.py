"""Norm and turning of a question's tokens by layer, as the diagnostics define and measure them."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


# A token is an attention sink if its norm is that many times the median of its modality.
SINK_FACTOR = 10.0
COLOURS = {"image": "#d55e00", "text": "#0072b2"}
PANELS = {"norm": "L2 norm of tokens", "turning": "turning, 1 − cosine"}
# A value for each layer, by panel and modality.
Measured = dict[str, dict[str, list[float]]]


def measure(model: Any, processor: Any, inputs: Mapping[str, torch.Tensor]) -> Measured:
    """Means over image tokens and over text tokens of one question; special tokens and sinks are neither.

    Norms are of each layer's input and, last, of the last layer's output; turning is 1 - cosine of input and output.
    """
    norms, turning = run_layers(model, inputs)  # [L + 1, S], [L, S]
    input_ids = inputs["input_ids"][0].cpu()
    is_image = input_ids == model.config.image_token_id
    masks = {"image": is_image, "text": ~is_image & ~is_special_token(processor, input_ids)}

    measured: Measured = {"norm": {}, "turning": {}}
    for modality, mask in masks.items():
        kept = without_sinks(norms, mask)
        measured["norm"][modality] = norms[:, kept].mean(dim=1).tolist()
        measured["turning"][modality] = turning[:, kept].mean(dim=1).tolist()
    return measured


@torch.no_grad()
def run_layers(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of one pass, `(num_layers + 1, num_tokens)`, and its turning, `(num_layers, num_tokens)`."""
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []
    turning: list[torch.Tensor] = []

    def record(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        after = output if isinstance(output, torch.Tensor) else output[0]
        before = args[0] if args else kwargs["hidden_states"]
        after = after[0].float()  # [S, hidden_size]
        before = before[0].to(after)
        entering.append(before.norm(dim=-1).cpu())
        leaving.append(after.norm(dim=-1).cpu())
        turning.append(1 - torch.cosine_similarity(before, after, dim=-1).cpu())

    with ExitStack() as hooks:
        for layer in model.get_decoder().layers:
            hooks.enter_context(layer.register_forward_hook(record, with_kwargs=True))
        model.base_model(**inputs)
    return torch.stack([*entering, leaving[-1]]), torch.stack(turning)


def is_special_token(processor: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens are special ones, such as those of the chat format, `(num_tokens,)`."""
    tokenizer = processor.tokenizer
    special = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(token_id)
    return torch.isin(input_ids, torch.tensor(sorted(special)))


def without_sinks(norms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A modality's mask, `(num_tokens,)`, without the tokens that become attention sinks after a layer."""
    after_layers = norms[1:, mask]  # [L, tokens of the modality]
    medians = after_layers.median(dim=-1, keepdim=True).values
    kept = mask.clone()
    kept[mask] = ~(after_layers > SINK_FACTOR * medians).any(dim=0)
    return kept


def draw(with_norm: Measured, without_norm: Measured | None) -> Figure:
    """Both panels; lines without the norm are dashed."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (panel, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for modality, colour in COLOURS.items():
            axis.plot(with_norm[panel][modality], label=modality, color=colour, marker=".")
            if without_norm is not None:
                name = f"{modality}, without norm"
                axis.plot(without_norm[panel][modality], label=name, color=colour, marker=".", linestyle="--")
        axis.set(xlabel="layer", ylabel=label, yscale="log" if panel == "norm" else "linear")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.legend(frameon=False)
    return figure
