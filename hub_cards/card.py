"""The model card: its metadata and its numbers come from [`Facts`], its prose from a recipe's `card.yaml`.

What the card says is decided here. The template `card.md.jinja` only prints what it is given.
"""

import json
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hub_cards.facts import Facts
from hub_cards.history import TrainingStage
from hub_cards.licences import Licence
from hub_cards.plain import TYPES_WITH_VISION_MODEL
from hub_cards.release import Release
from normllava.errors import UserError
from normllava.evaluation.record import Evaluation


# An example that the Hub shows beside the card. "messages" holds one message with a picture and a question, "output"
# holds the model's answer.
Widget = dict[str, Any]

# What the card shows for a fact that no file holds.
NOT_RECORDED = "not recorded"

# The norm layer after the projector in words, by the config's `projector_norm`. Other norms are shown by name.
NORM_LAYERS = {
    "gwc": "a LayerNorm with global weight compensation (GWC)",
    "layernorm": "a LayerNorm",
}

# The question that the card's snippet asks if the card has no examples.
DEFAULT_QUESTION = "What is in the picture?"


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
        datasets: Hub ids of training data that the run read from files. Those that it read from the Hub are known.
        language_model: Where the language model comes from, if it isn't on the Hub.
        vision_encoder: Where the vision encoder comes from, if it isn't on the Hub.
    """

    summary: str
    intended_use: str = "Research, and questions about pictures where a wrong answer does no harm."
    out_of_scope: str = "Decisions about people, in medicine, in law or for safety, and what it was not trained on."
    training_data: str = "The tables list what each stage was trained on."
    limits: str = "It answers with confidence whether or not the picture shows what is asked."
    language: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    language_model: str = ""
    vision_encoder: str = ""


# What is written for users to fill in.
PROSE_FORM = f"""\
# What the model's card says; all figures come from the run itself.
summary:  # one sentence: what the model is for
intended_use: {Prose.intended_use}
out_of_scope: {Prose.out_of_scope}
training_data: {Prose.training_data}
limits: {Prose.limits}
language: [en]  # codes of the languages that it speaks
datasets: []  # ids on the Hub of training data that was read from files
"""


def read_prose(path: Path, facts: Facts) -> Prose:
    """Read a card's prose.

    Raises:
        UserError: if the file is not a YAML mapping; if a field is unknown, missing or not text; or if the file says
            where a part comes from although the part's Hub id is known.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not content.get("summary"):
            raise UserError(f"{path}: summary is missing. Say in a sentence what the model is for.")
        prose = Prose(**content)
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
        known_fields = ", ".join(prose_field.name for prose_field in fields(Prose))
        raise UserError(f"{path} is not a card's prose ({error}). Its fields are: {known_fields}.") from error

    # Each value is a text, a list of texts, or a mapping of texts.
    for name, value in content.items():
        if isinstance(value, list):
            texts = value
        elif isinstance(value, dict):
            texts = [*value.keys(), *value.values()]
        else:
            texts = [value]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f'{path}: {name} is {value!r}, not text. YAML reads an unquoted `no` as false: write "no".'
            )

    for name, hub_id in (("language_model", facts.text_model), ("vision_encoder", facts.vision_model)):
        if name in content and hub_id is not None:
            raise UserError(f"{path}: {name} is {content[name]!r}, but it is {hub_id}: take {name} out.")
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
        line_counts: Number of lines of each Python file of the model's classes, by the file's name; empty for a plain
            Llava.
    """
    config = facts.model.settings
    total_weights = sum(facts.model.weights.counts.values())
    earlier_training_is_missing = len(facts.stages) > 0 and not facts.has_whole_history
    stages = [(stage.name or NOT_RECORDED, list_stage(stage)) for stage in facts.stages]

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("card.md.jinja").render(
        name=name_model(release),
        release=release,
        licence=licence,
        prose=prose,
        norm_layer=describe_norm_layer(config),
        has_norm_layer=norm_name(config) != "none",
        key_adapter_rank=config.get("key_adapter_rank"),
        parts=list_parts(facts, prose),
        total=format_count(total_weights),
        pictures=describe_pictures(facts),
        cuts_tiles=facts.model.cuts_tiles,
        is_plain_llava=facts.model.is_plain_llava,
        is_in_vllm=facts.model.config.vision_config.model_type in TYPES_WITH_VISION_MODEL,
        decoder_config=facts.model.config.get_text_config(),
        dtypes=sorted(facts.model.weights.dtypes),
        class_files=join_names(list(line_counts)),
        num_class_lines=sum(line_counts.values()),
        question=json.dumps(choose_question(widgets), ensure_ascii=False),
        initialization=describe_initialization(facts),
        diagnostics=facts.diagnostics,
        earlier_training_is_missing=earlier_training_is_missing,
        stages=stages,
        evaluations=[list_evaluation(evaluation) for evaluation in facts.evaluations],
        commands=list_commands(facts.evaluations),
        origins=describe_origins(facts, prose),
    )
    metadata = build_metadata(facts, licence, release, prose, widgets).to_yaml()
    return str(ModelCard(f"---\n{metadata}\n---\n\n{text}\n"))


def name_model(release: Release) -> str:
    """The model's name, which is the repository's name without its owner."""
    _, name = release.repo_id.split("/")
    return name


def build_metadata(
    facts: Facts, licence: Licence, release: Release, prose: Prose, widgets: list[Widget]
) -> ModelCardData:
    """The card's metadata, which become the YAML block at the top of the card."""
    results = []
    for evaluation in facts.evaluations:
        result = EvalResult(
            task_type="image-text-to-text",
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_split=evaluation.split,
            metric_type=evaluation.metric,
            # The Hub lists all results on a dataset's split together. Only the metric's name can tell tasks apart.
            metric_name=f"{evaluation.metric}, {evaluation.task}",
            metric_value=evaluation.value,
        )
        results.append(result)

    tags = ["conversational", "normllava"]
    if not facts.model.is_plain_llava:
        tags.insert(0, "custom_code")
    if facts.stages:
        tags += ["trl", "sft"]

    # Fields that are `None` are left out of the YAML block.
    return ModelCardData(
        base_model=facts.base_models or None,
        datasets=list_datasets(facts, prose) or None,
        eval_results=results or None,
        language=prose.language or None,
        library_name="transformers",
        license=licence.identifier,
        model_name=name_model(release),
        pipeline_tag="image-text-to-text",
        tags=tags,
        widget=widgets or None,
    )


