"""The model card: its metadata and figures come from [`Facts`], its prose from a recipe's `card.yaml`.

What the card says is decided here. The template `card.md.jinja` only prints it.
"""

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
# An example that the Hub shows beside the card: messages with a picture and a question, and the model's answer.
Widget = dict[str, Any]


@dataclass(frozen=True)
class Prose:
    """What a recipe's `card.yaml` says.

    Attributes:
        summary: What the model does.
        intended_use: What the model is for.
        out_of_scope: What the model is not for.
        training_data: What the model was trained on.
        limits: What the model does badly.
        language: Codes of the languages that the model speaks.
        datasets: Hub ids of the training data.
        language_model: Where the language model comes from, if it is neither on the Hub nor trained from scratch.
        vision_encoder: Where the vision encoder comes from, if it is neither on the Hub nor trained from scratch.
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
        UserError: if the file is not a YAML mapping; if a field is unknown, missing or not text; or if the file says
            where a part comes from although the part's Hub id is known.
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
            raise UserError(
                f'{path}: {name} is {value!r}, not text. YAML reads an unquoted `no` as false: write "no".'
            )

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
        licence: The release's licence.
        prose: The recipe's text.
        release: The repository and the tag that the card names.
        widgets: Examples with the model's answers.
        line_counts: Number of lines of each class file, by its name.
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
        total=format_count(sum(facts.weights.counts.values())),
        image_size=config["vision_config"].get("image_size") or NOT_RECORDED,
        image_tokens=config.get("image_seq_length") or NOT_RECORDED,
        decoder=facts.decoder,
        dtypes=sorted(facts.weights.dtypes),
        class_names=" and ".join(line_counts),
        class_lines=sum(line_counts.values()),
        question=json.dumps(choose_question(widgets), ensure_ascii=False),
        start=describe_start(facts),
        diagnostics=facts.diagnostics,
        earlier_training_is_missing=bool(facts.stages) and not facts.has_whole_history,
        stages=[(stage.stage or NOT_RECORDED, list_stage(stage)) for stage in facts.stages],
        evaluations=[list_evaluation(evaluation) for evaluation in facts.evaluations],
        commands=list_commands(facts.evaluations),
        origins=describe_origins(facts, prose),
    )
    metadata = build_metadata(facts, licence, release, prose, widgets).to_yaml()
    return str(ModelCard(f"---\n{metadata}\n---\n\n{text}\n"))


def build_metadata(
    facts: Facts, licence: Licence, release: Release, prose: Prose, widgets: list[Widget]
) -> ModelCardData:
    """The card's YAML block."""
    results = []
    for evaluation in facts.evaluations:
        result = EvalResult(
            task_type="image-text-to-text",
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_split=evaluation.split,
            metric_type=evaluation.metric,
            # The Hub lists all results of one dataset and split together, so the metric's name tells the task too.
            metric_name=f"{evaluation.metric}, {evaluation.task}",
            metric_value=evaluation.value,
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


def choose_question(widgets: list[Widget]) -> str:
    """The question that the card's snippet asks: the first example's, if there are examples."""
    if not widgets:
        return DEFAULT_QUESTION
    _, text_part = widgets[0]["messages"][0]["content"]
    return text_part["text"]


def describe_norm(config: dict[str, Any]) -> str:
    """The norm that follows the projector, in words."""
    name = config["projector_norm"]
    return NORMS.get(name, f"a norm (`projector_norm: {name}`)")


def describe_start(facts: Facts) -> str:
    """Sentences on how the projector and the LayerNorm after it were initialized."""
    sentences = [describe_initial_norm(facts)]
    if facts.config.get("projector_aligned"):
        sentences.append(
            "Before training, the projector learned to point image tokens at the language model's own embeddings of "
            "captions (`training/align.py`), which is not part of the paper."
        )
    return " ".join(sentences)


def describe_initial_norm(facts: Facts) -> str:
    """Sentences on the L2 norm that image tokens had before training."""
    config = facts.config
    target = config.get("projector_norm_target")
    if config["projector_norm"] == "none" and config.get("projector_scaled"):
        return (
            "This model has no norm after the projector. Its projector was scaled before training, so that image "
            "tokens started at the mean L2 norm of text tokens."
        )
    if config["projector_norm"] == "none":
        return "This model has no norm after the projector."
    if target is not None:
        return (
            "Here the gain of the LayerNorm after the projector starts at a value that gives image tokens an L2 norm "
            f"of {target:.4g}. That is the mean L2 norm of text tokens, times the `--norm_target_ratio` that the "
            "model was composed with (1 by default)."
        )
    initial_norm = facts.decoder.hidden_size**0.5
    return (
        "Here the gain of the LayerNorm after the projector starts at 1, which gives image tokens an L2 norm of "
        f"{initial_norm:.3g} (√d), regardless of text tokens."
    )


def list_parts(facts: Facts, prose: Prose) -> list[tuple[str, str, str]]:
    """The table of the model's parts: each part's name, where it comes from, and its number of weights."""
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
    return [(name, origin, format_count(number)) for name, origin, number in parts]


def describe_part(base_model: str | None, prose: str) -> str:
    """Where a part comes from: its link on the Hub, else what the prose says, else "trained from scratch"."""
    if base_model is not None:
        return f"[{base_model}](https://huggingface.co/{base_model})"
    return escape_cell(prose) or "trained from scratch"


def describe_origins(facts: Facts, prose: Prose) -> str:
    """What the model was made from, in sentences."""
    sentences = []
    if facts.config.get("llava_name_or_path"):
        sentences.append("Converted from a Llava checkpoint.")
    sentences += [f"Made from {base_model}." for base_model in facts.base_models]
    parts = (
        ("language model", facts.text_model, prose.language_model),
        ("vision encoder", facts.vision_model, prose.vision_encoder),
    )
    for part, base_model, part_prose in parts:
        if base_model is not None:
            continue
        if part_prose:
            sentences.append(f"The {part}: {part_prose}.")
        else:
            sentences.append(f"The {part} was trained from scratch.")
    return " ".join(sentences)


def list_stage(stage: TrainingStage) -> list[tuple[str, str]]:
    """The rows of one stage's table."""
    first_loss, last_loss = stage.losses
    rows = [("steps", format_count(stage.steps)), ("tokens", format_count(stage.tokens))]
    rows += [("data", describe_source(source)) for source in stage.sources]
    rows += [
        ("loss, first and last logged", f"{format_number(first_loss)}, {format_number(last_loss)}"),
        ("time", format_duration(stage.seconds)),
        ("hardware", stage.hardware or NOT_RECORDED),
        ("code", f"commit {stage.commit}" if stage.commit else NOT_RECORDED),
    ]
    rows += [(f"`{name}`", escape_cell(value)) for name, value in stage.arguments.items()]
    return rows


def describe_source(source: dict[str, Any]) -> str:
    """What a stage took from one source of data. A local source is named without its folder."""
    path = source["path"]
    description = f"[{path}](https://huggingface.co/datasets/{path})"
    if source["is_local"]:
        description = Path(path).name
    if source["name"]:
        description += f", {source['name']}"
    if source["split"] != "train":
        description += f", {source['split']}"

    description += f": {format_count(source['good_rows'])} rows"
    if source["good_rows"] < source["rows"]:
        description += f" (of {format_count(source['rows'])}; the rest are bad)"
    if source["weight"] != 1:
        description += f", weight {source['weight']}, {format_count(source['drawn'])} per epoch"

    short_hash = source["fingerprint"][:12]
    return escape_cell(f"{description}; content {short_hash}")


def list_evaluation(evaluation: Evaluation) -> list[str]:
    """The cells of one row in the table of results."""
    value = format_number(evaluation.value)
    if evaluation.standard_error is not None:
        value += f" ± {evaluation.standard_error:.2g}"

    method = evaluation.harness or "a script"
    if evaluation.choice:
        method += f"; {evaluation.choice}"

    baseline = NOT_RECORDED
    if evaluation.baseline is not None:
        baseline = f"{format_number(evaluation.baseline)} ({evaluation.baseline_name})"

    cells = (
        evaluation.task,
        f"{evaluation.dataset} ({evaluation.split})",
        evaluation.metric,
        value,
        format_count(evaluation.n),
        method,
        baseline,
    )
    return [escape_cell(text) for text in cells]


def list_commands(evaluations: list[Evaluation]) -> list[str]:
    """The commands that measured the results, each once and on one line.

    The card shows them as code outside of tables, where escaped characters would be copied with them.
    """
    commands = [" ".join(evaluation.command.split()) for evaluation in evaluations]
    return list(dict.fromkeys(commands))


def escape_cell(value: object) -> str:
    """A value as text for a cell of a Markdown table, on one line and with the table's own characters escaped."""
    text = " ".join(str(value).split())
    return text.replace("|", r"\|").replace("<", "&lt;")


def format_count(number: int | None) -> str:
    """A whole number with commas between its thousands."""
    return NOT_RECORDED if number is None else f"{number:,}"


def format_number(number: float | None) -> str:
    """A number with four significant digits."""
    return NOT_RECORDED if number is None else f"{number:,.4g}"


def format_duration(seconds: float | None) -> str:
    """A time in hours, minutes and seconds."""
    return NOT_RECORDED if seconds is None else str(timedelta(seconds=round(seconds)))
