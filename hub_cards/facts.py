"""What the card says, read from artefacts: weight files, config, the run's files, evaluation, diagnostics.

What an artefact doesn't hold is `None`, which the card shows as "not recorded".
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Arguments of a run that the card lists; paths and names of the machine are not among them.
ARGUMENTS = (
    "global_batch_size", "packed_length", "num_train_epochs", "learning_rate", "vision_learning_rate",
    "norm_learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16",
    "seed",
)  # fmt: skip


@dataclass(frozen=True)
class StageFacts:
    """One stage of training.

    Attributes:
        stage: `align`, `instruct` or `adapt`, if it is recorded.
        steps, tokens, first_loss, last_loss, seconds: From `trainer_state.json` and `metrics.jsonl`.
        arguments: Those of `ARGUMENTS` that are recorded.
        environment: Devices, versions and commit.
    """

    stage: str | None
    steps: int
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    seconds: float | None
    arguments: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """All that the card is rendered from.

    Attributes:
        parameters: Weights by part of the model.
        dtypes: Weights by dtype.
        vision_model, text_model: Hub ids of the parts, `None` where they are not from the Hub.
        image_size, image_tokens: Side of a picture in pixels, and its visual tokens.
        hidden_size, layers: Of the decoder.
        projector_norm, target: Arm of the norm, and T.
        stages: In the order that they were run in.
        evaluations: Rows of `evaluation.json`.
        diagnostics: The model's entry in the diagnostics' `report.json`.
    """

    parameters: dict[str, int]
    dtypes: dict[str, int]
    vision_model: str | None
    text_model: str | None
    image_size: int | None
    image_tokens: int | None
    hidden_size: int
    layers: int
    projector_norm: str
    target: float | None
    stages: list[StageFacts] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: dict[str, Any] | None = None

    @property
    def total_parameters(self) -> int:
        """All weights."""
        return sum(self.parameters.values())

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the parts that are known."""
        return [name for name in (self.text_model, self.vision_model) if name is not None]


def collect_facts(run: Path, diagnostics: Path | None) -> Facts:
    """Read what there is in a run's folder, and in those of the stages before it.

    Args:
        run: Output folder of the last stage.
        diagnostics: Folder that `python -m diagnostics` wrote about this model.

    Raises:
        ValueError: if the folder holds no complete model, or the diagnostics are of several models.
    """
    config_file = run / "config.json"
    if not config_file.exists():
        raise ValueError(f"{run} holds no config.json: give the output folder of a finished training run.")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("model_type") != "normllava":
        raise ValueError(f"{config_file}: model_type is {config.get('model_type')!r}, not 'normllava'.")
    parameters, dtypes = count_weights(run)
    text, vision = config["text_config"], config["vision_config"]
    return Facts(
        parameters=parameters,
        dtypes=dtypes,
        vision_model=hub_id(vision.get("_name_or_path")),
        text_model=hub_id(text.get("_name_or_path")),
        image_size=vision.get("image_size"),
        image_tokens=config.get("image_seq_length"),
        hidden_size=text["hidden_size"],
        layers=text["num_hidden_layers"],
        projector_norm=config["projector_norm"],
        target=config.get("projector_norm_target"),
        stages=collect_stages(run),
        evaluations=read_evaluations(run),
        diagnostics=read_diagnostics(diagnostics),
    )


def hub_id(name: str | None) -> str | None:
    """`name` if it is the id of a Hub repository and not a path."""
    return name if name and HUB_ID.fullmatch(name) and not Path(name).exists() else None


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights are in, by the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return [folder / "model.safetensors"]


def count_weights(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Weights by part of the model and by dtype, from the headers of the weight files.

    Raises:
        ValueError: if a file is missing.
    """
    parameters: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for path in weight_files(folder):
        if not path.exists():
            raise ValueError(f"{path} is missing: the folder holds no complete model.")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_slice(name)
                count = 1
                for size in tensor.get_shape():
                    count *= size
                part = name.removeprefix("model.").split(".")[0]
                part = f"{part}.norm" if ".multi_modal_projector.norm." in f".{name}" else part
                parameters[part] = parameters.get(part, 0) + count
                dtypes[tensor.get_dtype()] = dtypes.get(tensor.get_dtype(), 0) + count
    return dict(sorted(parameters.items())), dict(sorted(dtypes.items()))


def collect_stages(run: Path) -> list[StageFacts]:
    """The stages of training, from this folder back through those that it started from, as far as they are here."""
    stages: list[StageFacts] = []
    folder: Path | None = run
    while folder is not None and (folder / "trainer_state.json").exists():
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        recorded = folder / "run.json"
        arguments = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
        metrics = folder / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
        )
        losses = [line["loss"] for line in lines if "loss" in line]
        tokens = [line["num_tokens"] for line in lines if "num_tokens" in line]
        seconds = [line["train_runtime"] for line in lines if "train_runtime" in line]
        stages.insert(
            0,
            StageFacts(
                stage=arguments.get("stage"),
                steps=state["global_step"],
                tokens=int(tokens[-1]) if tokens else None,
                first_loss=losses[0] if losses else None,
                last_loss=losses[-1] if losses else None,
                seconds=seconds[-1] if seconds else None,
                arguments={name: arguments[name] for name in ARGUMENTS if arguments.get(name) is not None},
                environment=arguments.get("environment", {}),
            ),
        )
        before = arguments.get("model_name_or_path")
        folder = Path(before) if before is not None and Path(before).is_dir() else None
    return stages


EVALUATION_FIELDS = ("task", "dataset", "split", "metric", "value", "n", "standard_error", "command")


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Rows of `evaluation.json`: each has `EVALUATION_FIELDS`, and `baseline` and `baseline_name` where there is one.

    Raises:
        ValueError: if a row lacks a field.
    """
    path = run / "evaluation.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    for number, row in enumerate(rows):
        missing = [name for name in EVALUATION_FIELDS if name not in row]
        if missing:
            raise ValueError(f"{path}, row {number}: no {', '.join(missing)}. A result needs all of its fields.")
    return rows


def read_diagnostics(folder: Path | None) -> dict[str, Any] | None:
    """The entry of the only model in the diagnostics' report.

    Raises:
        ValueError: if there is no report, or one of several models.
    """
    if folder is None:
        return None
    path = folder / "report.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no report.json; python -m diagnostics --model <run> --output_dir {folder}")
    models = json.loads(path.read_text(encoding="utf-8"))["models"]
    if len(models) != 1:
        raise ValueError(f"{path} is about {len(models)} models; the card needs a report about this one alone.")
    return models[0]
