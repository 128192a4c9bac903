"""The report of one or several models in sentences, as Markdown, and as a self-contained page.

All three come from the same blocks of plain text, which each format escapes when it is written.
"""

import html
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diagnostics import (
    attention,
    attraction,
    embeddings,
    gradients,
    interface,
    key_space,
    layers,
    lens,
    projector_norm,
)
from diagnostics.results import (
    Attractions,
    ByLayer,
    Curve,
    Estimate,
    Gaze,
    LanguageModel,
    ModelReport,
    Prompted,
    Report,
    Space,
)
from diagnostics.statistics import difference
from diagnostics.tokens import SINK_FACTOR


TITLE = "Visual and text tokens in the decoder"
NO_DIFFERENCE = "no clear difference"
Value = Estimate | float | str | None
# What a table compares: a path in a model's results, or a function of the model.
Quantity = str | Callable[[ModelReport], Any]
DEFINITIONS = {
    "Norms up to the decoder": interface.DEFINITIONS,
    "Norm and turning": layers.DEFINITIONS,
    "The norm after the projector": projector_norm.DEFINITIONS,
    "Attention": attention.DEFINITIONS,
    "Keys and values": key_space.DEFINITIONS,
    "What visual tokens decode to": lens.DEFINITIONS,
    "Gradients": gradients.DEFINITIONS,
    "Attraction": attraction.DEFINITIONS,
    "Text embeddings": embeddings.DEFINITIONS,
}
# Names of fields in the report.
WORDS = {
    "encoder_output": "vision encoder's output",
    "projector_input": "projector's input",
    "projector_output": "projector's output",
    "visual_at_decoder": "visual tokens at the decoder",
    "text_at_decoder": "text tokens at the decoder",
    "text_in_prompt": "text tokens of the prompt",
    "vocabulary": "vocabulary (T)",
    "gain_l2": "L2 norm of the gain",
    "gain_mean_abs": "mean absolute gain",
    "bias_l2": "L2 norm of the bias",
    "bias_mean_abs": "mean absolute bias",
    "gain_start": "gain at the start",
    "gain_drift": "drift of the gain",
    "gain_drift_relative": "drift, relative",
    "yields": "norm that gain and bias yield",
    "update_correlation": "cosine of updates",
    "attraction_visual_to_text": "attraction of visual to text, κ",
    "attraction_text_to_visual": "attraction of text to visual, κ",
    "mmd": "MMD²",
    "js": "Jensen-Shannon",
    "p_value": "p",
    "num_embeddings": "rows",
    "num_zero": "rows that are zero",
    "std": "standard deviation",
    "max": "largest",
}


@dataclass(frozen=True)
class Figure:
    """A figure by its name, and its caption."""

    name: str
    caption: str


@dataclass(frozen=True)
class Table:
    """A table, the first column of which names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Terms:
    """Terms with their definitions."""

    entries: Mapping[str, str]


@dataclass(frozen=True)
class Fold:
    """A collapsible section."""

    title: str
    blocks: Sequence["Block"]


Block = str | Figure | Table | Terms | Fold
Chapter = tuple[str, list[Block]]


def escape(text: str) -> str:
    """Text from a model or its data, escaped for Markdown and HTML."""
    kept = (
        c if c.isalnum() or c in " ./',-()%;?" or (ord(c) > 127 and c.isprintable()) else f"&#{ord(c)};" for c in text
    )
    return "".join(kept).replace("&#58; ", ": ")  # a colon before a space is harmless


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, and none after the point from 1,000 on; a dash for a missing value."""
    if value is None or math.isnan(value):
        return "–"
    whole = isinstance(value, int) or abs(float(f"{value:.{digits}g}")) >= 1000
    shown = f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return shown.replace("-", "−", 1) if value < 0 else shown


