"""Read the model card's facts from a run's folder: weights, config, records of training, evaluation and diagnostics.

A fact that no file holds is `None`, and the card shows it as "not recorded". `run.json` is read as plain JSON without
a schema, so that a record of another version, which may lack fields, can be read too.
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


# The form of a Hub id, owner/name.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# The arguments of a run that the card lists. `run.json` has the other arguments too, such as Adam's.
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
# Arguments that the card lists only for runs in which they have an effect. Every run records them.
LORA_ARGUMENTS = ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
KEY_LOSS_ARGUMENTS = ("key_mmd_weight", "key_gram_weight")
NORM_ARGUMENTS = ("norm_learning_rate",)


@dataclass(frozen=True)
class TrainingStage:
    """One stage of training, as its folder records it.

    Attributes:
        stage: The stage's name, such as "align".
        steps: Number of optimizer steps.
        tokens: Number of tokens trained on.
        losses: The first and the last loss that were logged.
        seconds: How long the run took.
        arguments: The arguments that had an effect, of those that the card lists.
        hardware: Number of processes, and the device.
        commit: The commit of the code that trained.
        sources: The data that the stage was trained on, as `run.json` records it.
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
        decoder: The decoder's config. Unlike in `config`, its fields have the same names in all model families.
        text_model: Hub id of the language model; `None` if it is not from the Hub. If the model was converted from a
            Llava checkpoint, it is the Llava's id.
        vision_model: Hub id of the vision encoder; `None` if it is not from the Hub. If the model was converted from a
            Llava checkpoint, it is the Llava's id.
        stages: The stages of training, in their order.
        has_whole_history: Whether `stages` hold all training of the model since its parts were joined.
        evaluations: Rows of `evaluation.json`.
        diagnostics: Measured values by their names on the card; `None` if nothing was measured.
    """

    weights: Weights
    config: dict[str, Any]
    decoder: PreTrainedConfig
    text_model: str | None
    vision_model: str | None
    stages: list[TrainingStage]
    has_whole_history: bool
    evaluations: list[Evaluation]
    diagnostics: dict[str, str] | None

    @property
    def base_models(self) -> list[str]:
        """The known Hub ids of the model's parts, each once."""
        names = dict.fromkeys((self.text_model, self.vision_model))
        return [name for name in names if name is not None]


def collect_facts(run: Path, text_model: str | None = None, vision_model: str | None = None) -> Facts:
    """Read the facts from the output folders of a run's last stage and of the stages before it.

    Args:
        run: Output folder of the last stage.
        text_model: Hub id of the language model, if it was loaded from a folder.
        vision_model: Hub id of the vision encoder, if it was loaded from a folder.

    Raises:
        UserError: if a file is missing or torn, a given id contradicts the recorded one, or a result was measured with
            other weights.
    """
    model_config = load_config(run)
    config = read_json(run / "config.json")
    stages = collect_stages(run)
    weights = read_weights(run)
    weights_hash = fingerprint(weights.file_hashes)
    return Facts(
        weights=weights,
        config=config,
        decoder=model_config.get_text_config(),
        text_model=find_part_id(config, "text", text_model),
        vision_model=find_part_id(config, "vision", vision_model),
        stages=stages,
        has_whole_history=is_whole_history(config, stages),
        evaluations=read_evaluations(run / EVALUATION_FILE, weights_hash),
        diagnostics=read_diagnostics(run / "diagnostics" / "report.json", weights_hash),
    )


def load_config(folder: Path) -> NormLlavaConfig:
    """The config of the NormLlava in a folder, read by this version's class.

    Raises:
        UserError: if there is no config, or the folder holds an adapter or another model.
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
    """Hub id of a part, from the config or, if the config records none, from the user.

    Args:
        config: The content of config.json.
        part: "text" or "vision".
        given: The id that the user gives.

    Raises:
        UserError: if the given id is no Hub id, or the config records another.
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
    """The name if it has the form of a Hub id, else `None`.

    `compose.py` records a local folder by its absolute path, which never has this form.
    """
    return name if name and HUB_ID.fullmatch(name) else None


def is_whole_history(config: dict[str, Any], stages: list[TrainingStage]) -> bool:
    """Whether `stages` hold all training of the model since its parts were joined."""
    # A converted Llava and an aligned projector were trained before the first stage. No record tells how.
    if config.get("llava_name_or_path") or config.get("projector_aligned"):
        return False
    return len(stages) > 0 and stages[0].stage == "align"


