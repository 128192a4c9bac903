"""The model card: metadata and text from [`Facts`], prose from a recipe."""

import json
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.errors import UserError
from hub_cards.facts import Facts
from hub_cards.licences import APACHE, Licence, known_licence


NOT_RECORDED = "not recorded"
NORMS = {"gwc": "a LayerNorm with gradient compensation (GWC)", "layernorm": "a LayerNorm", "none": "no norm"}
# An example that the Hub shows: messages with a picture and a question, and the model's own answer.
Widget = dict[str, Any]


@dataclass(frozen=True)
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
    language: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    language_model: str = ""
    vision_encoder: str = ""


def read_prose(path: Path, facts: Facts) -> Prose:
    """The recipe's prose. Raises `UserError` if it is not a YAML mapping, a field is unknown or missing, or it says
    where a part comes from that is on the Hub."""
    try:
        prose = Prose(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        known = ", ".join(entry.name for entry in fields(Prose))
        raise UserError(f"{path} is not a card's prose ({error}). Its fields are: {known}.") from error
    for name, value in vars(prose).items():
        if not all(isinstance(text, str) for text in (value if isinstance(value, list) else [value])):
            raise UserError(f'{path}: {name} is {value!r}, not text. YAML reads no as false: write "no".')
    for name, base in (("language_model", facts.text_model), ("vision_encoder", facts.vision_model)):
        if base is not None and getattr(prose, name):
            raise UserError(f"{path}: {name} is {getattr(prose, name)!r}, but it is {base}: take it out.")
    return prose


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
        model_name=name,
        pipeline_tag="image-text-to-text",
        tags=["custom_code", "conversational", "normllava"],
        widget=widgets or None,
    )


def render_card(
    facts: Facts, licence: Licence, prose: Prose, repo_id: str, revision: str, widgets: list[Widget],
    code: dict[str, int],
) -> str:  # fmt: skip
    """The whole card, where a fact that is `None` reads "not recorded". `code` are numbers of lines by class file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "count": lambda value: NOT_RECORDED if value is None else f"{value:,}",
        "significant": lambda value: NOT_RECORDED if value is None else f"{value:,.4g}",
        "duration": lambda seconds: NOT_RECORDED if seconds is None else str(timedelta(seconds=round(seconds))),
        "cell": lambda value: " ".join(str(value).split()).replace("|", r"\|").replace("<", "&lt;"),
        "literal": lambda text: json.dumps(text, ensure_ascii=False),
    }
    seconds = [stage["seconds"] for stage in facts.stages]
    text = environment.get_template("card.md.jinja").render(
        {"facts": facts, "licence": licence, "prose": prose, "repo_id": repo_id, "revision": revision},
        config=facts.config,
        widgets=widgets,
        code=code,
        norms=NORMS,
        total=sum(filter(None, seconds)) if all(seconds) and facts.earlier_is_recorded else None,
        apache_parts=[base for base in facts.base_models if known_licence(base) is APACHE],
    )
    metadata = build_metadata(facts, licence, repo_id.split("/")[1], prose, widgets).to_yaml()
    return str(ModelCard(f"---\n{metadata}\n---\n\n{text}\n"))