def list_datasets(facts: Facts, prose: Prose) -> list[str]:
    """Hub ids of the training data: those that the stages read from the Hub, and then those that `card.yaml` names."""
    sources = [source for stage in facts.stages for source in stage.sources]
    read_from_hub = [source["path"] for source in sources if not source["is_local"]]
    return list(dict.fromkeys([*read_from_hub, *prose.datasets]))  # without duplicates


def choose_question(widgets: list[Widget]) -> str:
    """The question that the card's snippet asks: the question of the first example, if there are examples."""
    if not widgets:
        return DEFAULT_QUESTION
    _, question = read_widget(widgets[0])
    return question


def read_widget(widget: Widget) -> tuple[str, str]:
    """The file of an example's picture in the release, and its question."""
    (message,) = widget["messages"]
    picture_part, question_part = message["content"]
    return picture_part["image_url"]["url"], question_part["text"]


def norm_name(config: dict[str, Any]) -> str:
    """The config's `projector_norm`, which is "none" for a Llava."""
    return config.get("projector_norm", "none")


def describe_norm_layer(config: dict[str, Any]) -> str:
    """The norm layer that follows the projector, in words."""
    name = norm_name(config)
    return NORM_LAYERS.get(name, f"a norm (`projector_norm: {name}`)")


def describe_pictures(facts: Facts) -> str:
    """Sentences on how a picture becomes image tokens."""
    size = facts.model.settings["vision_config"].get("image_size") or NOT_RECORDED
    num_tokens = facts.model.settings.get("image_seq_length") or NOT_RECORDED
    if not facts.model.cuts_tiles:
        return f"Pictures of {size} pixels a side become {num_tokens} tokens."

    # `image_seq_length` counts the tokens of one tile. transformers calls tiles "patches".
    max_grid_tiles = facts.model.processor["image_processor"]["max_patches"]
    max_tiles = max_grid_tiles + 1  # with the whole picture as the last tile
    text = (
        f"A picture is cut into at most {max_grid_tiles} tiles of {size} pixels a side, and each tile becomes "
        f"{num_tokens} tokens. If there are two tiles or more, the whole picture follows as one more tile"
    )
    if num_tokens == NOT_RECORDED:
        return f"{text}."
    return f"{text}, so a picture has at most {max_tiles} tiles and {max_tiles * num_tokens} tokens."