def with_interval(estimate: Estimate) -> str:
    """A mean with its 95% interval, to two significant digits of the interval's width, five digits at most."""
    mean, *interval = _digits(estimate)
    return f"{mean} ({' to '.join(interval)})" if interval else mean


def _digits(estimate: Estimate) -> list[str]:
    """Mean, and both ends of the interval if there is one; as ± if it is too narrow for five digits."""
    if estimate.interval is None or not all(map(math.isfinite, (estimate.mean, *estimate.interval))):
        return [number(estimate.mean)]
    values = (estimate.mean, *estimate.interval)
    largest, width = max(map(abs, values)), values[2] - values[1]
    if width <= 1e-4 * largest:
        return [number(estimate.mean, 5), f"± {width / 2:.1g}"]
    places = 1 - math.floor(math.log10(width))
    if places > 6:
        shown = [f"{value:.1e}" for value in values]
    else:
        places = max(0, places)
        shown = [f"{round(value, places) + 0.0:,.{places}f}" for value in values]  # no "-0"
    return [re.sub(r"^-", "−", text) for text in shown]


def _percent(estimate: Estimate) -> str:
    scaled = estimate.interval and (100 * estimate.interval[0], 100 * estimate.interval[1])
    mean, *interval = _digits(Estimate(100 * estimate.mean, scaled, []))
    return f"{mean}% ({' to '.join(interval)}%)" if interval else f"{mean}%"


def summarize(report: Report) -> list[str]:
    """The main results in sentences: the data, then each model's results."""
    answers = [f"{model.name}: {text}" for model in report.models for text in headline(model).values()]
    return [_measured_on(report), *answers]


def headline(model: ModelReport) -> dict[str, str]:
    """One model's main results by topic."""
    found = {"Norm": _say_length(model), "Turning": _say_turning(model)}
    if model.attention is not None:
        gaze = model.attention.with_sinks
        found["Attention"] = (
            f"Of the text's attention {_percent(gaze.mass.overall)} falls on the picture, against "
            f"{_percent(gaze.evenly_spread.mass.overall)} for uniform attention; means over "
            f"{_count(len(model.attention.layers), 'layer')}."
        )
    if model.key_space is not None:
        found["Keys"] = _say_keys(model.key_space)
    return found


def pace(gap: Estimate) -> str | None:
    """How visual tokens turn compared with text, by a gap of cosines; `None` without an interval."""
    if gap.interval is None:
        return None
    low, high = gap.interval
    return "more slowly" if low > 0 else "faster" if high < 0 else NO_DIFFERENCE


def _say_length(model: ModelReport) -> str:
    groups = model.layers.groups
    return (
        f"Over {_count(model.num_pictures, 'picture')}, visual tokens enter the decoder with "
        f"{with_interval(model.interface.ratio)} times the norm of text tokens. In the "
        f"{_listed([group.name for group in groups])} of its layers: "
        f"{_listed([with_interval(group.norm_ratio) for group in groups])}."
    )


def _say_turning(model: ModelReport) -> str:
    groups = model.layers.groups
    if model.num_pictures == 1:
        gaps = "; ".join(f"{with_interval(group.gap)} in the {group.name}" for group in groups)
        return f"The gap of cosines is {gaps}. Without an interval this can't be told from no difference."
    gaps = "; ".join(f"{pace(group.gap)} in the {group.name}, {with_interval(group.gap)}" for group in groups)
    largest = model.layers.largest_gap
    text = (
        f"Visual tokens turn, compared with text tokens by the gap of cosines: {gaps}. The gap is largest at "
        f"layer {largest.layer}: {with_interval(largest.gap)}."
    )
    return text if len(model.prompts) < 2 else f"{text} {_say_prompts(model.prompts, [of.name for of in groups])}"


