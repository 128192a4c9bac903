"""The model card: metadata and text from [`Facts`], prose from a recipe."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diagnostics.report import number, with_interval
from hub_cards.facts import Facts
from hub_cards.licences import APACHE, Licence, known_licence
from training.run import Source


NOT_RECORDED = "not recorded"
NORMS = {
    "gwc": "a LayerNorm with gradient compensation (GWC)",
    "layernorm": "a LayerNorm",
    "none": "no norm",
}
KEY_ADAPTERS = (
    "The decoder's keys have adapters of rank {rank}, one for visual and one for text tokens (MaLoRA-style, after the "
    "abstract of [arXiv 2510.26721](https://arxiv.org/abs/2510.26721); that paper's full text was not available): "
    "transformers runs them, vLLM refuses a model with them."
)


@dataclass(frozen=True)
class Widget:
    """An example that the Hub shows: a picture's name in the repository, a question, and the model's own answer."""

    picture: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Prose:
    """A recipe's text about its model, the codes of the languages that it speaks, and the Hub ids of its data.

    `language_model` and `vision_encoder` say where parts come from that are not on the Hub and were not trained from
    scratch.
    """

    summary: str
    intended_use: str
    out_of_scope: str
    training_data: str
    limits: str
    language: list[str]
    datasets: list[str]
    language_model: str | None = None
    vision_encoder: str | None = None


def read_prose(path: Path) -> Prose:
    """The recipe's prose; only `language`, `datasets`, `language_model` and `vision_encoder` may be missing.

    Raises:
        ValueError: if it is not a YAML mapping, a field is unknown, missing or empty, or a list holds more than text.
    """
    try:
        prose = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML ({error}).") from error
    lists, parts = ("language", "datasets"), ("language_model", "vision_encoder")
    names = [field.name for field in fields(Prose) if field.name not in (*lists, *parts)]
    if not isinstance(prose, dict):
        raise ValueError(f"{path} is not a mapping of fields to text. A card needs each: {', '.join(names)}.")
    unknown = prose.keys() - {*names, *lists, *parts}
    if unknown:
        raise ValueError(
            f"{path}: {', '.join(map(str, unknown))} is not a field of a card; the fields are: "
            f"{', '.join([*names, *lists, *parts])}."
        )
    texts: dict[str, Any] = {name: str(prose.get(name) or "").strip() for name in names}
    missing = [name for name in names if not texts[name]]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}. A card needs each: {', '.join(names)}.")
    given = {name: prose.get(name) or [] for name in lists}
    for name, value in given.items():
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f'{path}: {name} is {value!r}, not a list of texts. YAML reads no as false: write "no".')
    origins = {name: str(prose[name]).strip() for name in parts if prose.get(name)}
    return Prose(**texts | given | origins)


def build_metadata(facts: Facts, licence: Licence, name: str, prose: Prose, widgets: list[Widget]) -> ModelCardData:
    """The card's YAML block."""
    results = [
        EvalResult(
            task_type="image-text-to-text",
            dataset_type=row.dataset,
            dataset_name=row.dataset,
            dataset_split=row.split,
            metric_type=row.metric,
            metric_name=f"{row.metric}, {row.task}",  # results of one dataset and split share an entry
            metric_value=row.value,
        )
        for row in facts.evaluations
    ]
    return ModelCardData(
        base_model=facts.base_models or None,
        datasets=prose.datasets or None,
        eval_results=results or None,
        language=prose.language or None,
        library_name="transformers",
        license=licence.identifier,
        license_link=licence.link if licence.notice else None,
        model_name=name,
        pipeline_tag="image-text-to-text",
        tags=["custom_code", "conversational", "normllava"],
        widget=[
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": widget.picture}},
                            {"type": "text", "text": widget.question},
                        ],
                    }
                ],
                "output": {"text": widget.answer},
            }
            for widget in widgets
        ]
        or None,
    )