def describe_initialization(facts: Facts) -> str:
    """Sentences on how the projector and the norm layer after it were initialized."""
    sentences = [describe_initial_l2_norm(facts)]
    if facts.composed is not None and facts.composed.projector_aligned:
        sentences.append(
            "Before training, the projector learned to point image tokens at the language model's own embeddings of "
            "captions (`training/composing/align.py`), which is not part of the paper."
        )
    return " ".join(sentences)


def describe_initial_l2_norm(facts: Facts) -> str:
    """Sentences on the L2 norm that image tokens had before training."""
    config = facts.model.settings
    if norm_name(config) == "none":
        text = "This model has no norm after the projector."
        if facts.composed is not None and facts.composed.projector_scaled:
            text += (
                " Its projector was scaled before training, so that image tokens started at the mean L2 norm of text "
                "tokens."
            )
        return text

    target_l2_norm = config.get("projector_norm_target")
    if target_l2_norm is not None:
        return (
            "In this model, the gain of the LayerNorm after the projector starts at a value that gives image tokens "
            f"an L2 norm of {target_l2_norm:.4g}. That is the mean L2 norm of text tokens, times the "
            "`--norm_target_ratio` that the model was composed with (1 by default)."
        )

    # With a gain of 1, the d values of a token have a mean square of 1, and so an L2 norm of √d.
    l2_norm = facts.model.config.get_text_config().hidden_size ** 0.5
    return (
        "In this model, the gain of the LayerNorm after the projector starts at 1, which gives image tokens an L2 "
        f"norm of {l2_norm:.3g} (√d), regardless of text tokens."
    )


def list_parts(facts: Facts, prose: Prose) -> list[tuple[str, str, str]]:
    """The rows of the table of parts: for each part its name, its origin and its number of weights."""
    new_part = "new in this model"
    vision_origin = describe_part_origin(facts.vision_model, prose.vision_encoder)
    text_origin = describe_part_origin(facts.text_model, prose.language_model)
    projector_origin = describe_projector_origin(facts, new_part)
    norm_origin = "none" if norm_name(facts.model.settings) == "none" else new_part

    counts = facts.model.weights.counts
    num_text_weights = counts["language_model"] + counts["lm_head"]
    rows = [
        ("vision encoder", vision_origin, format_count(counts["vision_tower"])),
        ("projector", projector_origin, format_count(counts["multi_modal_projector"])),
        ("norm after it", norm_origin, format_count(counts["norm"])),
        ("language model", text_origin, format_count(num_text_weights)),
    ]
    if facts.model.settings.get("key_adapter_rank"):
        rows.append(("key adapters in it", new_part, format_count(counts["key_adapter"])))
    return rows


def describe_projector_origin(facts: Facts, new_part: str) -> str:
    """Where the projector comes from, for a cell of a table. `new_part` says that it is new in this model."""
    if facts.composed is not None and facts.composed.llava_name_or_path is not None:
        return "a Llava checkpoint"
    if facts.parent is not None:
        return f"[{facts.parent}](https://huggingface.co/{facts.parent})"
    return f"origin {NOT_RECORDED}" if facts.composed is None else new_part


def describe_part_origin(hub_id: str | None, part_prose: str) -> str:
    """Where a part comes from, for a cell of a table.

    Args:
        hub_id: The part's Hub id; `None` if it is not known.
        part_prose: What `card.yaml` says of the part's origin; empty if it says nothing.

    Returns:
        A link to the part on the Hub, or else what `card.yaml` says, or else "origin not recorded".
    """
    if hub_id is not None:
        return f"[{hub_id}](https://huggingface.co/{hub_id})"
    if part_prose:
        return escape_cell(part_prose)
    return f"origin {NOT_RECORDED}"


def describe_origins(facts: Facts, prose: Prose) -> str:
    """Sentences on what the model was made from."""
    sentences = []
    if facts.composed is not None and facts.composed.llava_name_or_path is not None:
        sentences.append("Converted from a Llava checkpoint.")
    if facts.parent is not None:
        sentences.append(f"Trained further from {facts.parent}.")
    sentences += [f"Made from {hub_id}." for hub_id in facts.parts]

    # `card.yaml` speaks of the parts without a Hub id.
    prose_by_part = {}
    if facts.text_model is None:
        prose_by_part["language model"] = prose.language_model
    if facts.vision_model is None:
        prose_by_part["vision encoder"] = prose.vision_encoder
    for part, part_prose in prose_by_part.items():
        if part_prose:
            sentences.append(f"The {part}: {part_prose}.")
        else:
            sentences.append(f"The origin of the {part} is {NOT_RECORDED}.")
    return " ".join(sentences)