def _say_prompts(prompts: Sequence[Prompted], groups: Sequence[str]) -> str:
    told: dict[str, list[str]] = {}
    for name, gaps in zip(groups, zip(*(prompted.gaps for prompted in prompts), strict=True), strict=True):
        paces = {pace(gap) for gap in gaps}
        if {"more slowly", "faster"} <= paces:
            result = "the sign changes with the question"
        elif len(paces) > 1:
            result = "it is clear for some questions only"
        else:
            result = f"{'there is ' if NO_DIFFERENCE in paces else ''}{pace(gaps[0])} each time"
        told.setdefault(result, []).append(f"the {name}")
    results = "; ".join(f"in {_listed(names)} {result}" for result, names in told.items())
    fewest = min(prompted.num_pictures for prompted in prompts)
    return f"Asked in {len(prompts)} ways ({_count(fewest, 'picture')}), {results}."


def _say_keys(keys: Space) -> str:
    known = [value for value in keys.mmd_baseline if not math.isnan(value)]
    beside = (
        f"in 95% of random halves of the pictures, within a modality, it is below {number(sum(known) / len(known), 2)}"
        if known
        else "there are too few pictures to compare halves"
    )
    text = f"MMD² between keys of visual and text tokens is {with_interval(keys.mmd.overall)}; {beside}"
    if not keys.p_value:
        return f"{text}."
    low, high = min(keys.p_value), max(keys.p_value)
    shown = f"p is {number(low, 2)} in every layer" if low == high else f"p is {number(low, 2)} to {number(high, 2)}"
    ways = round(1 / (keys.smallest_p or 1))
    floor = f" ({number(low, 2)} is the smallest possible with {_count(ways, 'swap')})"
    return f"{text}; {shown}{floor if low == keys.smallest_p else ''}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _measured_on(report: Report) -> str:
    asked = f"{_count(report.num_samples, 'question')} about {_count(report.num_pictures, 'picture')}"
    text = f"{_count(len(report.models), 'model')} on {asked} ({report.data}). "
    if report.num_pictures == 1:
        return text + "With one picture there are no intervals."
    return text + "95% intervals over pictures are in brackets."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def compare(models: Sequence[ModelReport], quantities: Mapping[str, Quantity], title: str = "") -> Table:
    """A row for each quantity that some model has, and a column for each model; of two models, also the difference."""
    rows, differences = [], []
    for name, quantity in quantities.items():
        values = [_look(model, quantity) if isinstance(quantity, str) else quantity(model) for model in models]
        if any(value is not None for value in values):
            rows.append([name, *map(_show, values)])
            differences.append(_difference(values))
    header = [title, *(model.name for model in models)]
    if not any(differences):
        return Table(header, rows)
    return Table(
        [*header, "difference (second − first)"],
        [[*row, difference] for row, difference in zip(rows, differences, strict=True)],
    )


def _look(model: ModelReport, path: str) -> Value:
    """The value of a path in the results such as `layers.groups.0.gap`; of a curve, its mean over layers."""
    found: Any = model
    for step in path.split("."):
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list):
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = getattr(found, step, None)
    if isinstance(found, ByLayer):
        found = found.overall
    elif isinstance(found, Curve):
        found = sum(found.mean) / len(found.mean)
    return None if isinstance(found, Estimate) and math.isnan(found.mean) else found


def _show(value: Value) -> str:
    if isinstance(value, Estimate):
        return with_interval(value)
    return value if isinstance(value, str) else number(value, 4)


def _difference(values: Sequence[Value]) -> str:
    """Of two estimates on the same pictures; empty for anything else."""
    estimates = [value for value in values if isinstance(value, Estimate)]
    if len(values) != 2 or len(estimates) != 2 or len({len(value.by_picture) for value in estimates}) > 1:
        return ""
    return with_interval(difference(estimates[1], estimates[0]))


