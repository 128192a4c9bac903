"""Norm and turning of a question's tokens by layer, as the diagnostics define, measure and draw them."""

import io
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator


SINK_FACTOR = 10.0  # times as long as the median token of its modality
LINES: dict[str, dict[str, Any]] = {
    "visual": {"color": "#d55e00", "marker": "o"},
    "text": {"color": "#0072b2", "marker": "s"},
}
INK, FAINT, DASH = "#24292f", "#8c959f", (0, (5, 1.5))
STYLE: Any = {
    "font.size": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 8,
    "legend.frameon": False, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.3, "lines.markersize": 2.4,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
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


def draw(panel: str, model: Measured, without_norm: Measured | None) -> Figure:
    """One panel; lines without the norm are dashed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.7), layout="constrained")
        axis = figure.subplots()
        for modality, style in LINES.items():
            axis.plot(model[panel][modality], label=modality, **style)
            if without_norm is not None:
                axis.plot(without_norm[panel][modality], label=f"{modality}, without norm", linestyle=DASH, **style)
        axis.set(xlabel="layer", ylabel=PANELS[panel])
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if panel == "norm":
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            powers = LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,))
            axis.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else powers)
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.axhline(0, color=FAINT, linewidth=0.6, zorder=0)
        figure.legend(loc="outside upper left", ncols=2, handlelength=3, columnspacing=1)
        return figure


def to_svg(figure: Figure) -> str:
    """A drawing for a page, whose style can change its colours through the variables `--24292f` and so on."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    for colour in (INK, FAINT, *(line["color"] for line in LINES.values())):
        svg = svg.replace(colour, f"var(--{colour[1:]}, {colour})")
    return svg[svg.index("<svg") :]
