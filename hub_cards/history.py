"""Read how a model was trained: its stages of training, from the records in the stages' folders.

A fact that no file holds is `None`, and the card shows it as "not recorded". `run.json` is read without a schema,
because the card can do without any of its fields.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_cards.contents import read_json
from normllava.files import weights_fingerprint


# The arguments of a run that the card lists, if they are set. `run.json` has more arguments.
LISTED_ARGUMENTS = (
    "num_train_epochs",
    "global_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
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
        sources: The data that the stage was trained on: for each source, the fields of
            [`~training.folders.run.SourceRecord`].
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
        folder: The folder, with `trainer_state.json`.
        run_record: The content of the folder's `run.json`; empty if there is no such file.
    """
    trainer_state = read_json(folder / "trainer_state.json")
    logs = trainer_state["log_history"]
    arguments = run_record.get("arguments", {})
    environment = run_record.get("environment", {})

    first_loss = None
    last_loss = None
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    if losses:
        first_loss = losses[0]
        last_loss = losses[-1]

    # Each count is of all tokens so far, so the last count is the stage's.
    tokens = None
    token_counts = [entry["num_tokens"] for entry in logs if "num_tokens" in entry]
    if token_counts:
        tokens = int(token_counts[-1])

    # A resumed run logs only the time since it was resumed, which is not the time of the stage.
    seconds = None
    logged_seconds = [entry["train_runtime"] for entry in logs if "train_runtime" in entry]
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
        arguments=select_arguments(arguments, logs),
        hardware=hardware,
        commit=environment.get("commit"),
        sources=run_record.get("sources", []),
        start_model=arguments.get("model_name_or_path"),
    )


def select_arguments(arguments: dict[str, Any], logs: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments that the card lists for a run, by their names: the arguments that were set and had an effect."""
    names = list(LISTED_ARGUMENTS)
    if arguments.get("max_steps", -1) > 0:  # the number of epochs has then no effect
        names.remove("num_train_epochs")
    if arguments.get("stage") == "adapt":
        names += LORA_ARGUMENTS
    if any(arguments.get(name) for name in KEY_LOSS_ARGUMENTS):
        names += KEY_LOSS_ARGUMENTS
    # A run logs a learning rate for the norm only if the model has a norm and the run trains it.
    if any("learning_rate/multi_modal_projector.norm" in entry for entry in logs):
        names += NORM_ARGUMENTS

    listed_arguments = {}
    for name in names:
        value = arguments.get(name)
        if value is not None and value is not False:  # 0 is listed
            listed_arguments[name] = value
    return listed_arguments
