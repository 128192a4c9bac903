"""The report of one or several models as Markdown and as one HTML file, written from `report.json` and the plots."""

import base64
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from markdown_it import MarkdownIt

from diagnostics import attention, attraction, embeddings, gradients, interface, key_space, layers, projector_norm
from diagnostics.results import Attractions, Estimate, LanguageModel, ModelReport, Report
from diagnostics.tokens import SINK_FACTOR


STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto } code { font-size: 0.9em }"""


def escape(text: str) -> str:
    """Text from a model or its data, so that neither Markdown nor HTML reads anything into it."""
    return "".join(c if c.isalnum() or c in " ./',-" else f"&#{ord(c)};" for c in text)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits; a dash for what is not there."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def with_interval(estimate: Estimate, digits: int = 3) -> str:
    """A mean with its 95% interval."""
    if estimate.interval is None:
        return number(estimate.mean, digits)
    low, high = estimate.interval
    return f"{number(estimate.mean, digits)} ({number(low, digits)} to {number(high, digits)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(model: ModelReport) -> str:
    """The answers to what a reader came for, in four sentences."""
    visual, text, gap = model.layers.visual, model.layers.text, model.layers.mean_gap
    if gap.interval is None:
        pace = "on one sample, which has no spread"
    elif gap.interval[0] > 0:
        pace = "so visual tokens turn **more slowly**"
    elif gap.interval[1] < 0:
        pace = "so visual tokens turn **faster**"
    else:
        pace = f"a difference that {model.num_samples} samples can't tell from none"
    sentences = [
        f"Visual tokens enter the decoder **{with_interval(model.interface.ratio)} times** as long as text tokens.",
        f"A layer turns them by {number(visual.update_rate.mean)} (1 − cosine) and text tokens by "
        f"{number(text.update_rate.mean)}, {pace}.",
    ]
    if model.attention is not None:
        gaze = model.attention.with_sinks
        sentences.append(
            f"Of the text's attention {gaze.mass.overall:.0%} falls on the picture, against "
            f"{gaze.evenly_spread.mass.overall:.0%} if it were evenly spread."
        )
    if model.key_space is not None:
        keys = model.key_space
        sentences.append(
            f"The keys are {number(_mean(keys.mmd))} apart in MMD² (p at most {number(max(keys.p_value), 1)} in every "
            f"layer), random halves of one modality {number(_mean(keys.mmd_baseline), 2)}."
        )
    return f"- **{escape(model.name)}**: " + " ".join(sentences)


def _interface(models: Sequence[ModelReport]) -> str:
    rows = []
    for place in interface.DEFINITIONS:
        for model in models:
            norms = getattr(model.interface, place)
            if norms is None:
                continue
            rows.append(
                [
                    place,
                    escape(model.name),
                    with_interval(norms) if place != "vocabulary" else number(norms.mean),
                    *(number(value) for value in (norms.std, norms.median, norms.p95)),
                    f"{norms.num_tokens:,}",
                    str(norms.width),
                    number(norms.rms),
                ]
            )
    header = ["tokens", "model", "mean norm (95% interval)", "std", "median", "95%", "n", "width", "RMS"]
    ratios = [
        [escape(m.name), with_interval(m.interface.ratio), with_interval(m.interface.ratio_to_vocabulary)]
        for m in models
    ]
    return f"{table(header, rows)}\n\n{table(['visual over', 'text at the decoder', 'vocabulary (T)'], ratios)}"


def _layers(models: Sequence[ModelReport]) -> str:
    rows = []
    for model in models:
        for modality, gap in (("visual", with_interval(model.layers.mean_gap)), ("text", "")):
            turning = model.layers.of(modality)
            curves = (turning.update_ratio, turning.update_cosine, turning.angle)
            means = [number(curve.overall) for curve in curves]
            rows.append([escape(model.name), modality, with_interval(turning.update_rate), *means, gap])
    header = ["means over layers", "tokens", "1 − cosine", "‖u‖/‖h‖", "cos(u, h)", "angle, eq. 8 (°)",
              "gap of cosines"]  # fmt: skip
    return table(header, rows)


def _projector_norm(models: Sequence[ModelReport]) -> str:
    rows = []
    for model in models:
        cells = [number(getattr(model.projector_norm, name, None), 4) for name in projector_norm.DEFINITIONS]
        rows.append([escape(model.name), *cells])
    return table(["model", *projector_norm.DEFINITIONS], rows)


def _attention(models: Sequence[ModelReport]) -> str:
    rows = []
    for model in models:
        for title, gaze in ({} if model.attention is None else model.attention.gazes).items():
            curves = (gaze.mass, gaze.entropy, gaze.bottom_third)
            means = [number(None if curve is None else curve.overall) for curve in curves]
            rows.append([escape(model.name), title, *means])
    return table(["means over layers", "", "mass", "entropy", "bottom third"], rows)


def _key_space(models: Sequence[ModelReport]) -> str:
    rows = []
    for model in models:
        keys = model.key_space
        if keys is None:
            continue
        columns = (keys.mmd, keys.mmd_baseline, keys.p_value, keys.js, keys.js_baseline, keys.probe)
        for layer, count, *values in zip(keys.layers, keys.num_tokens, *columns, strict=True):
            rows.append([escape(model.name), str(layer), str(count), *(number(value) for value in values)])
    header = ["model", "layer", "n of each", "MMD²", "within", "p", "JS (bits)", "within", "probe"]
    return table(header, rows)


def _gradients(models: Sequence[ModelReport]) -> str:
    names = ("loss", "projector_input", "vision_encoder", "visual_embeddings", "text_embeddings")
    rows = [
        [escape(model.name), kind, *(number(getattr(norms, name)) for name in names)]
        for model in models
        for kind, norms in (model.gradients or {}).items()
    ]
    return table(["model", "norm", *(name.replace("_", " ") for name in names)], rows)


def _attraction(models: Sequence[ModelReport]) -> str:
    rows = []
    for model in models:
        for field in fields(Attractions):
            curve = getattr(model.attraction, field.name)
            numbers = (curve.overall, min(curve.mean), max(curve.mean))
            rows.append([escape(model.name), field.name.replace("_", " "), *(number(value) for value in numbers)])
    return table(["model", "", "mean over layers", "lowest", "highest"], rows)


def _embeddings(models: Sequence[ModelReport | LanguageModel]) -> str:
    names = ("mean", "std", "max", "num_embeddings", "num_zero")
    rows = [
        [name.replace("_", " "), *(number(getattr(model.embeddings, name), 4) for model in models)] for name in names
    ]
    for rank, tokens in enumerate(zip(*(model.embeddings.top for model in models), strict=True), 1):
        rows.append([f"{rank}.", *(f"{escape(entry.token)} {entry.norm:.4f}" for entry in tokens)])
    return table(["norm of embeddings", *(escape(model.name) for model in models)], rows)


SECTIONS: list[tuple[str, Callable[[Sequence[ModelReport]], str], dict[str, str], tuple[str, ...]]] = [
    ("How long tokens are on their way in", _interface, interface.DEFINITIONS, ()),
    ("Norm and turning by layer", _layers, layers.DEFINITIONS, ("layers.png",)),
    ("The norm behind the projector", _projector_norm, projector_norm.DEFINITIONS, ()),
    ("Where text looks", _attention, attention.DEFINITIONS, ("attention.png", "attention_maps.png")),
    ("Keys of visual and text tokens", _key_space, key_space.DEFINITIONS, ("keys.png",)),
    ("Gradients", _gradients, gradients.DEFINITIONS, ()),
    ("Do updates attract each other", _attraction, attraction.DEFINITIONS, ()),
]


def render_markdown(report: Report, folder: Path) -> str:
    """The report as Markdown. Plots that are not in `folder` are left out."""
    models = report.models
    reasons = list(models[0].excluded)
    excluded = table(
        ["model", "class", "dtype", "samples", "visual tokens", "text tokens", *reasons, "notes"],
        [
            [
                escape(m.name), m.class_, m.dtype, str(m.num_samples),
                *(f"{m.num_tokens[kind]:,}" for kind in ("visual", "text")),
                *(str(m.excluded.get(reason, 0)) for reason in reasons),
                escape("; ".join(m.notes)) or "none",
            ]
            for m in models
        ],
    )  # fmt: skip
    parts = [
        "# Visual and text tokens in the decoder",
        f"{len(models)} model{'s' * (len(models) > 1)} on {report.num_samples} questions about pictures "
        f"({escape(report.data)}). Means within a sample, then over samples; 95% bootstrap intervals over samples.",
        "## In short",
        "\n".join(verdict(model) for model in models),
    ]
    definitions = []
    for title, render, meanings, plots in SECTIONS:
        parts += [f"## {title}", render(models)]
        parts += [f"![{title}]({plot})" for plot in plots if (folder / plot).exists()]
        definitions += [f"**{title}**", "\n".join(f"- *{name}*: {escape(text)}" for name, text in meanings.items())]
    parts += ["## Text embeddings", _embeddings([*([] if report.base is None else [report.base]), *models])]
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
        f"Command: `{report.command.replace('`', '')}`",
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