def write_chapters(report: Report) -> list[Chapter]:
    """The report's chapters after the summary; those without data are left out."""
    models = report.models
    base = [] if report.base is None else [report.base]
    over = f"Means over {_count(report.num_pictures, 'picture')} of {report.data}"
    about = f"{over}; {'bands are 95% intervals' if report.num_pictures > 1 else 'one picture has no intervals'}."
    gain = compare(models, {_word(name): f"projector_norm.{name}" for name in projector_norm.DEFINITIONS})
    kinds = dict.fromkeys(kind for model in models if model.gradients for kind in model.gradients.norms)
    gradient = compare(
        models,
        {
            f"{name.replace('_', ' ')}, {kind}": f"gradients.norms.{kind}.{name}"
            for kind in kinds
            for name in gradients.DEFINITIONS
        }
        | {"answers": "gradients.num_samples", "target tokens": "gradients.num_targets"},
        "loss, and norm of its gradient",
    )
    attracted = {_word(field.name): f"attraction.{field.name}" for field in fields(Attractions)}
    chapters: list[Chapter] = [
        ("Norms up to the decoder", _write_interface(models)),
        ("Norm and turning by layer", _write_layers(models, about)),
        ("The norm after the projector", [gain] if gain.rows else []),
        ("Attention to the picture", _write_attention(models, over, about)),
        ("Keys and values", _write_spaces(report, about)),
        ("What visual tokens decode to", _write_lens(models)),
        ("Gradients", [gradient] if gradient.rows else []),
        (
            "Do updates attract each other",
            [
                Figure(
                    "attraction", f"Cosine of a visual and a text token's updates, and their attraction κ. {about}"
                ),
                compare(models, attracted, "means over layers"),
            ],
        ),
        ("Text embeddings", [Fold("Norms, and the largest of them", [_embeddings_table([*base, *models])])]),
        ("What was measured and left out", _write_excluded(report)),
        ("Definitions", [Fold(title, [Terms(_in_words(texts))]) for title, texts in DEFINITIONS.items()]),
    ]
    return [(title, blocks) for title, blocks in chapters if blocks]


def _write_interface(models: Sequence[ModelReport]) -> list[Block]:
    norms: dict[str, Quantity] = {_word(place): f"interface.{place}" for place in interface.DEFINITIONS}
    norms[WORDS["vocabulary"]] = "interface.vocabulary.mean"  # the same for all pictures
    ratios = {"visual over text": "interface.ratio", "visual over vocabulary": "interface.ratio_to_vocabulary"}
    details = []
    for model in models:
        found = {_word(place): getattr(model.interface, place) for place in interface.DEFINITIONS}
        rows = [
            [name, *map(number, (norm.std, norm.median, norm.p95, norm.num_tokens, norm.width, norm.rms))]
            for name, norm in found.items()
            if norm is not None
        ]
        header = [model.name, "standard deviation", "median", "95% quantile", "tokens", "width", "RMS"]
        details.append(Table(header, rows))
    return [compare(models, ratios | norms, "mean norm"), Fold("Spread, counts and RMS", details)]


