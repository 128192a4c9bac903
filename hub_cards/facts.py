"""The card's facts, read from artefacts: weight files, config, the run's files, evaluation, diagnostics.

A fact that no artefact holds is `None`, which the card shows as "not recorded".
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from diagnostics.results import ModelReport, Report, from_json
from evaluation.record import EVALUATION_FILE, Evaluation
from hub_cards.findings import Finding
from hub_cards.weights import Weights, read_weights
from modeling_normllava import NormLlavaConfig
from training.run import RUN_FILE, Environment, Run, Source


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Arguments of a run that the card lists, without paths and names of the machine.
ARGUMENTS = (
    "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "packed_length",
    "num_train_epochs", "max_steps", "learning_rate", "vision_learning_rate", "projector_learning_rate",
    "norm_learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16",
    "seed",
)  # fmt: skip
# Arguments that are listed only if they differ from the default.
UNUSUAL = (
    "clip_by_module", "lr_scheduler_kwargs", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_type",
    "neftune_noise_alpha", "train_sampling_strategy", "data_seed", "fp16", "load_in_4bit", "bnb_4bit_quant_type",
    "use_bnb_nested_quant", "use_rslora", "use_dora", "lora_dropout", "key_mmd_weight", "key_gram_weight",
    "key_layers", "key_bandwidths",
)  # fmt: skip
ADAPTER_ARGUMENTS = ("lora_r", "lora_alpha")
# Settings of a run by name, of any type.
Arguments = dict[str, Any]


@dataclass(frozen=True)
class StageFacts:
    """One stage of training.

    Attributes:
        stage: `align`, `instruct` or `adapt`, if it is recorded.
        steps, tokens, first_loss, last_loss: From `trainer_state.json` and `metrics.jsonl`.
        seconds: From `metrics.jsonl`; `None` for a resumed run, whose file has only the last session's time.
        arguments: Those that the card lists.
        environment: What it ran on, if it is recorded.
        sources: Where its rows are from, if it is recorded.
    """

    stage: str | None
    steps: int
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    seconds: float | None
    arguments: Arguments
    environment: Environment | None
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Cast:
    """How a model that was cast to another dtype answers a fixed question, compared with the trained model.

    Attributes:
        dtypes: Weights by dtype before the cast.
        difference: Largest difference between logits.
        spread: Standard deviation of the logits before the cast.
        same_tokens, tokens: Greedy tokens before the first that differs, and in total.
    """

    dtypes: dict[str, int]
    difference: float
    spread: float
    same_tokens: int
    tokens: int


@dataclass(frozen=True)
class Facts:
    """All that the card is rendered from.

    Attributes:
        weights: What the weight files hold.
        vision_model, text_model: Hub ids of the parts, `None` if they are not from the Hub. Both are the id of a Llava
            that the model was converted from.
        converted: Whether the model was converted from a Llava, whose projector it has.
        image_size, image_tokens: Side of a picture in pixels, and its visual tokens.
        hidden_size, layers: Of the decoder.
        projector_norm, target: Arm of the norm, and T.
        projector_scaled: Whether a projector without a norm was scaled when it was new.
        projector_aligned: Whether the projector first learned to point at captions' embeddings.
        key_adapter_rank: Rank of the adapters of the decoder's keys, 0 if there are none.
        stages: In the order that they were run in.
        earlier_is_recorded: Whether the first of `stages` began with a model that had not been trained before.
        diagnostics: The model's entry in the diagnostics' `report.json`.
        cast: Effect of a cast, if there was one.
    """

    weights: Weights
    vision_model: str | None
    text_model: str | None
    converted: bool
    image_size: int | None
    image_tokens: int | None
    hidden_size: int
    layers: int
    projector_norm: str
    target: float | None
    projector_scaled: bool
    projector_aligned: bool
    key_adapter_rank: int
    stages: list[StageFacts] = field(default_factory=list)
    earlier_is_recorded: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)
    diagnostics: ModelReport | None = None
    cast: Cast | None = None

    @property
    def parameters(self) -> dict[str, int]:
        """Weights by part of the model."""
        return self.weights.count("part")

    @property
    def steps(self) -> int:
        """Steps of training that are recorded."""
        return sum(stage.steps for stage in self.stages)

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the parts that are known, each once."""
        return [name for name in dict.fromkeys((self.text_model, self.vision_model)) if name is not None]