def collect_stages(run: Path) -> list[TrainingStage]:
    """The stages of training in their order, back to the first one whose folder is on this machine."""
    stages: list[TrainingStage] = []
    seen: set[Path] = set()
    folder = run
    while (folder / "trainer_state.json").exists() and folder.resolve() not in seen:
        seen.add(folder.resolve())
        record: dict[str, Any] = {}
        if (folder / "run.json").exists():
            record = read_json(folder / "run.json")
        stages.insert(0, read_stage(folder, record))

        # A stage starts from the model in the folder of the stage before it.
        start_model = record.get("arguments", {}).get("model_name_or_path")
        if start_model is None:
            break
        folder = Path(start_model)
    return stages


def read_stage(folder: Path, record: dict[str, Any]) -> TrainingStage:
    """One stage, from its `trainer_state.json`, `metrics.jsonl` and `run.json`."""
    environment = record.get("environment", {})
    metrics = read_metrics(folder / "metrics.jsonl")
    losses = [line["loss"] for line in metrics if "loss" in line]
    tokens = [line["num_tokens"] for line in metrics if "num_tokens" in line]
    seconds = [line["train_runtime"] for line in metrics if "train_runtime" in line]

    # A resumed run logs only the time since it was resumed.
    has_all_time = bool(seconds) and not environment.get("resumed")
    hardware = f"{environment['num_processes']} x {environment['device']}" if environment else None
    return TrainingStage(
        stage=record.get("arguments", {}).get("stage"),
        steps=read_json(folder / "trainer_state.json")["global_step"],
        tokens=int(tokens[-1]) if tokens else None,
        losses=(losses[0], losses[-1]) if losses else (None, None),
        seconds=seconds[-1] if has_all_time else None,
        arguments=select_arguments(record.get("arguments", {}), metrics),
        hardware=hardware,
        commit=environment.get("commit"),
        sources=record.get("sources", []),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`; an empty list if there is no such file.

    Raises:
        UserError: if a line is torn.
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


def select_arguments(arguments: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments that the card lists for a run: those that were set and had an effect."""
    names = [*LISTED_ARGUMENTS]
    if arguments.get("stage") == "adapt":
        names += LORA_ARGUMENTS
    if any(arguments.get(name) for name in KEY_LOSS_ARGUMENTS):
        names += KEY_LOSS_ARGUMENTS
    # A run logs the learning rate of the norm only if the model has a norm and trains it.
    if any("learning_rate/multi_modal_projector.norm" in line for line in metrics):
        names += NORM_ARGUMENTS

    listed = {}
    for name in names:
        value = arguments.get(name)
        if value is not None and value is not False:
            listed[name] = value
    return listed


def read_evaluations(path: Path, weights_hash: str) -> list[Evaluation]:
    """The rows of `evaluation.json`; an empty list if there is no such file.

    Raises:
        UserError: if a row lacks a field, its value is not finite, or it was measured with other weights.
    """
    if not path.exists():
        return []

    rows: list[Evaluation] = read_record(list[Evaluation], path)
    for number, row in enumerate(rows):
        if not isfinite(row.value):
            raise UserError(f"{path}, row {number}: value is NaN or infinite.")
        if row.weights != weights_hash:
            raise UserError(
                f"{path}, row {number}, {row.task}: was measured with other weights. Measure again: {row.command}"
            )
    return rows


def read_diagnostics(path: Path, weights_hash: str) -> dict[str, str] | None:
    """The card's values from a report of the diagnostics, by their names; `None` if there is no report.

    Raises:
        UserError: if the report is about other weights or several models, or if another version wrote it.
    """
    if not path.exists():
        return None

    advice = "Run python -m diagnostics on this model alone, not quantized."
    try:
        models = read_json(path)["models"]
        model = models[0]
        is_quantized = model["dtype"].endswith("quantized")
        num_pictures = model["num_pictures"]
        rows = model["summary"]["rows"]
    except (KeyError, IndexError) as error:
        raise UserError(f"{path}: another version wrote it ({error!r}). {advice}") from error
    if len(models) > 1 or is_quantized or model.get("weights") != weights_hash:
        raise UserError(f"{path} is of other weights. {advice}")

    summary = Summary(rows)
    estimates = {
        "L2 norm of image tokens over that of text tokens, at the decoder": summary.look("ratio"),
        "turning of image tokens per layer, 1 − cosine": summary.look("turning", "visual"),
        "turning of text tokens per layer": summary.look("turning", "text"),
    }
    card_values = {"pictures": str(num_pictures)}
    for name, estimate in estimates.items():
        if estimate is not None:
            card_values[name] = with_interval(estimate)
    return card_values
