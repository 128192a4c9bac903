"""Measures a model on a fixed set of pictures during training. Needs the extra "diagnostics"."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from diagnostics.dynamics import check_questions, measure_point, read_points, write_points
from diagnostics.loading import Question
from diagnostics.samples import prepare_samples
from training.attention import unpacked
from training.compiling import eagerly


class DynamicsCallback(TrainerCallback):
    """Measures the model in training before the first step, every `steps` steps and after the last one.

    Every process measures, since a sharded model can't run otherwise; only the main process writes.

    Args:
        model: The model that is trained, with adapters and without wrappers.
        processor: Its processor.
        questions: What to measure on.
        steps: Steps between two measurements.
        path: File to write, a line of JSON each.
        leave_out: Takes the seconds of each measurement, which are not training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any,
        questions: Sequence[Question],
        steps: int,
        path: Path,
        leave_out: Callable[[float], None],
    ) -> None:
        self._model, self._samples = model, prepare_samples(model, processor, questions)
        self._questions, self._steps, self._path, self._leave_out = questions, steps, path, leave_out

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the start, unless the run is resumed from a checkpoint.

        Raises:
            ValueError: if the run was measured on other questions before.
        """
        if state.global_step > 0:
            check_questions(read_points(self._path), self._questions, self._path)
        else:
            if state.is_world_process_zero:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.unlink(missing_ok=True)
            self._measure(args, state)

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure every `steps` steps and after the last one."""
        if state.global_step % self._steps == 0 or state.global_step == state.max_steps:
            self._measure(args, state)

    def _measure(self, args: TrainingArguments, state: TrainerState) -> None:
        was_training, started = self._model.training, time.monotonic()
        self._model.eval()
        try:
            autocast = torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=args.bf16)
            with autocast, eagerly(args), unpacked(self._model):
                point = measure_point(self._model, self._samples, state.global_step)
        finally:
            self._model.train(was_training)
        if args.bf16:
            point = replace(point, dtype="bfloat16 autocast")
        if state.is_world_process_zero:
            earlier = [before for before in read_points(self._path) if before.step < state.global_step]
            write_points([*earlier, point], self._path)
        self._leave_out(time.monotonic() - started)