def render_card(
    facts: Facts,
    licence: Licence,
    prose: Prose,
    repo_id: str,
    revision: str,
    plots: dict[str, str],
    widgets: list[Widget],
    code_lines: int,
) -> ModelCard:
    """The whole card. Every fact that is `None` reads "not recorded"; `plots` are the plots' captions by file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": lambda value: NOT_RECORDED if not isinstance(value, int) else f"{value:,}",
        "recorded": lambda value: NOT_RECORDED if value is None else value,
        "significant": lambda value: NOT_RECORDED if value is None else number(value),
        "source": describe_source,
        "duration": lambda seconds: NOT_RECORDED if seconds is None else duration(seconds),
        "interval": with_interval,
        "cell": lambda value: " ".join(str(value).split()).replace("|", r"\|").replace("<", "&lt;"),
        "literal": lambda text: json.dumps(text, ensure_ascii=False),
    }
    name = repo_id.split("/")[-1]
    seconds = [stage.seconds for stage in facts.stages]
    text = environment.get_template("card.md.jinja").render(
        name=name,
        repo_id=repo_id,
        revision=revision,
        facts=facts,
        origins={
            "vision_encoder": describe_origin(facts.vision_model, prose.vision_encoder),
            "language_model": describe_origin(facts.text_model, prose.language_model),
        },
        licence=licence,
        prose=prose,
        plots=plots,
        code_lines=code_lines,
        trained="trained here" if facts.stages else NOT_RECORDED,
        norm_sentence=NORMS.get(facts.projector_norm, f"a norm (`projector_norm: {facts.projector_norm}`)"),
        key_adapter_sentence=KEY_ADAPTERS.format(rank=facts.key_adapter_rank) if facts.key_adapter_rank else None,
        question=widgets[0].question if widgets else "What is in the picture?",
        commands=sorted({" ".join(row.command.split()) for row in facts.evaluations}),
        hours=duration(sum(s for s in seconds if s)) if all(seconds) and facts.earlier_is_recorded else None,
        attribution=attribute(facts, prose),
        apache_parts=[base for base in facts.base_models if known_licence(base) is APACHE],
    )
    metadata = build_metadata(facts, licence, name, prose, widgets)
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}")


def describe_source(source: Source) -> str:
    """What a stage took from a source of rows; of a local file or folder only the last part of its path is shown."""
    link = f"[{source.path}](https://huggingface.co/datasets/{source.path})"
    name = Path(source.path).name if source.is_local else link
    parts = [name, source.name, None if source.split == "train" else source.split]
    text = f"{', '.join(filter(None, parts))}: {source.good_rows:,} rows"
    if source.good_rows < source.rows:
        text += f" (of {source.rows:,}; the rest are bad)"
    if source.weight != 1:
        text += f", weight {source.weight:g}, {source.drawn:,} per epoch"
    return f"{text}; content {source.fingerprint[:12]}"


def check_origins(facts: Facts, prose: Prose) -> None:
    """Raises `ValueError` if the prose says where a part comes from that is on the Hub."""
    for name, base in (("language_model", facts.text_model), ("vision_encoder", facts.vision_model)):
        said = getattr(prose, name)
        if base is not None and said is not None:
            raise ValueError(f"{name} of the card's prose is {said!r}, but it is {base}: remove it from the prose.")


def describe_origin(base: str | None, said: str | None) -> str:
    """Where a part comes from: its Hub id, or what the prose says."""
    return (said or "trained from scratch") if base is None else f"[{base}](https://huggingface.co/{base})"


def attribute(facts: Facts, prose: Prose) -> str:
    """What the parts were made from."""
    parts = {
        "language model": (facts.text_model, prose.language_model),
        "vision encoder": (facts.vision_model, prose.vision_encoder),
    }
    sentences = [
        f"Made from {base}." if base else f"The {part}: {said}." if said else f"The {part} was trained from scratch."
        for part, (base, said) in parts.items()
    ]
    if not facts.base_models and not prose.language_model and not prose.vision_encoder:
        sentences = ["All parts were trained from scratch."]
    return " ".join([*["Converted from a Llava checkpoint."] * facts.converted, *dict.fromkeys(sentences)])


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
