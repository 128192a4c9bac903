"""Measure and draw the L2 norm and the turning of a question's tokens at each layer, as the diagnostics do."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


# A token is an attention sink if its norm is more than this many times the median norm of its modality.
SINK_FACTOR = 10.0
COLOURS = {"image": "#d55e00", "text": "#0072b2"}
PANELS = {"norm": "L2 norm of tokens", "turning": "turning, 1 − cosine"}
# A value for each layer, by panel ("norm", "turning"), then by modality ("image", "text").
Measured = dict[str, dict[str, list[float]]]


def measure(model: Any, processor: Any, inputs: Mapping[str, torch.Tensor]) -> Measured:
    """Means over the image tokens and over the text tokens of one question, without special tokens and sinks.

    The norm is that of each layer's input and, as the last value, of the last layer's output. The turning of a layer
    is 1 - cosine of its input and output.
    """
    norms, turning = run_layers(model, inputs)  # [num_layers + 1, num_tokens], [num_layers, num_tokens]
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
    """Run the model once, and record norm and turning of every token at each layer.

    Returns:
        Norms, `(num_layers + 1, num_tokens)`, and turning, `(num_layers, num_tokens)`.
    """
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []
    turning: list[torch.Tensor] = []

    def record(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        after = output if isinstance(output, torch.Tensor) else output[0]
        before = args[0] if args else kwargs["hidden_states"]
        after = after[0].float()  # [num_tokens, hidden_size]
        before = before[0].to(after)  # to the same device and dtype
        entering.append(before.norm(dim=-1).cpu())
        leaving.append(after.norm(dim=-1).cpu())
        turning.append(1 - torch.cosine_similarity(before, after, dim=-1).cpu())

    with ExitStack() as hooks:
        for layer in model.get_decoder().layers:
            hooks.enter_context(layer.register_forward_hook(record, with_kwargs=True))
        model.base_model(**inputs)
    return torch.stack([*entering, leaving[-1]]), torch.stack(turning)


def is_special_token(processor: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Mask of the special tokens, such as those of the chat format, `(num_tokens,)`."""
    tokenizer = processor.tokenizer
    special_ids = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special_ids.add(token_id)
    return torch.isin(input_ids, torch.tensor(sorted(special_ids)))


def without_sinks(norms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A modality's mask, `(num_tokens,)`, without the tokens that are attention sinks after any layer."""
    norms_after_layers = norms[1:, mask]  # [num_layers, tokens of the modality]
    medians = norms_after_layers.median(dim=-1, keepdim=True).values
    is_sink = (norms_after_layers > SINK_FACTOR * medians).any(dim=0)

    kept = mask.clone()
    kept[mask] = ~is_sink
    return kept


def draw(with_norm: Measured, without_norm: Measured | None) -> Figure:
    """Draw both panels. Dashed lines show the model without its norm, if it has one."""
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