def list_stage(stage: TrainingStage) -> list[tuple[str, str]]:
    """The rows of one stage's table: names and values."""
    losses = f"{format_number(stage.first_loss)}, {format_number(stage.last_loss)}"
    commit = f"commit {stage.commit}" if stage.commit else NOT_RECORDED

    rows = [
        ("steps", format_count(stage.steps)),
        ("tokens", format_count(stage.tokens)),
    ]
    data = [describe_source(source) for source in stage.sources] or [NOT_RECORDED]
    rows += [("data", source) for source in data]
    rows += [
        ("loss, first and last logged", losses),
        ("time", format_duration(stage.seconds)),
        ("hardware", stage.hardware or NOT_RECORDED),
        ("code", commit),
    ]
    rows += [(f"`{name}`", escape_cell(value)) for name, value in stage.arguments.items()]
    return rows


def describe_source(source: dict[str, Any]) -> str:
    """What a stage took from a source of data, for a cell of a table.

    Args:
        source: The source's entry in `run.json`, with the fields of [`~training.folders.run.SourceRecord`].
    """
    path = source["path"]
    description = f"[{path}](https://huggingface.co/datasets/{path})"
    if source["is_local"]:
        description = Path(path).name  # without the folder, whose name may be private
    if source["name"]:  # the configuration of a dataset
        description += f", {source['name']}"
    if source["split"] != "train":
        description += f", {source['split']}"

    short_hash = source["fingerprint"][:12]
    if source["rows"] is None:
        return escape_cell(f"{description}: a stream; content {short_hash}")

    description += f": {format_count(source['good_rows'])} rows"
    if source["good_rows"] < source["rows"]:
        description += f" (of {format_count(source['rows'])}; the rest are bad)"
    if source["weight"] != 1:
        description += f", weight {source['weight']}, {format_count(source['drawn'])} per epoch"

    return escape_cell(f"{description}; content {short_hash}")


def list_evaluation(evaluation: Evaluation) -> list[str]:
    """The cells of a result's row in the table of results."""
    value = format_number(evaluation.value)
    if evaluation.standard_error is not None:
        value += f" ± {evaluation.standard_error:.2g}"

    scored_by = evaluation.harness or "a script"
    if evaluation.choice:
        scored_by += f"; {evaluation.choice}"

    baseline = NOT_RECORDED
    if evaluation.baseline is not None:
        baseline = f"{format_number(evaluation.baseline)} ({evaluation.baseline_name})"

    cells = (
        evaluation.task,
        f"{evaluation.dataset} ({evaluation.split})",
        evaluation.metric,
        value,
        format_count(evaluation.n),
        scored_by,
        baseline,
    )
    return [escape_cell(text) for text in cells]


def list_commands(evaluations: list[Evaluation]) -> list[str]:
    """The commands that measured the results, each once and on one line.

    The commands are not escaped, because the card shows them as code outside of tables.
    """
    commands = [" ".join(evaluation.command.split()) for evaluation in evaluations]
    return list(dict.fromkeys(commands))  # without duplicates


def join_names(names: list[str]) -> str:
    """Names as text: "a", "a and b", or "a, b and c"; empty without names."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def escape_cell(value: object) -> str:
    """A value as text for a cell of a Markdown table: on one line, with Markdown's `|` and HTML's `<` escaped."""
    text = " ".join(str(value).split())
    return text.replace("|", r"\|").replace("<", "&lt;")


def format_count(number: int | None) -> str:
    """A whole number with commas between its thousands; "not recorded" for `None`."""
    if number is None:
        return NOT_RECORDED
    return f"{number:,}"


def format_number(number: float | None) -> str:
    """A number with four significant digits; "not recorded" for `None`."""
    if number is None:
        return NOT_RECORDED
    return f"{number:,.4g}"


def format_duration(seconds: float | None) -> str:
    """A time in hours, minutes and seconds; "not recorded" for `None`."""
    if seconds is None:
        return NOT_RECORDED
    return str(timedelta(seconds=round(seconds)))
