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

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from common.errors import UserError
from common.files import fingerprint
from common.records import read_record
from diagnostics.report import with_interval
from diagnostics.table import Summary
from evaluation.record import EVALUATION_FILE, Evaluation
from hub_cards.contents import read_json
from hub_cards.weights import Weights, read_weights
from modeling_normllava import NormLlavaConfig


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Arguments of a run that the card lists. `run.json` has the others, such as those of Adam.
LISTED_ARGUMENTS = (
    "num_train_epochs",
    "global_batch_size",
    "packed_length",
    "seed",
    "bf16",
    "fp16",
    "learning_rate",
    "vision_learning_rate",
    "projector_learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "clip_by_module",
    "loss_type",
    "load_in_4bit",
)
# Arguments that every run has, and that have an effect only in some.
LORA_ARGUMENTS = ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
KEY_LOSS_ARGUMENTS = ("key_mmd_weight", "key_gram_weight")
NORM_ARGUMENTS = ("norm_learning_rate",)


@dataclass(frozen=True)
class TrainingStage:
    """One stage of training, as its folder records it.

    Attributes:
        stage: Its name, such as "align".
        steps: Optimizer steps.
        tokens: Tokens trained on.
        losses: The first and the last loss that were logged.
        seconds: Time of the run.
        arguments: Those that had an effect.
        hardware: Processes and device.
        commit: Of the code.
        sources: What it was trained on, as in `run.json`.
    """

    stage: str | None
    steps: int
    tokens: int | None
    losses: tuple[float | None, float | None]
    seconds: float | None
    arguments: dict[str, Any]
    hardware: str | None
    commit: str | None
    sources: list[dict[str, Any]]


@dataclass(frozen=True)
class Facts:
    """All that the card is made from.

    Attributes:
        weights: What the weight files hold.
        config: The content of config.json.
        decoder: The decoder's part of it, where all families have the same names for a field.
        text_model: Hub id of the language model; `None` if it is not from the Hub.
        vision_model: Hub id of the vision encoder. Both are that of the Llava that the model was converted from.
        stages: The stages of training, in their order.
        earlier_is_recorded: Whether the first of `stages` began with a model that had not been trained before.
        evaluations: Rows of `evaluation.json`.
        diagnostics: Measured values by their names.
    """

    weights: Weights
    config: dict[str, Any]
    decoder: PreTrainedConfig
    text_model: str | None
    vision_model: str | None
    stages: list[TrainingStage]
    earlier_is_recorded: bool
    evaluations: list[Evaluation]
    diagnostics: dict[str, str] | None

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the parts that are known, each once."""
        names = dict.fromkeys((self.text_model, self.vision_model))
        return [name for name in names if name is not None]


def collect_facts(run: Path, text_model: str | None = None, vision_model: str | None = None) -> Facts:
    """Read the facts in the output folder of a run's last stage, and in those of earlier stages.

    Args:
        run: The folder.
        text_model: Hub id of the language model, if it was loaded from a folder.
        vision_model: Hub id of the vision encoder, if it was loaded from a folder.

    Raises:
        UserError: if a file is missing or torn, an id contradicts the recorded one, or a figure is of other weights.
    """
    model_config = load_config(run)
    config = read_json(run / "config.json")
    stages = collect_stages(run)
    weights = read_weights(run)
    weights_hash = fingerprint(weights.sha256)
    return Facts(
        weights=weights,
        config=config,
        decoder=model_config.get_text_config(),
        text_model=find_part_id(config, "text", text_model),
        vision_model=find_part_id(config, "vision", vision_model),
        stages=stages,
        earlier_is_recorded=has_whole_history(config, stages),
        evaluations=read_evaluations(run / EVALUATION_FILE, weights_hash),
        diagnostics=read_diagnostics(run / "diagnostics" / "report.json", weights_hash),
    )


def load_config(folder: Path) -> NormLlavaConfig:
    """The config of the NormLlava in a folder, read by this version's class.

    Raises:
        UserError: if there is none, or it is another model's or an adapter's.
    """
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} holds an adapter. Merge it first: python training/merge.py --adapter {folder} "
            "--output_dir <folder>"
        )
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} holds no config.json: give the output folder of a finished training run.")

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(config, NormLlavaConfig):
        raise UserError(f"{path}: model_type is {config.model_type!r}, and only a NormLlava can be published.")
    return config


def find_part_id(config: dict[str, Any], part: str, given: str | None) -> str | None:
    """Hub id of a part, "text" or "vision", as the config records it or as it is given.

    Raises:
        UserError: if the given one is no Hub id, or another than the recorded one.
    """
    if given is not None and hub_id(given) is None:
        raise UserError(f"--{part}_model {given!r} is not owner/name.")

    part_config = config.get(f"{part}_config", {})
    recorded = hub_id(config.get("llava_name_or_path")) or hub_id(part_config.get("_name_or_path"))
    if recorded is None:
        return given
    if given not in (None, recorded):
        raise UserError(f"--{part}_model is {given}, but config.json records {recorded}. Omit the option.")
    return recorded


def hub_id(name: str | None) -> str | None:
    """`name` if it has the form of a Hub id. Composing records folders by their absolute paths, which have not."""
    return name if name and HUB_ID.fullmatch(name) else None


def has_whole_history(config: dict[str, Any], stages: list[TrainingStage]) -> bool:
    """Whether `stages` are all of the training that joined the parts."""
    # Of a converted Llava's training, and of the aligned start, only this much is recorded.
    if config.get("llava_name_or_path") or config.get("projector_aligned"):
        return False
    return len(stages) > 0 and stages[0].stage == "align"


def collect_stages(run: Path) -> list[TrainingStage]:
    """The stages of training in their order, as far as their folders are local."""
    stages: list[TrainingStage] = []
    seen: set[Path] = set()
    folder = run
    while (folder / "trainer_state.json").exists() and folder.resolve() not in seen:
        seen.add(folder.resolve())
        record: dict[str, Any] = {}
        if (folder / "run.json").exists():
            record = read_json(folder / "run.json")
        stages.insert(0, read_stage(folder, record))

        before = record.get("arguments", {}).get("model_name_or_path")
        if before is None:
            break
        folder = Path(before)
    return stages


def read_stage(folder: Path, record: dict[str, Any]) -> TrainingStage:
    """One stage, from its `trainer_state.json`, `metrics.jsonl` and `run.json`."""
    environment = record.get("environment", {})
    metrics = read_metrics(folder / "metrics.jsonl")
    losses = [line["loss"] for line in metrics if "loss" in line]
    tokens = [line["num_tokens"] for line in metrics if "num_tokens" in line]
    seconds = [line["train_runtime"] for line in metrics if "train_runtime" in line]

    # The file of a resumed run has only the time since it was resumed.
    has_all_time = bool(seconds) and not environment.get("resumed")
    hardware = f"{environment['num_processes']} x {environment['device']}" if environment else None
    return TrainingStage(
        stage=record.get("arguments", {}).get("stage"),
        steps=read_json(folder / "trainer_state.json")["global_step"],
        tokens=int(tokens[-1]) if tokens else None,
        losses=(losses[0], losses[-1]) if losses else (None, None),
        seconds=seconds[-1] if has_all_time else None,
        arguments=listed_arguments(record.get("arguments", {}), metrics),
        hardware=hardware,
        commit=environment.get("commit"),
        sources=record.get("sources", []),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, none if it is not there.

    Raises:
        UserError: if one is torn.
    """
    if not path.exists():
        return []

    metrics = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}, is not valid JSON ({error}). Delete the line.") from error
    return metrics