def collect_facts(
    run: Path, diagnostics: Path | None, text_model: str | None = None, vision_model: str | None = None
) -> Facts:
    """Read the facts in a run's folder, and in those of earlier stages.

    Args:
        run: Output folder of the last stage.
        diagnostics: Folder that `python -m diagnostics` wrote about this model.
        text_model, vision_model: Hub ids of parts that were loaded from a folder.

    Raises:
        ValueError: if the folder holds no complete model, a file can't be read, a Hub id contradicts the recorded
            one, or the diagnostics are of several models.
    """
    if (run / "adapter_config.json").exists():
        raise ValueError(
            f"{run} holds an adapter. Merge it first: python training/merge.py --adapter {run} --output_dir <folder>"
        )
    config_file = run / "config.json"
    if not config_file.exists():
        raise ValueError(f"{run} holds no config.json: give the output folder of a finished training run.")
    config = read_json(config_file)
    if not isinstance(config, dict) or config.get("model_type") != "normllava":
        found = config.get("model_type") if isinstance(config, dict) else config
        raise ValueError(f"{config_file}: model_type is {found!r}, not 'normllava'.")
    missing = [name for name in ("text_config", "vision_config", "projector_norm") if name not in config]
    if missing:
        raise ValueError(f"{config_file}: no {', '.join(missing)}. Save the model again.")
    try:
        decoder = NormLlavaConfig.from_dict(config).get_text_config()  # which knows the names of every family's fields
    except StrictDataclassError as error:
        raise ValueError(f"{config_file}: {error}") from error
    stages, earlier_is_recorded = collect_stages(run)
    llava = config.get("llava_name_or_path")
    recorded = {name: hub_id(llava) or config[name].get("_name_or_path") for name in ("text_config", "vision_config")}
    evaluations = read_evaluations(run)
    measured = None if diagnostics is None else read_diagnostics(diagnostics)
    return Facts(
        weights=read_weights(run),  # last, since it takes longest
        vision_model=choose_id("vision_model", vision_model, recorded["vision_config"], config_file),
        text_model=choose_id("text_model", text_model, recorded["text_config"], config_file),
        converted=llava is not None,
        image_size=config["vision_config"].get("image_size"),
        image_tokens=config.get("image_seq_length"),
        hidden_size=decoder.hidden_size,
        layers=decoder.num_hidden_layers,
        projector_norm=config["projector_norm"],
        target=config.get("projector_norm_target"),
        projector_scaled=config.get("projector_scaled", False),
        projector_aligned=config.get("projector_aligned", False),
        key_adapter_rank=config.get("key_adapter_rank", 0),
        stages=stages,
        # The aligned start is training too, and leaves no record but that it was.
        earlier_is_recorded=earlier_is_recorded and llava is None and not config.get("projector_aligned", False),
        evaluations=evaluations,
        diagnostics=measured,
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `ValueError`, with the file's name, if it is invalid."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error


def parse_json(text: str) -> Any:
    """The content of a JSON text. Raises `ValueError` if it is invalid, or holds what only Python accepts, such as
    NaN, or a duplicate key, which parsers read differently.
    """

    def read_number(name: str) -> float:
        if not isfinite(float(name)):  # "1e999" too
            raise ValueError(f"{name} is not a JSON value")
        return float(name)

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"duplicate key {twice}")
        return entries

    return json.loads(text, parse_constant=read_number, parse_float=read_number, object_pairs_hook=read_object)


def hub_id(name: str | None) -> str | None:
    """`name` if it is the id of a Hub repository and not a path."""
    return name if name and HUB_ID.fullmatch(name) and not Path(name).exists() else None


def choose_id(option: str, given: str | None, recorded: str | None, config_file: Path) -> str | None:
    """The Hub id of a part, from the command line or the config. Raises `ValueError` if they disagree."""
    known = hub_id(recorded)
    if given is None:
        return known
    if not HUB_ID.fullmatch(given):
        raise ValueError(f"--{option} {given!r} is not owner/name.")
    if known not in (None, given):
        raise ValueError(f"--{option} is {given}, but {config_file} records {known}. Omit the option.")
    return given


def collect_stages(run: Path) -> tuple[list[StageFacts], bool]:
    """The stages of training: this folder's, and those of the folders that it started from, as far as they are local.

    Returns:
        The stages in order, and whether they begin with an untrained model: stage "align" does, and so does a stage
        that started from a local folder without `trainer_state.json`, unless its model has key adapters, which may
        have been added to a trained model from the Hub.
    """
    stages: list[StageFacts] = []
    folder, seen = run, set()
    while (folder / "trainer_state.json").exists():
        seen.add(folder.resolve())
        recorded = Run.read(folder) if (folder / RUN_FILE).exists() else None
        stages.insert(0, read_stage(folder, recorded))
        before = None if recorded is None else recorded.arguments.get("model_name_or_path")
        if before is None or not Path(before).is_dir() or Path(before).resolve() in seen:
            return stages, stages[0].stage == "align"
        folder = Path(before)
    config = folder / "config.json"
    has_key_adapters = config.exists() and bool(read_json(config).get("key_adapter_rank"))
    return stages, bool(stages) and (stages[0].stage == "align" or not has_key_adapters)


