"""Norm and turning of a question's tokens by layer, as the diagnostics define and measure them."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


SINK_FACTOR = 10.0  # times as long as the median token of its modality
COLOURS = {"visual": "#d55e00", "text": "#0072b2"}
PANELS = {"norm": "norm of tokens", "turning": "turning, 1 − cosine"}
Measured = dict[str, dict[str, list[float]]]  # a value for each layer, by panel and modality


@torch.no_grad()
def measure(model: Any, processor: Any, inputs: Mapping[str, torch.Tensor]) -> Measured:
    """Means over visual and over text tokens of one question; special tokens and sinks are neither.

    Norms are of each layer's input and, last, of the last layer's output; turning is 1 - cosine of input and output.
    """
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []
    turns: list[torch.Tensor] = []

    def see(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        after = (output if isinstance(output, torch.Tensor) else output[0])[0].float()  # [S, hidden_size]
        before = (args[0] if args else kwargs["hidden_states"])[0].to(after)
        entering.append(before.norm(dim=-1).cpu())
        leaving.append(after.norm(dim=-1).cpu())
        turns.append(1 - torch.cosine_similarity(before, after, dim=-1).cpu())

    with ExitStack() as hooks:
        for layer in model.get_decoder().layers:
            hooks.enter_context(layer.register_forward_hook(see, with_kwargs=True))
        model.base_model(**inputs)
    norms, turning = torch.stack([*entering, leaving[-1]]), torch.stack(turns)  # [L + 1, S], [L, S]
    ids, tokenizer = inputs["input_ids"][0].cpu(), processor.tokenizer
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    is_special = torch.isin(ids, torch.tensor(sorted(special | set(tokenizer.all_special_ids))))
    is_image = ids == model.config.image_token_id
    measured: Measured = {panel: {} for panel in PANELS}
    for modality, mask in (("visual", is_image), ("text", ~is_image & ~is_special)):
        medians = norms[1:, mask].median(dim=-1, keepdim=True).values
        kept = mask.clone()
        kept[mask] = ~(norms[1:, mask] > SINK_FACTOR * medians).any(0)
        for panel, values in zip(PANELS, (norms, turning), strict=True):
            measured[panel][modality] = values[:, kept].mean(dim=1).tolist()
    return measured


def draw(model: Measured, without_norm: Measured | None) -> Figure:
    """Both panels; lines without the norm are dashed."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (panel, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for modality, colour in COLOURS.items():
            axis.plot(model[panel][modality], label=modality, color=colour, marker=".")
            if without_norm is not None:
                name = f"{modality}, without norm"
                axis.plot(without_norm[panel][modality], label=name, color=colour, marker=".", linestyle="--")
        axis.set(xlabel="layer", ylabel=label, yscale="log" if panel == "norm" else "linear")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.legend(frameon=False)
    return figure