def _write_layers(models: Sequence[ModelReport], about: str) -> list[Block]:
    groups = [group.name for group in max((model.layers.groups for model in models), key=len)]
    asked = max((model.prompts for model in models), key=len)
    questions = ["own question" if prompted.question is None else prompted.question for prompted in asked]
    gaps: dict[str, Quantity] = {f"gap of cosines, {name}": f"layers.groups.{i}.gap" for i, name in enumerate(groups)}
    gaps["gap of cosines, largest"] = lambda model: (
        f"layer {model.layers.largest_gap.layer}: {with_interval(model.layers.largest_gap.gap)}"
    )
    turning = {f"turning, 1 − cosine, {modality}": f"layers.{modality}.update_rate" for modality in ("visual", "text")}
    ratios = {f"norm, visual over text, {name}": f"layers.groups.{i}.norm_ratio" for i, name in enumerate(groups)}
    updates = {
        f"{title}, {modality}": f"layers.{modality}.{name}"
        for name, title in (("update_ratio", "update over token, ‖u‖/‖h‖"), ("update_cosine", "cosine of the update"))
        for modality in ("visual", "text")
    }
    by_question = {
        f"{name}: {question}": f"prompts.{number}.gaps.{i}"
        for i, name in enumerate(groups)
        for number, question in enumerate(questions)
    }
    return [
        Figure(
            "layers",
            "Left: norm of visual tokens over that of text, at the input of each layer and after the last. Right: "
            f"cosine of visual tokens minus that of text; above 0, visual tokens turn more slowly. {about}",
        ),
        compare(models, gaps | turning | ratios, "means over layers"),
        *([Fold("The gap of cosines by question", [compare(models, by_question, "gap")])] if len(asked) > 1 else []),
        Fold(
            "The layers' updates",
            [
                Figure("updates", f"A layer's residual update u, relative to the token h that enters it. {about}"),
                compare(models, updates, "means over layers"),
            ],
        ),
        Figure(
            "norms",
            "Norm of tokens by layer: median, and bands from 25% to 75% and 5% to 95% of all tokens of "
            f"{_count(models[0].num_pictures, 'picture')}.",
        ),
    ]


def _write_attention(models: Sequence[ModelReport], over: str, about: str) -> list[Block]:
    means = {
        f"{_word(field.name)}, {kind.replace('_', ' ')}{', evenly spread' if even else ''}": (
            f"attention.{kind}.{even}{field.name}"
        )
        for field in fields(Gaze)
        for kind in ("with_sinks", "without_sinks")
        for even in ("", "evenly_spread.")
    }
    found = compare(models, means, "means over layers")
    if not found.rows:
        return []
    return [
        Figure(
            "attention",
            "Attention of text to the picture, with and without sinks among the keys, and if it were evenly spread. "
            f"A gap in a line is a layer whose attention window does not reach a picture. {about}",
        ),
        Fold("Means over layers", [found]),
        Figure("heads", f"Share of each head's attention that falls on the picture, with sinks. {over}."),
        Figure(
            "attention_maps",
            "One query's attention over the picture; 1 is an even share of the picture's attention. Below each, the "
            "share of all attention that falls on the picture.",
        ),
    ]


def _write_spaces(report: Report, about: str) -> list[Block]:
    def mean(part: str, name: str) -> Quantity:
        def of(model: ModelReport) -> Value:
            space = getattr(model, part)
            known = [value for value in getattr(space, name, None) or [] if not math.isnan(value)]
            return (max(known) if name == "p_value" else sum(known) / len(known)) if known else None

        return of

    apart: dict[str, Quantity] = {}
    details: dict[str, Quantity] = {}
    for kind, part in (("keys", "key_space"), ("values", "value_space")):
        apart |= {
            f"{kind}: MMD²": f"{part}.mmd",
            f"{kind}: MMD², 95% of halves": mean(part, "mmd_baseline"),
            f"{kind}: p, largest over layers": mean(part, "p_value"),
            f"{kind}: p, smallest possible": f"{part}.smallest_p",
            f"{kind}: accuracy of a probe": f"{part}.probe",
        }
        details |= {
            f"{kind}: Jensen-Shannon (bits)": f"{part}.js",
            f"{kind}: Jensen-Shannon, 95% of halves": mean(part, "js_baseline"),
        }
        lengths = [(title, modality) for title in ("norm", "spread") for modality in ("visual", "text")]
        details |= {f"{kind}: {title}, {modality}": f"{part}.{title}.{modality}" for title, modality in lengths}
        details[f"{kind}: tokens of each modality"] = f"{part}.num_tokens"
    found = compare(report.models, apart, "means over layers")
    scale = (
        "All checkpoints share one basis."
        if report.compare == "checkpoints"
        else "Each model has its own basis: compare a curve with its own halves, not with another model's curve."
    )
    blocks: list[Block] = [
        Figure("keys", f"How far apart visual and text tokens are, as keys and as values. {scale} {about}"),
        found,
        Fold(
            "Norm and spread, Jensen-Shannon, t-SNE",
            [
                Figure("lengths", f"Norm of keys and values, and root mean square distance from their mean. {about}"),
                compare(report.models, details, "means over layers"),
                Figure(
                    "tsne",
                    f"t-SNE of one layer's keys of {_count(report.num_pictures, 'picture')}; distances mean nothing.",
                ),
            ],
        ),
    ]
    return blocks if found.rows else []


