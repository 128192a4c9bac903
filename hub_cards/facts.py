"""The card's facts, read from what a run left: weights, config, its record, evaluation, diagnostics.

A fact that no file holds is `None`, which the card shows as "not recorded". Records are read as JSON, so that one of
another version is read as far as it goes.
"""

import json
import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from common.errors import UserError
from common.files import fingerprint
from common.records import read_record
from diagnostics.report import with_interval
from diagnostics.table import Summary
from evaluation.record import Evaluation
from hub_cards.weights import Weights, read_weights
from training.run import SAME


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Of the arguments that weights depend on, the card lists all but these: names of folders, and what it says elsewhere.
UNLISTED = ("stage", "model_name_or_path", "model_revision", "max_steps", "max_length")
# A stage of training, for the card; see `read_stage`.
Stage = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """All that the card is rendered from.

    Attributes:
        config: The content of config.json.
        decoder: The decoder's part of it, where all families have the same names for a field.
        text_model, vision_model: Hub ids of the parts, `None` if they are not from the Hub. Both are the id of a Llava
            that the model was converted from.
        earlier_is_recorded: Whether the first of `stages` began with a model that had not been trained before.
    """

    weights: Weights
    config: dict[str, Any]
    decoder: PreTrainedConfig
    text_model: str | None
    vision_model: str | None
    stages: list[Stage]
    earlier_is_recorded: bool
    evaluations: list[Evaluation]
    diagnostics: dict[str, str] | None

    @property
    def steps(self) -> int:
        """Steps of training that are recorded."""
        return sum(stage["steps"] for stage in self.stages)

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the parts that are known, each once."""
        return [name for name in dict.fromkeys((self.text_model, self.vision_model)) if name is not None]


def collect_facts(run: Path, **given: str | None) -> Facts:
    """Read the facts in the output folder of a run's last stage, and in those of earlier stages.

    `given` are Hub ids of parts that were loaded from a folder, `text_model` and `vision_model`. Raises `UserError`
    if a file is missing or torn, an id contradicts the recorded one, or a figure is of other weights.
    """
    if (run / "adapter_config.json").exists():
        raise UserError(
            f"{run} holds an adapter. Merge it first: python training/merge.py --adapter {run} --output_dir <folder>"
        )
    path = run / "config.json"
    if not path.exists():
        raise UserError(f"{run} holds no config.json: give the output folder of a finished training run.")
    config, model = read_json(path), AutoConfig.from_pretrained(run, trust_remote_code=False)
    ids: dict[str, str | None] = {}
    for part in ("text", "vision"):
        own, option = config.get(f"{part}_config", {}).get("_name_or_path"), f"{part}_model"
        recorded = hub_id(config.get("llava_name_or_path")) or hub_id(own)
        ids[option] = given.get(option) or recorded
        if ids[option] and not hub_id(ids[option]):
            raise UserError(f"--{option} {ids[option]!r} is not owner/name.")
        if recorded not in (None, ids[option]):
            raise UserError(f"--{option} is {ids[option]}, but {path} records {recorded}. Omit the option.")
    stages = collect_stages(run)
    is_complete = bool(stages) and stages[0]["stage"] == "align"
    weights = read_weights(run)
    of_weights = fingerprint(weights.sha256)
    return Facts(
        weights,
        config,
        model.get_text_config(),
        ids["text_model"],
        ids["vision_model"],
        stages,
        # Llava's training and the aligned start leave no record but that they were.
        is_complete and not config.get("llava_name_or_path") and not config.get("projector_aligned"),
        read_evaluations(run / "evaluation.json", of_weights),
        read_diagnostics(run / "diagnostics" / "report.json", of_weights),
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `UserError`, with the file's name, if it is invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error


def hub_id(name: str | None) -> str | None:
    """`name` if it has the form of a Hub id. Composing records folders by their absolute paths, which have not."""
    return name if name and HUB_ID.fullmatch(name) else None


def collect_stages(run: Path) -> list[Stage]:
    """The stages of training, as far as their folders are local."""
    stages: list[Stage] = []
    folder, seen = run, set()
    while (folder / "trainer_state.json").exists():
        seen.add(folder.resolve())
        record = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        stages.insert(0, read_stage(folder, record))
        before = record.get("arguments", {}).get("model_name_or_path")
        if before is None or Path(before).resolve() in seen:
            break
        folder = Path(before)
    return stages


def read_stage(folder: Path, record: dict[str, Any]) -> Stage:
    """One stage, from its `trainer_state.json`, `metrics.jsonl` and `run.json`. Raises `UserError` if one is torn."""
    arguments, environment = record.get("arguments", {}), record.get("environment", {})
    stage, metrics = arguments.get("stage"), folder / "metrics.jsonl"
    try:
        steps = read_json(folder / "trainer_state.json")["global_step"]
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        logged: list[dict[str, Any]] = [json.loads(line) for line in lines]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder}: trainer_state.json or metrics.jsonl is not that of a run ({error!r}).") from error
    losses = [line["loss"] for line in logged if "loss" in line] or [None]
    tokens = [line["num_tokens"] for line in logged if "num_tokens" in line] or [None]
    # A resumed run's file has only the last session's time.
    seconds = [line["train_runtime"] for line in logged if "train_runtime" in line and not environment.get("resumed")]
    has_key_loss = arguments.get("key_mmd_weight") or arguments.get("key_gram_weight")
    in_4bit = arguments.get("load_in_4bit")
    has_norm = any("learning_rate/multi_modal_projector.norm" in line for line in logged)
    used = {"lora": stage == "adapt", "bnb": in_4bit, "use_bnb": in_4bit, "key": has_key_loss, "norm": has_norm}
    idle = tuple(prefix for prefix, is_used in used.items() if not is_used)  # of arguments that did nothing
    listed = {name: arguments.get(name) for name in SAME if name not in UNLISTED and not name.startswith(idle)}
    return {
        "stage": stage,
        "steps": steps,
        "tokens": tokens[-1] and int(tokens[-1]),
        "losses": (losses[0], losses[-1]),
        "seconds": seconds[-1] if seconds else None,
        "arguments": {name: value for name, value in listed.items() if value is not None and value is not False},
        "hardware": f"{environment['num_processes']} x {environment['device']}" if environment else None,
        "commit": environment.get("commit"),
        "sources": record.get("sources", []),
    }


def read_evaluations(path: Path, of_weights: str) -> list[Evaluation]:
    """Rows of `evaluation.json`, if there is one. Raises `UserError` if a row is not whole, or of other weights."""
    rows = read_record(list[Evaluation], path) if path.exists() else []
    for number, row in enumerate(rows):
        if not isfinite(row.value):
            raise UserError(f"{path}, row {number}: value is NaN or infinite.")
        if row.weights != of_weights:
            raise UserError(f"{path}, row {number}, {row.task}: of other weights. Measure again: {row.command}")
    return rows


def read_diagnostics(path: Path, of_weights: str) -> dict[str, str] | None:
    """What a report says of its only model, if there is one. Raises `UserError` if it is of other weights."""
    if not path.exists():
        return None
    again = "Run python -m diagnostics on this model alone, not quantized."
    try:
        model, *others = read_json(path)["models"]
        summary = Summary(model["summary"]["rows"])
        values: dict[str, Any] = {
            "norm of visual over text tokens at the decoder": summary.look("ratio"),
            "turning of visual tokens per layer, 1 − cosine": summary.look("turning", "visual"),
            "turning of text tokens per layer": summary.look("turning", "text"),
        }
        label = "{} of the layers; of cosines, visual minus text"
        values |= {label.format(of): summary.look(of) for of in summary.frame["measure"] if of.startswith("gap, ")}
        shown = {name: with_interval(estimate) for name, estimate in values.items()}
        if others or model.get("weights") != of_weights or model["dtype"].endswith("quantized"):
            raise UserError(f"{path} is of other weights. {again}")
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} can't be read ({error!r}). {again}") from error
    return {"pictures": str(model["num_pictures"])} | shown
