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

from conversations.files import fingerprint
from hub_cards.weights import Weights, read_weights
from modeling_normllava import NormLlavaConfig


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Arguments of a run that the card lists, without paths and names of the machine, unless they have this value, which
# has no effect or is what everybody has.
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys((
        "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "packed_length",
        "num_train_epochs", "learning_rate", "vision_learning_rate", "projector_learning_rate", "norm_learning_rate",
        "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "seed",
        "lr_scheduler_kwargs", "optim_args", "neftune_noise_alpha", "data_seed", "key_layers",
    )),
    "max_steps": -1, "clip_by_module": False, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "loss_type": "nll", "train_sampling_strategy": "random", "fp16": False, "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True, "use_rslora": False, "use_dora": False,
    "lora_dropout": 0.0, "key_mmd_weight": 0.0, "key_gram_weight": 0.0,
    "key_bandwidths": [0.25, 0.5, 1.0, 2.0, 4.0],
}  # fmt: skip
# Fields of a row of evaluation.json, which `evaluation` writes; those of the second line may be missing.
RESULT = ("task", "dataset", "split", "metric", "value", "n", "standard_error", "command")
OPTIONAL = ("weights", "harness", "choice", "baseline", "baseline_name")


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
        cast_from: Dtypes of the trained weights, if they were cast.
    """

    weights: Weights
    config: dict[str, Any]
    decoder: PreTrainedConfig
    text_model: str | None
    vision_model: str | None
    stages: list[Stage]
    earlier_is_recorded: bool
    evaluations: list[dict[str, Any]]
    diagnostics: dict[str, str] | None
    cast_from: str | None = None

    @property
    def steps(self) -> int:
        """Steps of training that are recorded."""
        return sum(stage["steps"] for stage in self.stages)

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the parts that are known, each once."""
        return [name for name in dict.fromkeys((self.text_model, self.vision_model)) if name is not None]


