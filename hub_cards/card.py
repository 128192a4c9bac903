"""The model card: metadata and figures from [`Facts`], prose from a recipe. The template only prints."""

import json
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.errors import UserError
from evaluation.record import Evaluation
from hub_cards.facts import Facts, TrainingStage
from hub_cards.licences import Licence
from hub_cards.release import Release


NOT_RECORDED = "not recorded"
NORMS = {"gwc": "a LayerNorm with gradient compensation (GWC)", "layernorm": "a LayerNorm", "none": "no norm"}
DEFAULT_QUESTION = "What is in the picture?"
# An example that the Hub shows: messages with a picture and a question, and the model's own answer.
Widget = dict[str, Any]


@dataclass(frozen=True)
class Prose:
    """What a recipe's `card.yaml` says.

    Attributes:
        summary: What the model does.
        intended_use: What it is for.
        out_of_scope: What it is not for.
        training_data: What it was trained on.
        limits: What it does badly.
        language: Codes of the languages that it speaks.
        datasets: Hub ids of its data.
        language_model: Where the language model comes from, if it is neither on the Hub nor trained from scratch.
        vision_encoder: The same of the vision encoder.
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
    """Read a card's prose.

    Raises:
        UserError: if it is not a YAML mapping, a field is unknown, missing or not text, or it says where a part comes
            from that is on the Hub.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        prose = Prose(**content)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        known = ", ".join(entry.name for entry in fields(Prose))
        raise UserError(f"{path} is not a card's prose ({error}). Its fields are: {known}.") from error

    for name, value in content.items():
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f'{path}: {name} is {value!r}, not text. YAML reads no as false: write "no".')

    for name, base_model in (("language_model", facts.text_model), ("vision_encoder", facts.vision_model)):
        if name in content and base_model is not None:
            raise UserError(f"{path}: {name} is {content[name]!r}, but it is {base_model}: take it out.")
    return prose


def render_card(
    facts: Facts,
    licence: Licence,
    prose: Prose,
    release: Release,
    widgets: list[Widget],
    line_counts: dict[str, int],
) -> str:
    """The whole card.

    Args:
        facts: What is known about the model.
        licence: The release's.
        prose: The recipe's text.
        release: Repository and tag.
        widgets: Examples.
        line_counts: Number of lines of each class file.
    """
    config = facts.config
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("card.md.jinja").render(
        name=release.repo_id.split("/")[1],
        release=release,
        licence=licence,
        prose=prose,
        norm=describe_norm(config),
        has_norm=config["projector_norm"] != "none",
        key_adapter_rank=config.get("key_adapter_rank"),
        parts=list_parts(facts, prose),
        total=count(sum(facts.weights.counts.values())),
        image_size=config["vision_config"].get("image_size") or NOT_RECORDED,
        image_tokens=config.get("image_seq_length") or NOT_RECORDED,
        decoder=facts.decoder,
        dtypes=sorted(facts.weights.dtypes),
        class_names=" and ".join(line_counts),
        class_lines=sum(line_counts.values()),
        question=json.dumps(first_question(widgets), ensure_ascii=False),
        start=describe_start(facts),
        diagnostics=facts.diagnostics,
        earlier_is_missing=bool(facts.stages) and not facts.earlier_is_recorded,
        stages=[(stage.stage or NOT_RECORDED, list_stage(stage)) for stage in facts.stages],
        evaluations=[list_evaluation(row) for row in facts.evaluations],
        commands=list(dict.fromkeys(cell(row.command) for row in facts.evaluations)),
        origins=describe_origins(facts, prose),
    )
    metadata = build_metadata(facts, licence, release, prose, widgets).to_yaml()
    return str(ModelCard(f"---\n{metadata}\n---\n\n{text}\n"))


def build_metadata(
    facts: Facts, licence: Licence, release: Release, prose: Prose, widgets: list[Widget]
) -> ModelCardData:
    """The card's YAML block."""
    results = []
    for row in facts.evaluations:
        result = EvalResult(
            task_type="image-text-to-text",
            dataset_type=row.dataset,
            dataset_name=row.dataset,
            dataset_split=row.split,
            metric_type=row.metric,
            metric_name=f"{row.metric}, {row.task}",  # results of one dataset and split share an entry
            metric_value=row.value,
        )
        results.append(result)
    return ModelCardData(
        base_model=facts.base_models or None,
        datasets=prose.datasets or None,
        eval_results=results or None,
        language=prose.language or None,
        library_name="transformers",
        license=licence.identifier,
        model_name=release.repo_id.split("/")[1],
        pipeline_tag="image-text-to-text",
        tags=["custom_code", "conversational", "normllava"],
        widget=widgets or None,
    )


def first_question(widgets: list[Widget]) -> str:
    """The question that the card's snippet asks."""
    if not widgets:
        return DEFAULT_QUESTION
    _, text = widgets[0]["messages"][0]["content"]
    return text["text"]


def describe_norm(config: dict[str, Any]) -> str:
    """What follows the projector."""
    name = config["projector_norm"]
    return NORMS.get(name, f"a norm (`projector_norm: {name}`)")


def describe_start(facts: Facts) -> str:
    """How the model's projector started."""
    sentences = [describe_first_norm(facts)]
    if facts.config.get("projector_aligned"):
        sentences.append(
            "Before training, the projector learned to point image tokens at the language model's own embeddings of "
            "captions (`training/align.py`), which is not part of the paper."
        )
    return " ".join(sentences)


def describe_first_norm(facts: Facts) -> str:
    """At which norm the model's image tokens started."""
    config = facts.config
    target = config.get("projector_norm_target")
    if config["projector_norm"] == "none" and config.get("projector_scaled"):
        return (
            "This model has no norm after the projector. Its projector was scaled before training, so that image "
            "tokens started at the mean norm of text tokens."
        )
    if config["projector_norm"] == "none":
        return "This model has no norm after the projector."
    if target is not None:
        return (
            f"Here the norm's gain starts at a value that gives image tokens a norm of T = {target:.4g}: the mean "
            "norm of text tokens, unless composed with another `--norm_target_ratio`."
        )
    start = facts.decoder.hidden_size**0.5
    return (
        f"Here the norm's gain starts at 1, which gives image tokens a norm of {start:.3g} (√d), regardless of text "
        "tokens."
    )


def list_parts(facts: Facts, prose: Prose) -> list[tuple[str, str, str]]:
    """The model's parts: name, where it comes from, number of weights."""
    counts = facts.weights.counts
    projector = "a Llava checkpoint" if facts.config.get("llava_name_or_path") else "new in this model"
    norm = "none" if facts.config["projector_norm"] == "none" else "new in this model"
    parts = [
        ("vision encoder", describe_part(facts.vision_model, prose.vision_encoder), counts["vision_tower"]),
        ("projector", projector, counts["multi_modal_projector"]),
        ("norm after it", norm, counts["norm"]),
        (
            "language model",
            describe_part(facts.text_model, prose.language_model),
            counts["language_model"] + counts["lm_head"],
        ),
    ]
    if facts.config.get("key_adapter_rank"):
        parts.append(("key adapters in it", "new in this model", counts["key_adapter"]))
    return [(name, origin, count(number)) for name, origin, number in parts]


def describe_part(base_model: str | None, prose: str) -> str:
    """Where a part comes from: a link to the Hub, what the prose says, or nowhere."""
    if base_model is not None:
        return f"[{base_model}](https://huggingface.co/{base_model})"
    return cell(prose) or "trained from scratch"


def describe_origins(facts: Facts, prose: Prose) -> str:
    """What the model was made from, in sentences."""
    sentences = []
    if facts.config.get("llava_name_or_path"):
        sentences.append("Converted from a Llava checkpoint.")
    sentences += [f"Made from {base_model}." for base_model in facts.base_models]
    for part, base_model, said in (
        ("language model", facts.text_model, prose.language_model),
        ("vision encoder", facts.vision_model, prose.vision_encoder),
    ):
        if base_model is None and said:
            sentences.append(f"The {part}: {said}.")
        elif base_model is None:
            sentences.append(f"The {part} was trained from scratch.")
    return " ".join(sentences)


def list_stage(stage: TrainingStage) -> list[tuple[str, str]]:
    """The rows of one stage's table."""
    first_loss, last_loss = stage.losses
    rows = [("steps", count(stage.steps)), ("tokens", count(stage.tokens))]
    rows += [("data", describe_source(source)) for source in stage.sources]
    rows += [
        ("loss, first and last logged", f"{significant(first_loss)}, {significant(last_loss)}"),
        ("time", duration(stage.seconds)),
        ("hardware", stage.hardware or NOT_RECORDED),
        ("code", f"commit {stage.commit}" if stage.commit else NOT_RECORDED),
    ]
    rows += [(f"`{name}`", cell(value)) for name, value in stage.arguments.items()]
    return rows


def describe_source(source: dict[str, Any]) -> str:
    """What a stage took from one source of data. Of a local one only the last name of its path is told."""
    path = source["path"]
    described = f"[{path}](https://huggingface.co/datasets/{path})"
    if source["is_local"]:
        described = Path(path).name
    if source["name"]:
        described += f", {source['name']}"
    if source["split"] != "train":
        described += f", {source['split']}"

    described += f": {count(source['good_rows'])} rows"
    if source["good_rows"] < source["rows"]:
        described += f" (of {count(source['rows'])}; the rest are bad)"
    if source["weight"] != 1:
        described += f", weight {source['weight']}, {count(source['drawn'])} per epoch"
    return cell(f"{described}; content {source['fingerprint'][:12]}")


def list_evaluation(row: Evaluation) -> list[str]:
    """The cells of one result."""
    value = significant(row.value)
    if row.standard_error is not None:
        value += f" ± {row.standard_error:.2g}"
    scorer = row.harness or "a script"
    if row.choice:
        scorer += f"; {row.choice}"
    baseline = NOT_RECORDED
    if row.baseline is not None:
        baseline = f"{significant(row.baseline)} ({row.baseline_name})"
    dataset = f"{row.dataset} ({row.split})"
    cells = (row.task, dataset, row.metric, value, count(row.n), scorer, baseline)
    return [cell(text) for text in cells]


def cell(value: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", r"\|").replace("<", "&lt;")


def count(number: int | None) -> str:
    """A whole number with its thousands apart."""
    return NOT_RECORDED if number is None else f"{number:,}"


def significant(number: float | None) -> str:
    """A number with four digits."""
    return NOT_RECORDED if number is None else f"{number:,.4g}"


def duration(seconds: float | None) -> str:
    """A time in hours, minutes and seconds."""
    return NOT_RECORDED if seconds is None else str(timedelta(seconds=round(seconds)))
