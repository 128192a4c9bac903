"""Collect the model card's facts from a run's folder: the model, its training, and what was measured of it."""

import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from transformers import LlavaConfig

from hub_cards.contents import read_json
from hub_cards.history import TrainingStage, collect_stages
from hub_cards.model_folder import ModelFolder
from normllava.diagnostics.report import with_interval
from normllava.diagnostics.table import Summary
from normllava.errors import UserError
from normllava.evaluation.json_records import read_record
from normllava.evaluation.record import EVALUATION_FILE, Evaluation
from normllava.files import fingerprint
from training.folders.run import COMPOSED_FILE, Composed, read_composed


# The form of a Hub id, owner/name, such as "Qwen/Qwen2.5-7B-Instruct".
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Facts:
    """What a run's files say about its model.

    Attributes:
        model: The model's folder.
        composed: How the model was composed before its first stage; `None` if that isn't recorded.
        text_model: Hub id of the language model, or of the Llava checkpoint that the model was converted from; `None`
            if neither is known.
        vision_model: Hub id of the vision encoder, or of the Llava checkpoint that the model was converted from;
            `None` if neither is known.
        parent: Hub id of the model that the first of `stages` started from; `None` if it started from a folder.
        stages: The stages of training, in their order.
        has_whole_history: Whether `stages` holds all training of the model since its parts were joined.
        evaluations: Results of benchmarks, which are the rows of `evaluation.json`.
        diagnostics: Values that `normllava diagnose` measured, as text, by their names on the card; `None` if
            there is no report of the diagnostics.
    """

    model: ModelFolder
    composed: Composed | None
    text_model: str | None
    vision_model: str | None
    parent: str | None
    stages: list[TrainingStage]
    has_whole_history: bool
    evaluations: list[Evaluation]
    diagnostics: dict[str, str] | None

    @property
    def base_models(self) -> list[str]:
        """The Hub ids that the card's metadata names: the parent if there is one, otherwise the parts."""
        return self.parts if self.parent is None else [self.parent]

    @property
    def parts(self) -> list[str]:
        """The known Hub ids of the model's parts. An id that both parts have is listed once."""
        hub_ids = dict.fromkeys((self.text_model, self.vision_model))
        return [hub_id for hub_id in hub_ids if hub_id is not None]


def collect_facts(run: Path, text_model: str | None = None, vision_model: str | None = None) -> Facts:
    """Read the facts from the output folders of a run's last stage and of the stages before it.

    Args:
        run: Output folder of the last stage.
        text_model: Hub id of the language model, if it was loaded from a folder.
        vision_model: Hub id of the vision encoder, if it was loaded from a folder.

    Raises:
        UserError: if a file is missing or can't be read, if a given id contradicts the recorded id, or if a result was
            measured with other weights.
    """
    model = ModelFolder(run)
    assert isinstance(model.config, LlavaConfig)  # it is read first, since its errors say what to give instead
    stages = collect_stages(run)
    composed = read_composed(str(run))
    weights_hash = fingerprint(model.weights.file_hashes)
    return Facts(
        model=model,
        composed=composed,
        text_model=find_part_id(model.settings, composed, "text", text_model),
        vision_model=find_part_id(model.settings, composed, "vision", vision_model),
        parent=find_parent(stages),
        stages=stages,
        has_whole_history=is_whole_history(composed, stages),
        evaluations=read_evaluations(run / EVALUATION_FILE, weights_hash),
        diagnostics=read_diagnostics(run / "diagnostics" / "report.json", weights_hash),
    )


def find_part_id(config: dict[str, Any], composed: Composed | None, part: str, given_id: str | None) -> str | None:
    """Hub id of a part: the id that the run's files record or, if they record none, the id that the user gives.

    Args:
        config: The content of config.json.
        composed: How the model was composed; `None` if that isn't recorded.
        part: "text" or "vision".
        given_id: The id that the user gives.

    Raises:
        UserError: if the given id is no Hub id, or another id is recorded.
    """
    if given_id is not None and not is_hub_id(given_id):
        raise UserError(f"--{part}_model {given_id!r} is not owner/name.")

    recorded_id = read_recorded_id(config, composed, part)
    if recorded_id is None:
        return given_id
    if given_id is not None and given_id != recorded_id:
        raise UserError(f"--{part}_model is {given_id}, but {recorded_id} is recorded. Omit the option.")
    return recorded_id


