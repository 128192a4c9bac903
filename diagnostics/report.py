"""The report of one or several models as Markdown and as one HTML file, written from `report.json` and the plots."""

import base64
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from diagnostics import attention, attraction, embeddings, gradients, interface, key_space, projector_norm, update_rate
from diagnostics.norms import SINK_FACTOR


STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto } code { font-size: 0.9em }"""
Model = dict[str, Any]


def escape(text: str) -> str:
    """Text from a model or its data, so that neither Markdown nor HTML reads anything into it."""
    return "".join(c if c.isalnum() or c in " ./',-" else f"&#{ord(c)};" for c in text)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits; a dash for what is not there."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def with_interval(entry: dict[str, Any], digits: int = 3) -> str:
    """A mean with its 95% interval."""
    if entry["interval"] is None:
        return number(entry["mean"], digits)
    low, high = entry["interval"]
    return f"{number(entry['mean'], digits)} ({number(low, digits)} to {number(high, digits)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(model: Model) -> str:
    """The answers to what a reader came for, in four sentences."""
    ratio, layers = model["interface"]["ratio"], model["layers"]
    rates = [number(layers[modality]["update_rate"]["mean"]) for modality in ("visual", "text")]
    gap = layers["mean_gap"]
    if gap["interval"] is None:
        pace = "on one sample, which has no spread"
    elif gap["interval"][0] > 0:
        pace = "so visual tokens turn **more slowly**"
    elif gap["interval"][1] < 0:
        pace = "so visual tokens turn **faster**"
    else:
        pace = f"a difference that {model['num_samples']} samples can't tell from none"
    sentences = [
        f"Visual tokens enter the decoder **{with_interval(ratio)} times** as long as text tokens.",
        f"A layer turns them by {rates[0]} (1 − cosine) and text tokens by {rates[1]}, {pace}.",
    ]
    seen, keys = model["attention"], model["key_space"]
    if seen is not None:
        mass, even = (_mean(of["mass"]["mean"]) for of in (seen["with_sinks"], seen["with_sinks"]["evenly_spread"]))
        sentences.append(
            f"Of the text's attention {mass:.0%} falls on the picture, against {even:.0%} if it were evenly spread."
        )
    if keys is not None:
        mmd, baseline, p_value = _mean(keys["mmd"]), _mean(keys["mmd_baseline"]), max(keys["p_value"])
        sentences.append(
            f"The keys are {number(mmd)} apart in MMD² (p at most {number(p_value, 1)} in every layer), random halves "
            f"of one modality {number(baseline, 2)}."
        )
    return f"- **{escape(model['name'])}**: " + " ".join(sentences)


def _interface(models: Sequence[Model]) -> str:
    rows = []
    for place in interface.DEFINITIONS:
        for model in models:
            entry = model["interface"].get(place)
            if entry is None:
                continue
            rows.append(
                [
                    place,
                    escape(model["name"]),
                    with_interval(entry) if place != "vocabulary" else number(entry["mean"]),
                    *(number(entry[name]) for name in ("std", "median", "p95")),
                    f"{entry['num_tokens']:,}",
                    str(entry["width"]),
                    number(entry["rms"]),
                ]
            )
    header = ["tokens", "model", "mean norm (95% interval)", "std", "median", "95%", "n", "width", "RMS"]
    ratios = [
        [
            escape(m["name"]),
            with_interval(m["interface"]["ratio"]),
            with_interval(m["interface"]["ratio_to_vocabulary"]),
        ]
        for m in models
    ]
    return f"{table(header, rows)}\n\n{table(['visual over', 'text at the decoder', 'vocabulary (T)'], ratios)}"


def _layers(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        for modality in ("visual", "text"):
            curves = model["layers"][modality]
            rows.append(
                [
                    escape(model["name"]),
                    modality,
                    with_interval(curves["update_rate"]),
                    *(number(_mean(curves[name]["mean"])) for name in ("update_ratio", "update_cosine", "angle")),
                    with_interval(model["layers"]["mean_gap"]) if modality == "visual" else "",
                ]
            )
    header = [
        "means over layers",
        "tokens",
        "1 − cosine",
        "‖u‖/‖h‖",
        "cos(u, h)",
        "angle, eq. 8 (°)",
        "gap of cosines",
    ]
    return table(header, rows)


def _projector_norm(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        values = model["projector_norm"]
        cells = ["–"] * len(projector_norm.DEFINITIONS)
        if values is not None:
            cells = [number(values[name], 4) for name in projector_norm.DEFINITIONS]
        rows.append([escape(model["name"]), *cells])
    return table(["model", *projector_norm.DEFINITIONS], rows)


def _attention(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        seen = model["attention"]
        if seen is None:
            continue
        for title, curves in attention.attention_curves(seen).items():
            numbers = [
                number(_mean(curves[name]["mean"])) if name in curves else "–"
                for name in ("mass", "entropy", "bottom_third")
            ]
            rows.append([escape(model["name"]), title, *numbers])
    return table(["means over layers", "", "mass", "entropy", "bottom third"], rows)


def _key_space(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        keys = model["key_space"]
        if keys is None:
            continue
        for place, layer in enumerate(keys["layers"]):
            names = ("mmd", "mmd_baseline", "p_value", "js", "js_baseline", "probe")
            values = [number(keys[name][place]) for name in names]
            rows.append([escape(model["name"]), str(layer), str(keys["num_tokens"][place]), *values])
    header = ["model", "layer", "n of each", "MMD²", "within", "p", "JS (bits)", "within", "probe"]
    return table(header, rows)


def _gradients(models: Sequence[Model]) -> str:
    names = ("loss", "projector_input", "vision_encoder", "visual_embeddings", "text_embeddings")
    rows = [
        [escape(model["name"]), kind, *(number(values.get(name)) for name in names)]
        for model in models
        for kind, values in (model["gradients"] or {}).items()
    ]
    return table(["model", "norm", *(name.replace("_", " ") for name in names)], rows)


def _attraction(models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        for name in attraction.NUMBERS:
            values = model["attraction"][name]["mean"]
            rows.append(
                [
                    escape(model["name"]),
                    name.replace("_", " "),
                    number(_mean(values)),
                    number(min(values)),
                    number(max(values)),
                ]
            )
    return table(["model", "", "mean over layers", "lowest", "highest"], rows)


def _embeddings(models: Sequence[Model], base: Model | None) -> str:
    columns = ([base] if base is not None else []) + list(models)
    names = ("mean", "std", "max", "num_embeddings", "num_zero")
    rows = [[name.replace("_", " "), *(number(column["embeddings"][name], 4) for column in columns)] for name in names]
    for rank in range(max(len(column["embeddings"]["top"]) for column in columns)):
        cells = [column["embeddings"]["top"][rank] for column in columns]
        rows.append([f"{rank + 1}.", *(f"{escape(cell['token'])} {cell['norm']:.4f}" for cell in cells)])
    return table(["norm of embeddings", *(escape(column["name"]) for column in columns)], rows)


SECTIONS: list[tuple[str, Callable[[Sequence[Model]], str], dict[str, str], tuple[str, ...]]] = [
    ("How long tokens are on their way in", _interface, interface.DEFINITIONS, ()),
    ("Norm and turning by layer", _layers, update_rate.DEFINITIONS, ("layers.png",)),
    ("The norm behind the projector", _projector_norm, projector_norm.DEFINITIONS, ()),
    ("Where text looks", _attention, attention.DEFINITIONS, ("attention.png", "attention_maps.png")),
    ("Keys of visual and text tokens", _key_space, key_space.DEFINITIONS, ("keys.png",)),
    ("Gradients", _gradients, gradients.DEFINITIONS, ()),
    ("Do updates attract each other", _attraction, attraction.DEFINITIONS, ()),
]


def render_markdown(report: dict[str, Any], folder: Path) -> str:
    """The report as Markdown. Plots that are not in `folder` are left out."""
    models, base = report["models"], report["base"]
    excluded = table(
        ["model", "class", "dtype", "samples", "visual tokens", "text tokens", *models[0]["excluded"], "notes"],
        [
            [
                escape(m["name"]), m["class"], m["dtype"], str(m["num_samples"]),
                *(f"{m['num_tokens'][kind]:,}" for kind in ("visual", "text")),
                *(str(m["excluded"].get(reason, 0)) for reason in models[0]["excluded"]),
                escape("; ".join(m["notes"])) or "none",
            ]
            for m in models
        ],
    )  # fmt: skip
    parts = [
        "# Visual and text tokens in the decoder",
        f"{len(models)} model{'s' * (len(models) > 1)} on {report['num_samples']} questions about pictures "
        f"({escape(report['data'])}). Means within a sample, then over samples; 95% bootstrap intervals over samples.",
        "## In short",
        "\n".join(verdict(model) for model in models),
    ]
    definitions = []
    for title, render, meanings, plots in SECTIONS:
        parts += [f"## {title}", render(models)]
        parts += [f"![{title}]({plot})" for plot in plots if (folder / plot).exists()]
        definitions += [f"**{title}**", "\n".join(f"- *{name}*: {escape(text)}" for name, text in meanings.items())]
    parts += ["## Text embeddings", _embeddings(models, base)]
    definitions += [
        "**Text embeddings**",
        "\n".join(f"- *{n}*: {escape(t)}" for n, t in embeddings.DEFINITIONS.items()),
    ]
    parts += [
        "## What was measured and left out",
        excluded,
        "Left out of the numbers on visual and text tokens, but for gradients and where a definition says otherwise: "
        "padding; special tokens of the tokenizer and of the "
        "config (BOS, delimiters of chat and pictures); row ends that a model puts among a picture's features; sinks, "
        f"which are tokens over {SINK_FACTOR:g} times as long as the median of their modality in their sample behind "
        "some layer. "
        "All numbers are in float32, whatever the model's dtype.",
        f"Command: `{report['command'].replace('`', '')}`",
        "## Definitions",
        *definitions,
    ]
    return "\n\n".join(parts) + "\n"


def render_html(markdown: str, folder: Path) -> str:
    """The Markdown as one HTML file with its plots inside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)

    def inline(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / html.unescape(match[1])).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([\w.]+\.png)"', inline, body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Visual and text tokens in the decoder</title>\n<style>{STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )
