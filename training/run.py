"""The record of a run, `run.json`, written with every checkpoint and every finished model."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conversations.files import write_whole
from diagnostics.results import from_json
from training.environment import Environment


if TYPE_CHECKING:  # reading a record doesn't need TRL, which takes seconds to import
    from training.arguments import RunArguments, TrainingConfig

RUN_FILE = "run.json"
# Fields that the weights don't depend on. The data is compared by its content, not its path.
IMMATERIAL = (
    "output_dir", "dataset_name", "datasets", "image_folder", "bad_rows", "open_pictures", "dataset_num_proc",
    "dataset_config",
    "probe_steps", "probe_samples", "resume_changed", "resume_from_checkpoint", "logging_strategy",
    "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_level", "log_level_replica",
    "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen", "skip_memory_metrics",
    "debug", "save_strategy", "save_steps", "save_total_limit", "enable_jit_checkpoint", "hub_token",
    "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "torch_empty_cache_steps", "local_rank", "ddp_timeout",
    "per_device_eval_batch_size", "eval_dataset_name", "eval_image_folder", "dataset_test_split", "eval_on_start",
    "prediction_loss_only", "do_train", "do_eval",
    "do_predict", "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "activation_checkpointing_kwargs", "batch_eval_metrics", "greater_is_better", "include_for_metrics",
    "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "label_names",
    "restore_callback_states_from_checkpoint",
)  # fmt: skip
# Fields that matter only where the best checkpoint is chosen.
CHOOSING = (
    "load_best_model_at_end", "metric_for_best_model", "eval_samples", "eval_strategy", "eval_steps", "eval_delay",
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is, beyond what transformers records."""

    num_tokens: int
    """Tokens trained on, without padding."""
    loss_sum: float
    """Sum of the losses of all steps."""


@dataclass(frozen=True)
class Source:
    """What a run takes from a source.

    Attributes:
        path, name, split, weight: As given.
        is_local: Whether `path` is a local file or folder, not a dataset on the Hub.
        rows: Number of rows.
        good_rows: Rows that can be trained on.
        drawn: Rows of an epoch that come from this source.
        fingerprint: Fingerprint of the good rows' content.
    """

    path: str
    name: str | None
    split: str
    is_local: bool
    rows: int
    good_rows: int
    weight: float
    drawn: int
    fingerprint: str


@dataclass(frozen=True)
class Run:
    """A run's data, arguments, environment and progress.

    Attributes:
        data: Fingerprint of the data.
        num_processes: How many processes share the work.
        arguments: All arguments except `IMMATERIAL`; a resumed run must have the same.
        recipe: The YAML file that the run was started with, if there was one.
        environment: Devices, versions and commit.
        progress: Of a checkpoint; `None` in the folder of a finished run.
        sources: What was taken from each source of rows; empty for a stream.
    """

    data: str
    num_processes: int
    arguments: dict[str, Any]
    recipe: str | None
    environment: Environment
    progress: Progress | None = None
    sources: tuple[Source, ...] = ()

    @property
    def weights(self) -> list[float]:
        """How often an epoch sees the rows of each source; empty for a single source of weight 1."""
        weights = [source.weight for source in self.sources]
        return [] if weights == [1] else weights

    def write(self, folder: Path, progress: Progress | None = None) -> None:
        """Write `run.json` into a folder."""
        record = asdict(replace(self, progress=progress))
        write_whole(folder / RUN_FILE, json.dumps(record, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `run.json` from a folder.

        Raises:
            ValueError: if it can't be read or lacks a field, as records of older versions do.
        """
        path = folder / RUN_FILE
        try:
            return from_json(cls, json.loads(path.read_text(encoding="utf-8")), path)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} can't be read ({error}).") from error


def describe_run(
    run_args: "RunArguments",
    args: "TrainingConfig",
    data: str,
    environment: Environment,
    held_out: str | None = None,
    sources: Sequence[Source] = (),
) -> Run:
    """The record of a run that is about to start; `held_out` is the fingerprint of its held-out rows."""
    values = {**vars(run_args), **args.to_dict(), "model_name_or_path": local_path(str(run_args.model_name_or_path))}
    # The workers of a stream take turns, so their number affects the order of its rows.
    immaterial = {*IMMATERIAL, "recipe"} | (set() if run_args.dataset_streaming else {"dataloader_num_workers"})
    if args.metric_for_best_model is None:
        immaterial |= {*CHOOSING}
    else:
        values["held_out"] = held_out
    arguments = {name: value for name, value in sorted(values.items()) if name not in immaterial}
    return Run(
        data=data,
        num_processes=args.world_size,
        arguments=json.loads(json.dumps(arguments, default=str)),  # as it will be read back
        recipe=None if run_args.recipe is None else str(Path(run_args.recipe).resolve()),
        environment=environment,
        sources=tuple(sources),
    )


def local_path(name: str) -> str:
    """A folder's normalized path; a Hub repository's id unchanged."""
    return os.path.normpath(name) if os.path.exists(name) else name


def check_same_run(checkpoint: Path, run: Run) -> None:
    """Compare a run with the record in a checkpoint.

    Raises:
        ValueError: if they differ; the message lists the differences.
    """
    before, now = (
        {"data": made.data, "num_processes": made.num_processes, "weights": made.weights, **made.arguments}
        for made in (Run.read(checkpoint), run)
    )
    differences = [
        f"  {name}: {before.get(name)!r} before, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} belongs to a different run:\n" + "\n".join(differences) + "\nRestore these, or resume "
            "anyway with --resume_changed true."
        )
