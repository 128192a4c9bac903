"""Read the model card's facts from a run's folder: weights, config, records of training, evaluation and diagnostics.

A fact that no file holds is `None`, and the card shows it as "not recorded". `run.json` is read without a schema,
because the card can do without any of its fields.
"""

import json
import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlavaConfig, PreTrainedConfig

from common.errors import UserError
from common.files import fingerprint, weights_fingerprint
from common.records import read_record
from diagnostics.report import with_interval
from diagnostics.table import Summary
from evaluation.record import EVALUATION_FILE, Evaluation
from hub_cards.contents import read_json, read_processor
from hub_cards.plain import is_plain_llava
from hub_cards.weights import Weights, read_weights
from modeling_normllava import NormLlavaConfig


# The form of a Hub id, owner/name, such as "Qwen/Qwen2.5-7B-Instruct".
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# The arguments of a run that the card lists, if they are set. `run.json` has more arguments.
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
# Arguments that the card lists only for runs in which they have an effect. `run.json` has them for every run.
LORA_ARGUMENTS = ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
KEY_LOSS_ARGUMENTS = ("key_mmd_weight", "key_gram_weight")
NORM_ARGUMENTS = ("norm_learning_rate",)


@dataclass(frozen=True)
class TrainingStage:
    """A stage of training, from the records in the stage's folder.

    Attributes:
        name: The stage's name, such as "align".
        steps: Number of optimizer steps.
        tokens: Number of tokens trained on.
        first_loss: The first loss that was logged.
        last_loss: The last loss that was logged.
        seconds: How long the run took.
        arguments: The run's arguments that the card lists, by their names.
        hardware: Number of processes, and the device.
        commit: The commit of the code that trained.
        sources: The data that the stage was trained on: for each source, the fields of [`~training.run.SourceRecord`].
        start_model: The folder or Hub id of the model that the stage started from.
    """

    name: str | None
    steps: int
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    seconds: float | None
    arguments: dict[str, Any]
    hardware: str | None
    commit: str | None
    sources: list[dict[str, Any]]
    start_model: str | None


@dataclass(frozen=True)
class Facts:
    """What a run's files say about its model.

    Attributes:
        weights: What the weight files hold.
        config: The content of config.json.
        processor: The content of processor_config.json.
        is_plain_llava: Whether transformers' own classes run the model, see [`~hub_cards.plain.is_plain_llava`].
        decoder_config: The language model's config, as transformers reads it. Here the fields that the card shows
            have the same names for all model families. In `config` they may have other names.
        text_model: Hub id of the language model, or of the Llava checkpoint that the model was converted from; `None`
            if neither is known.
        vision_model: Hub id of the vision encoder, or of the Llava checkpoint that the model was converted from;
            `None` if neither is known.
        parent: Hub id of the model that the first of `stages` started from; `None` if it started from a folder.
        stages: The stages of training, in their order.
        has_whole_history: Whether `stages` holds all training of the model since its parts were joined.
        evaluations: Results of benchmarks, which are the rows of `evaluation.json`.
        diagnostics: Values that `python -m diagnostics` measured, as text, by their names on the card; `None` if
            there is no report of the diagnostics.
    """

    weights: Weights
    config: dict[str, Any]
    processor: dict[str, Any]
    is_plain_llava: bool
    decoder_config: PreTrainedConfig
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
    config = read_normllava_config(run)
    config_json = read_json(run / "config.json")
    processor = read_processor(run)
    stages = collect_stages(run)
    weights = read_weights(run)
    weights_hash = fingerprint(weights.file_hashes)
    return Facts(
        weights=weights,
        config=config_json,
        processor=processor,
        is_plain_llava=is_plain_llava(config, processor),
        decoder_config=config.get_text_config(),
        text_model=find_part_id(config_json, "text", text_model),
        vision_model=find_part_id(config_json, "vision", vision_model),
        parent=find_parent(stages),
        stages=stages,
        has_whole_history=is_whole_history(config_json, stages),
        evaluations=read_evaluations(run / EVALUATION_FILE, weights_hash),
        diagnostics=read_diagnostics(run / "diagnostics" / "report.json", weights_hash),
    )


def read_normllava_config(folder: Path) -> NormLlavaConfig:
    """The config of the NormLlava in a run's folder, read by this version's class.

    Raises:
        UserError: if there is no valid config, or if the folder holds an adapter or another kind of model.
    """
    config = read_config(folder)
    if not isinstance(config, NormLlavaConfig):
        raise model_type_error(folder, config)
    return config