def read_stage(folder: Path, run: Run | None) -> StageFacts:
    """One stage, from its folder and its record."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    try:
        logged = [parse_json(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{metrics}: a line is not valid JSON ({error}).") from error
    state = read_json(folder / "trainer_state.json")
    if not all(isinstance(line, dict) for line in logged) or not isinstance(state, dict) or "global_step" not in state:
        raise ValueError(f"{folder}: trainer_state.json and metrics.jsonl are not those of a run.")
    arguments: Arguments = {} if run is None else run.arguments
    finished = run is not None and run.progress is None
    steps = state["best_global_step" if finished and arguments.get("load_best_model_at_end") else "global_step"]
    seconds = [line["train_runtime"] for line in logged if "train_runtime" in line]
    logged = [line for line in logged if line.get("step", 0) <= steps]  # of the published model
    losses = [line["loss"] for line in logged if "loss" in line]
    tokens = [line["num_tokens"] for line in logged if "num_tokens" in line]
    return StageFacts(
        stage=arguments.get("stage"),
        steps=steps,
        tokens=int(tokens[-1]) if tokens else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        seconds=seconds[-1] if seconds and not (run is not None and run.environment.resumed) else None,
        arguments={
            name: arguments[name]
            for name in (*ARGUMENTS, *UNUSUAL, *ADAPTER_ARGUMENTS)
            if name in arguments and is_listed(name, arguments)
        },
        environment=None if run is None else run.environment,
        sources=() if run is None else run.sources,
    )


@cache
def usual_arguments() -> Arguments:
    """The default arguments of a run."""
    from training.arguments import RunArguments, TrainingConfig  # here, since TRL takes seconds to import

    return {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for kind in (RunArguments, TrainingConfig)
        for entry in fields(kind)
    }


def is_listed(name: str, arguments: Arguments) -> bool:
    """Whether the card lists an argument: not if it has no effect."""
    value = arguments[name]
    if name in UNUSUAL:
        return value != usual_arguments()[name]
    if name in ADAPTER_ARGUMENTS:
        return arguments.get("stage") == "adapt"
    if name == "num_train_epochs":
        return arguments.get("max_steps", -1) <= 0
    return value is not None and (name != "max_steps" or value > 0)


def read_evaluations(run: Path) -> list[Evaluation]:
    """Rows of `evaluation.json`.

    Raises:
        ValueError: if a row lacks a field or a number.
    """
    path = run / EVALUATION_FILE
    rows = read_json(path) if path.exists() else []
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a list of results.")
    evaluations = [from_json(Evaluation, row, f"{path}, row {number}") for number, row in enumerate(rows)]
    for number, row in enumerate(evaluations):
        if not isfinite(row.value):  # from null
            raise ValueError(f"{path}, row {number}: value is null, NaN or infinite.")
    return evaluations


def read_diagnostics(folder: Path) -> ModelReport:
    """The entry of the only model in the diagnostics' report.

    Raises:
        ValueError: if there is no report, or it is incomplete, or about several models.
    """
    path = folder / "report.json"
    if not path.exists():
        raise ValueError(
            f"{folder} holds no report.json. Run python -m diagnostics --model <run> --data <pictures> --output_dir "
            f"{folder}"
        )
    models = from_json(Report, read_json(path), path).models
    if len(models) != 1:
        raise ValueError(f"{path} is about {len(models)} models; the card needs a report about this one only.")
    return models[0]


def find_foreign_figures(facts: Facts) -> Iterator[Finding]:
    """Evaluations and diagnostics that are not of these weights, of an earlier run in the same folder for example."""
    found = [
        (EVALUATION_FILE, f"row {number}, {row.task}, is", row.weights, f"Measure again: {row.command}")
        for number, row in enumerate(facts.evaluations)
    ]
    if (measured := facts.diagnostics) is not None:
        again = "Run python -m diagnostics again."
        found.append(("report.json", f"the diagnostics of {measured.name} are", measured.weights, again))
        if measured.dtype.endswith("quantized"):
            yield Finding(
                "report.json", f"the diagnostics of {measured.name} are of quantized weights",
                "Run python -m diagnostics again, without --load_in_4bit.",
            )  # fmt: skip
    for file, figures, weights, fix in found:
        if weights != facts.weights.fingerprint:
            named = "other weights" if weights else "weights that are not named"
            yield Finding(file, f"{figures} of {named}", fix)