def listed_arguments(arguments: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """A run's arguments for the card: those that were set and had an effect."""
    names = [*LISTED_ARGUMENTS]
    if arguments.get("stage") == "adapt":
        names += LORA_ARGUMENTS
    if any(arguments.get(name) for name in KEY_LOSS_ARGUMENTS):
        names += KEY_LOSS_ARGUMENTS
    if any("learning_rate/multi_modal_projector.norm" in line for line in metrics):
        names += NORM_ARGUMENTS

    listed = {}
    for name in names:
        value = arguments.get(name)
        if value is not None and value is not False:
            listed[name] = value
    return listed


def read_evaluations(path: Path, weights_hash: str) -> list[Evaluation]:
    """Rows of `evaluation.json`, none if it is not there.

    Raises:
        UserError: if a row is not whole, or of other weights.
    """
    if not path.exists():
        return []

    rows: list[Evaluation] = read_record(list[Evaluation], path)
    for number, row in enumerate(rows):
        if not isfinite(row.value):
            raise UserError(f"{path}, row {number}: value is NaN or infinite.")
        if row.weights != weights_hash:
            raise UserError(f"{path}, row {number}, {row.task}: of other weights. Measure again: {row.command}")
    return rows


def read_diagnostics(path: Path, weights_hash: str) -> dict[str, str] | None:
    """What a report of the diagnostics says of its only model; `None` if there is no report.

    Raises:
        UserError: if the report is of other weights or several models, or another version wrote it.
    """
    if not path.exists():
        return None

    again = "Run python -m diagnostics on this model alone, not quantized."
    try:
        models = read_json(path)["models"]
        model = models[0]
        is_quantized = model["dtype"].endswith("quantized")
        pictures = model["num_pictures"]
        rows = model["summary"]["rows"]
    except (KeyError, IndexError) as error:
        raise UserError(f"{path}: another version wrote it ({error!r}). {again}") from error
    if len(models) > 1 or is_quantized or model.get("weights") != weights_hash:
        raise UserError(f"{path} is of other weights. {again}")

    summary = Summary(rows)
    estimates = {
        "L2 norm of image tokens over that of text tokens, at the decoder": summary.look("ratio"),
        "turning of image tokens per layer, 1 − cosine": summary.look("turning", "visual"),
        "turning of text tokens per layer": summary.look("turning", "text"),
    }
    shown = {"pictures": str(pictures)}
    for name, estimate in estimates.items():
        if estimate is not None:
            shown[name] = with_interval(estimate)
    return shown