def read_config(folder: Path) -> LlavaConfig:
    """The config of the NormLlava or Llava in a folder, read by this version's class or transformers' own.

    Raises:
        UserError: if there is no valid config, or if the folder holds an adapter or another kind of model.
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
    if not isinstance(config, LlavaConfig):
        raise model_type_error(folder, config)
    return config


def model_type_error(folder: Path, config: PreTrainedConfig) -> UserError:
    """The error for a folder with a model of another type."""
    path = folder / "config.json"
    return UserError(f"{path}: model_type is {config.model_type!r}, and only a NormLlava can be published.")


def find_part_id(config: dict[str, Any], part: str, given_id: str | None) -> str | None:
    """Hub id of a part: the id that the config records or, if it records none, the id that the user gives.

    Args:
        config: The content of config.json.
        part: "text" or "vision".
        given_id: The id that the user gives.

    Raises:
        UserError: if the given id is no Hub id, or the config records another id.
    """
    if given_id is not None and not is_hub_id(given_id):
        raise UserError(f"--{part}_model {given_id!r} is not owner/name.")

    recorded_id = read_recorded_id(config, part)
    if recorded_id is None:
        return given_id
    if given_id is not None and given_id != recorded_id:
        raise UserError(f"--{part}_model is {given_id}, but config.json records {recorded_id}. Omit the option.")
    return recorded_id


def read_recorded_id(config: dict[str, Any], part: str) -> str | None:
    """The recorded Hub id of the Llava checkpoint that the model was converted from, or else of the part.

    The result is `None` if the config records neither.
    """
    part_config = config.get(f"{part}_config", {})
    for name in (config.get("llava_name_or_path"), part_config.get("_name_or_path")):
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


def is_whole_history(config: dict[str, Any], stages: list[TrainingStage]) -> bool:
    """Whether `stages` holds all training of the model since its parts were joined."""
    # No file records how a Llava checkpoint was trained. Nor how the aligned start trained the projector, which isn't
    # a stage.
    if config.get("llava_name_or_path") or config.get("projector_aligned"):
        return False
    return len(stages) > 0 and stages[0].name == "align" and find_parent(stages) is None


def collect_stages(run: Path) -> list[TrainingStage]:
    """The stages of training in their order, as far back as the stages' folders are on this machine."""
    stages: list[TrainingStage] = []
    visited_folders: set[Path] = set()  # a stage's record may name the stage's own folder
    folder = run
    while (folder / "trainer_state.json").exists() and folder.resolve() not in visited_folders:
        visited_folders.add(folder.resolve())
        run_record: dict[str, Any] = {}
        if (folder / "run.json").exists():
            run_record = read_json(folder / "run.json")
        stages.insert(0, read_stage(folder, run_record))

        # A stage starts from the model in the folder of the stage before it.
        start_model = run_record.get("arguments", {}).get("model_name_or_path")
        if start_model is None:
            break
        folder = Path(start_model)
        # If that stage was run again since, its record tells of another model.
        start_weights = run_record.get("start_weights")
        if start_weights is not None and weights_fingerprint(folder) != start_weights:
            break
    return stages


def read_stage(folder: Path, run_record: dict[str, Any]) -> TrainingStage:
    """Read one stage from its folder.

    Args:
        folder: The folder, with `trainer_state.json` and perhaps `metrics.jsonl`.
        run_record: The content of the folder's `run.json`; empty if there is no such file.
    """
    trainer_state = read_json(folder / "trainer_state.json")
    metrics = read_metrics(folder / "metrics.jsonl")
    arguments = run_record.get("arguments", {})
    environment = run_record.get("environment", {})

    first_loss = None
    last_loss = None
    losses = [entry["loss"] for entry in metrics if "loss" in entry]
    if losses:
        first_loss = losses[0]
        last_loss = losses[-1]

    # Each count is of all tokens so far, so the last count is the stage's.
    tokens = None
    token_counts = [entry["num_tokens"] for entry in metrics if "num_tokens" in entry]
    if token_counts:
        tokens = int(token_counts[-1])

    # A resumed run logs only the time since it was resumed, which is not the time of the stage.
    seconds = None
    logged_seconds = [entry["train_runtime"] for entry in metrics if "train_runtime" in entry]
    if logged_seconds and not environment.get("resumed"):
        seconds = logged_seconds[-1]

    hardware = None
    if environment:
        hardware = f"{environment['num_processes']} x {environment['device']}"

    return TrainingStage(
        name=arguments.get("stage"),
        steps=trainer_state["global_step"],
        tokens=tokens,
        first_loss=first_loss,
        last_loss=last_loss,
        seconds=seconds,
        arguments=select_arguments(arguments, metrics),
        hardware=hardware,
        commit=environment.get("commit"),
        sources=run_record.get("sources", []),
        start_model=arguments.get("model_name_or_path"),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a run's `metrics.jsonl`, one for each line; an empty list if there is no such file.

    Raises:
        UserError: if a line is not valid JSON. A run that was killed may have written only a part of a line.
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
    """The arguments that the card lists for a run, by their names: the arguments that were set and had an effect."""
    names = list(LISTED_ARGUMENTS)
    if arguments.get("stage") == "adapt":
        names += LORA_ARGUMENTS
    if any(arguments.get(name) for name in KEY_LOSS_ARGUMENTS):
        names += KEY_LOSS_ARGUMENTS
    # A run logs a learning rate for the norm only if the model has a norm and the run trains it.
    if any("learning_rate/multi_modal_projector.norm" in entry for entry in metrics):
        names += NORM_ARGUMENTS

    listed_arguments = {}
    for name in names:
        value = arguments.get(name)
        if value is not None and value is not False:  # 0 is listed
            listed_arguments[name] = value
    return listed_arguments


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

    advice = "Run python -m diagnostics on this model alone, not quantized."
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

    # The report calls image tokens "visual". `look` returns `None` for what was not measured.
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