def _write_lens(models: Sequence[ModelReport]) -> list[Block]:
    lenses = [model.lens for model in models if model.lens is not None]
    if not lenses:
        return []

    def read(layer: int) -> Quantity:
        def of(model: ModelReport) -> Value:
            by_layer = dict(zip(model.lens.layers, model.lens.tokens, strict=True)) if model.lens else {}
            return ", ".join(f"{entry.token} {entry.share:.0%}" for entry in by_layer.get(layer, [])) or None

        return of

    layers = sorted({layer for lens in lenses for layer in lens.layers})
    return [
        "The token that the decoder's final norm and head make most probable after a layer, for each visual token of "
        f"{_count(max(lens.num_pictures for lens in lenses), 'picture')}: the most common, with their share of all "
        "visual tokens (the logit lens, nostalgebraist 2020). Caveat: the head is not trained to decode intermediate "
        "hidden states, nor those of visual tokens at any layer: this is a hint, not what a token means.",
        compare(models, {f"after layer {layer}": read(layer) for layer in layers}, "most common first"),
    ]


def _embeddings_table(models: Sequence[ModelReport | LanguageModel]) -> Table:
    rows = [
        [WORDS.get(name, name), *(number(getattr(model.embeddings, name), 4) for model in models)]
        for name in ("mean", "std", "max", "num_embeddings", "num_zero")
    ]
    for rank in range(max(len(model.embeddings.top) for model in models)):
        tops = [model.embeddings.top[rank : rank + 1] for model in models]
        rows.append([f"largest, {rank + 1}", *(f"{top[0].token} {top[0].norm:.4f}" if top else "–" for top in tops)])
    return Table(["norm", *(model.name for model in models)], rows)


def _write_excluded(report: Report) -> list[Block]:
    reasons = dict.fromkeys(reason for model in report.models for reason in model.excluded)
    quantities: dict[str, Quantity] = {
        "class": "class_",
        "weights": "dtype",
        "layers": "num_layers",
        "width": "hidden_size",
        "pictures": "num_pictures",
        "questions": "num_samples",
        "visual tokens": "num_tokens.visual",
        "text tokens": "num_tokens.text",
        **{f"left out: {reason}": f"excluded.{reason}" for reason in reasons},
    }
    return [
        compare(report.models, quantities),
        *(f"{model.name}: {note}." for model in report.models for note in model.notes),
        "Left out of the numbers on visual and text tokens, except in gradients and where a definition includes them: "
        "padding; special tokens of the tokenizer and of the config (BOS, delimiters of chat and pictures); newline "
        "features at the ends of picture rows; sinks, which are tokens whose norm after some layer is over "
        f"{SINK_FACTOR:g} times the median of their modality in their sample. "
        "All numbers are in float32, whatever the model's dtype. "
        f"Skipped: {_count(report.passed_over, 'row')} without a picture.",
        *(f"Skipped, not readable: {row}" for row in report.unreadable),
        f"Command: {report.command}",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]


def _in_words(texts: Mapping[str, str]) -> dict[str, str]:
    return {_word(name): text for name, text in texts.items()}