def read_recorded_id(config: dict[str, Any], composed: Composed | None, part: str) -> str | None:
    """The recorded Hub id of the Llava checkpoint that the model was converted from, or else of the part.

    The result is `None` if neither is recorded.
    """
    part_config = config.get(f"{part}_config", {})
    llava = None if composed is None else composed.llava_name_or_path
    for name in (llava, part_config.get("_name_or_path")):
        if name is not None and is_hub_id(name):
            return name
    return None


def is_hub_id(name: str) -> bool:
    """Whether a model's name has the form of a Hub id.

    The absolute path of a folder, by which `training/compose.py` records a local model, doesn't have this form.
    """
    return HUB_ID_PATTERN.fullmatch(name) is not None


def find_parent(stages: list[TrainingStage]) -> str | None:
    """The Hub id of the model that the first stage started from; `None` if it started from a folder."""
    start_model = stages[0].start_model if stages else None
    if start_model is None or not is_hub_id(start_model):
        return None
    # The relative path of a folder can have the form of a Hub id too.
    is_folder = Path(start_model).exists() or Path(start_model).parent.is_dir()
    return None if is_folder else start_model


def is_whole_history(composed: Composed | None, stages: list[TrainingStage]) -> bool:
    """Whether `stages` holds all training of the model since its parts were joined."""
    # No file records how a Llava checkpoint was trained. Nor how the aligned start trained the projector, which isn't
    # a stage.
    if composed is None or composed.llava_name_or_path is not None or composed.projector_aligned or not stages:
        return False
    first_start = stages[0].start_model
    starts_untrained = first_start is not None and Path(first_start, COMPOSED_FILE).exists()
    return starts_untrained or stages[0].name == "align"


def read_evaluations(path: Path, weights_hash: str) -> list[Evaluation]:
    """The rows of `evaluation.json`; an empty list if there is no such file.

    Raises:
        UserError: if a row lacks a field, has a value that is not finite, or was measured with other weights or with
            weights that it doesn't name.
    """
    if not path.exists():
        return []

    rows: list[Evaluation] = read_record(list[Evaluation], path)
    for number, row in enumerate(rows):
        if not isfinite(row.value):
            raise UserError(f"{path}, row {number}: value is NaN or infinite.")
        if row.weights is None:
            raise UserError(
                f"{path}, row {number}, {row.task}: doesn't say which weights were measured. Measure again, or if "
                f'they were these, add "weights": "{weights_hash}".'
            )
        if row.weights != weights_hash:
            raise UserError(
                f"{path}, row {number}, {row.task}: was measured with other weights. Measure again: {row.command}"
            )
    return rows


def read_diagnostics(path: Path, weights_hash: str) -> dict[str, str] | None:
    """The values that the card shows from the diagnostics' report, by their names on the card.

    Returns:
        The values as text; `None` if there is no report.

    Raises:
        UserError: if the report is about several models, other weights or quantized weights, or lacks a field.
    """
    if not path.exists():
        return None

    advice = "Run normllava diagnose on this model alone, not quantized."
    try:
        models = read_json(path)["models"]
        model = models[0]
        is_quantized = model["dtype"].endswith("quantized")  # such as "float32, quantized"
        num_pictures = model["num_pictures"]
        rows = model["summary"]["rows"]
    except (KeyError, IndexError) as error:
        raise UserError(f"{path} can't be read ({error!r}). {advice}") from error
    if len(models) > 1 or is_quantized or model.get("weights") != weights_hash:
        raise UserError(f"{path} is of other weights. {advice}")

    # `look` returns `None` for what was not measured.
    summary = Summary(rows)
    estimates = {
        "L2 norm of image tokens over that of text tokens, at the decoder": summary.look("ratio"),
        "turning of image tokens per layer, 1 − cosine": summary.look("turning", "image"),
        "turning of text tokens per layer": summary.look("turning", "text"),
    }
    card_values = {"pictures": str(num_pictures)}
    for name, estimate in estimates.items():
        if estimate is not None:
            card_values[name] = with_interval(estimate)
    return card_values