def collect_facts(run: Path, diagnostics: Path | None = None, **given: str | None) -> Facts:
    """Read the facts in the output folder of a run's last stage, and in those of earlier stages.

    `diagnostics` is a report's folder; `given` are Hub ids of parts that were loaded from a folder, `text_model` and
    `vision_model`. Raises `ValueError` if a file is missing or torn, an id contradicts the recorded one, or a figure
    is of other weights.
    """
    if (run / "adapter_config.json").exists():
        raise ValueError(
            f"{run} holds an adapter. Merge it first: python training/merge.py --adapter {run} --output_dir <folder>"
        )
    path = run / "config.json"
    if not path.exists():
        raise ValueError(f"{run} holds no config.json: give the output folder of a finished training run.")
    config = read_json(path)
    try:
        model = AutoConfig.from_pretrained(run, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(model, NormLlavaConfig):
        raise ValueError(f"{path}: model_type is {model.model_type!r}, not a NormLlava's.")
    ids: dict[str, str | None] = {}
    for part in ("text", "vision"):
        own, option = config.get(f"{part}_config", {}).get("_name_or_path"), f"{part}_model"
        recorded = hub_id(config.get("llava_name_or_path")) or hub_id(own)
        ids[option] = given.get(option) or recorded
        if ids[option] and not hub_id(ids[option]):
            raise ValueError(f"--{option} {ids[option]!r} is not owner/name.")
        if recorded not in (None, ids[option]):
            raise ValueError(f"--{option} is {ids[option]}, but {path} records {recorded}. Omit the option.")
    stages, is_complete = collect_stages(run)
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
        read_diagnostics(diagnostics / "report.json", of_weights) if diagnostics else None,
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `ValueError`, with the file's name, if it is invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error


def hub_id(name: str | None) -> str | None:
    """`name` if it has the form of a Hub id. Composing records folders by their absolute paths, which have not."""
    return name if name and HUB_ID.fullmatch(name) else None


def collect_stages(run: Path) -> tuple[list[Stage], bool]:
    """The stages of training, as far as their folders are local, and whether they begin with an untrained model.

    Stage "align" does, and so does a stage that started from a local folder without `trainer_state.json`, unless its
    model has key adapters, which may have been added to a trained model from the Hub.
    """
    stages: list[Stage] = []
    folder, seen = run, set()
    while (folder / "trainer_state.json").exists():
        seen.add(folder.resolve())
        record = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        stages.insert(0, read_stage(folder, record))
        before = record.get("arguments", {}).get("model_name_or_path")
        if before is None or not Path(before).is_dir() or Path(before).resolve() in seen:
            return stages, stages[0]["stage"] == "align"
        folder = Path(before)
    config = folder / "config.json"
    has_key_adapters = config.exists() and bool(read_json(config).get("key_adapter_rank"))
    return stages, bool(stages) and (stages[0]["stage"] == "align" or not has_key_adapters)


def read_stage(folder: Path, record: dict[str, Any]) -> Stage:
    """One stage, from its `trainer_state.json`, `metrics.jsonl` and `run.json`. Raises `ValueError` if one is torn."""
    arguments, environment = record.get("arguments", {}), record.get("environment", {})
    stage, metrics = arguments.get("stage"), folder / "metrics.jsonl"
    is_best = record.get("progress") is None and arguments.get("load_best_model_at_end")  # of a finished run
    try:
        steps = read_json(folder / "trainer_state.json")["best_global_step" if is_best else "global_step"]
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        logged: list[dict[str, Any]] = [json.loads(line) for line in lines]
        kept = [line for line in logged if line.get("step", 0) <= steps]  # of the published model
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: trainer_state.json or metrics.jsonl is not that of a run ({error!r}).") from error
    losses = [line["loss"] for line in kept if "loss" in line] or [None]
    tokens = [line["num_tokens"] for line in kept if "num_tokens" in line] or [None]
    # A resumed run's file has only the last session's time.
    seconds = [line["train_runtime"] for line in logged if "train_runtime" in line and not environment.get("resumed")]
    shown = {name: arguments[name] for name in ARGUMENTS if arguments.get(name) not in (None, ARGUMENTS[name])}
    adapters = {name: arguments[name] for name in ("lora_r", "lora_alpha") if stage == "adapt" and name in arguments}
    commit, is_dirty = environment.get("commit"), environment.get("commit_is_clean") is False
    return {
        "stage": stage,
        "steps": steps,
        "tokens": tokens[-1] and int(tokens[-1]),
        "losses": (losses[0], losses[-1]),
        "seconds": seconds[-1] if seconds else None,
        "arguments": shown | adapters,
        "hardware": f"{environment['num_processes']} x {environment['device']}" if environment else None,
        "commit": f"{commit}, with uncommitted changes" if commit and is_dirty else commit,
        "sources": record.get("sources", []),
    }


def read_evaluations(path: Path, of_weights: str) -> list[dict[str, Any]]:
    """Rows of `evaluation.json`, if there is one. Raises `ValueError` if a row is not whole, or of other weights."""
    rows = read_json(path) if path.exists() else []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a list of results.")
    for number, row in enumerate(rows):
        if missing := [name for name in RESULT if name not in row]:
            raise ValueError(f"{path}, row {number}: no {', '.join(missing)}.")
        if not isinstance(row["value"], int | float) or not isfinite(row["value"]):
            raise ValueError(f"{path}, row {number}: value is null, NaN or infinite.")
        if row.get("weights") != of_weights:
            raise ValueError(f"{path}, row {number}, {row['task']}: of other weights. Measure again: {row['command']}")
    return [dict.fromkeys(OPTIONAL) | row for row in rows]


def read_diagnostics(path: Path, of_weights: str) -> dict[str, str]:
    """What a report says of its only model. Raises `ValueError` if it can't be read, or is of other weights."""
    again = "Run python -m diagnostics on this model alone, not quantized."
    try:
        (model,) = read_json(path)["models"]
        rows = {(row["measure"], row["modality"]): row for row in model["summary"]["rows"] if row["layer"] is None}
        values = {
            "norm of visual over text tokens at the decoder": rows["ratio", ""],
            "turning of visual tokens per layer, 1 − cosine": rows["turning", "visual"],
            "turning of text tokens per layer": rows["turning", "text"],
        }
        for (measure, _), row in rows.items():
            if measure.startswith("gap, "):
                values[f"gap of cosines, visual minus text, {measure.removeprefix('gap, ')} of the layers"] = row
        shown = {name: with_interval(row["mean"], row["low"], row["high"]) for name, row in values.items()}
        if model.get("weights") != of_weights or model["dtype"].endswith("quantized"):
            raise ValueError(f"{path} is of other weights. {again}")
    except (OSError, LookupError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error!r}). {again}") from error
    return {"pictures": str(model["num_pictures"])} | shown


def with_interval(mean: float, low: float | None, high: float | None) -> str:
    """A mean with its 95% interval, if it has one."""
    return f"{mean:.3g}" if low is None or high is None else f"{mean:.3g} ({low:.3g} to {high:.3g})"