def _word(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _overview(report: Report) -> Figure:
    spread = ", bands are 95% intervals over pictures" if report.num_pictures > 1 else ""
    return Figure(
        "overview",
        "Norm of visual and text tokens, how far each layer turns them, and how much of the text's attention falls on "
        f"the picture. Lines are means over {_count(report.num_pictures, 'picture')} of {report.data}{spread}.",
    )


def render_markdown(report: Report, figures: Collection[str]) -> str:
    """The report as Markdown.

    Args:
        report: What was measured.
        figures: Files next to it, such as `overview.png`; figures without a file are left out.
    """
    files = {Path(file).stem: file for file in figures}
    parts = [f"# {TITLE}", escape(_measured_on(report)), _to_markdown(_overview(report), files), "## Summary"]
    for model in report.models:
        answers = "\n".join(f"- *{topic}.* {escape(text)}" for topic, text in headline(model).items())
        parts += [f"**{escape(model.name)}**", answers]
    for title, blocks in write_chapters(report):
        parts += [f"## {title}", *(_to_markdown(block, files) for block in blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _to_markdown(block: Block, files: Mapping[str, str]) -> str:
    match block:
        case Figure(name, caption):
            return f"![{name.replace('_', ' ')}]({files[name]})\n\n*{escape(caption)}*" if name in files else ""
        case Table(header, rows):
            return table(list(map(escape, header)), [list(map(escape, row)) for row in rows])
        case Terms(entries):
            return "\n".join(f"- *{escape(name)}*: {escape(text)}" for name, text in entries.items())
        case Fold(title, blocks):
            inner = "\n\n".join(_to_markdown(inner, files) for inner in blocks)
            return f"<details><summary>{title}</summary>\n\n{inner}\n\n</details>"
    return escape(block)


def render_html(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one self-contained page, for wide and narrow screens, light and dark mode, and print.

    Args:
        report: What was measured.
        figures: By name, as [`~diagnostics.plots.to_svg`] returns them; missing ones are left out.
    """
    chapters = write_chapters(report)
    links, sections = "", ""
    for number_, (title, blocks) in enumerate(chapters, 1):
        links += f'<a href="#c{number_}">{title}</a>'
        sections += f'<section id="c{number_}"><h2>{title}</h2>{_all_html(blocks, figures)}</section>\n'
    cards = ""
    for model in report.models:
        cards += f"<article><h3>{html.escape(model.name)}</h3><dl>{_terms_html(headline(model))}</dl></article>"
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{TITLE}</title>\n<style>{style}</style></head>\n'
        f"<body><header><h1>{TITLE}</h1><p>{html.escape(_measured_on(report))}</p></header>\n<main>"
        f'<section class="short">{_to_html(_overview(report), figures)}<div class="cards">{cards}</div></section>\n'
        f"<nav>{links}</nav>\n{sections}</main></body></html>\n"
    )


def _all_html(blocks: Sequence[Block], figures: Mapping[str, str]) -> str:
    return "".join(_to_html(block, figures) for block in blocks)


def _to_html(block: Block, figures: Mapping[str, str]) -> str:
    match block:
        case Figure(name, caption):
            if name not in figures:
                return ""
            plot = f'<div class="plot scroll" tabindex="0" role="img" aria-label="{html.escape(caption)}">'
            return f"<figure>{plot}{figures[name]}</div><figcaption>{html.escape(caption)}</figcaption></figure>\n"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
            body = "".join(f"<tr>{_row_html(row)}</tr>" for row in rows)
            scroll = '<div class="scroll" tabindex="0" role="region" aria-label="table">'
            return f"{scroll}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
        case Terms(entries):
            terms = "".join(
                f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in entries.items()
            )
            return f'<dl class="terms">{terms}</dl>'
        case Fold(title, blocks):
            return f"<details><summary>{title}</summary>{_all_html(blocks, figures)}</details>\n"
    return f"<p>{html.escape(block)}</p>\n"


def _row_html(row: Sequence[str]) -> str:
    name, *cells = map(html.escape, row)
    return f'<th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)


def _terms_html(entries: Mapping[str, str]) -> str:
    return "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in entries.items())
