"""What training measures and reports: norms at the modality interface, gradients by module, turning by layer, files,
and a table."""

import json
import re
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import LlavaProcessor, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import BatchRebalanceSampler
from typing_extensions import override

from conversations.files import write_whole
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import token_norms
from diagnostics.tokens import Inputs, Tokens, classify, token_ids
from modeling_normllava import NormLlavaForConditionalGeneration
from training.held_out import Answer
from training.stages import trained_projector


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradient of all `parameters` together, a scalar; over all shards if they are sharded."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return _whole(norm)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class InterfaceMonitor(TrainerCallback):
    """Measures the step that is about to be logged, through hooks that stay idle on every other step.

    - `norm/visual`, `norm/text`: mean L2 norm of the tokens that enter the decoder's first layer; `norm/ratio`. Tokens
      are classified as in the diagnostics, but sinks, which appear only at later layers, are not excluded here.
    - `projector_norm/gain_mean_abs`, `gain_l2`, `bias_mean_abs`, `bias_l2` (Table 5 of arXiv 2512.08374).
    - `grad_norm/<module>`: L2 norm of the gradient of a trained module's parameters, before clipping.

    Args:
        model: The model that is trained, with adapters and without wrappers.
        processor: Its processor, for the special tokens.
    """

    def __init__(self, model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
        self.active = False
        self.gradients: dict[str, torch.Tensor] = {}
        """Gradient norms by module, set by the trainer before it clips."""
        self._model = model
        self._ids = token_ids(model, processor)
        self._sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2))  # sum of norms, tokens
        self._tokens: Tokens | None = None
        model.model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
        InterfaceHooks(model, self._see_features)

    @override
    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Become active for a step that will be logged."""
        step = state.global_step + 1
        self.active = step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        if self.active and module.training:
            self._tokens = classify(kwargs, self._ids)

    @torch.no_grad()
    def _see_features(self, place: str, features: torch.Tensor) -> None:
        if place == "decoder" and self._tokens is not None:
            norms = token_norms(features)  # [batch_size, sequence_length]
            for name, mask in (("visual", self._tokens.visual), ("text", self._tokens.text)):
                self._sums[name] += torch.stack([norms[mask].sum(), mask.sum()]).cpu()
            self._tokens = None  # gradient checkpointing runs the layer again

    @torch.no_grad()
    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The measurements since the last call. `reduce` sums a tensor over processes; all must call this."""
        sums = reduce(torch.stack([self._sums["visual"], self._sums["text"]]))  # [modality, (sum of norms, tokens)]
        self._sums.clear()
        metrics: dict[str, float] = {}
        if (sums[:, 1] > 0).all():  # a logged step may hold no picture
            visual, text = (sums[:, 0] / sums[:, 1]).tolist()
            metrics |= {"norm/visual": visual, "norm/text": text, "norm/ratio": visual / text}
        for name, parameter in trained_projector(self._model).norm.named_parameters():
            if parameter.numel():  # empty between passes under ZeRO-3
                name = {"weight": "gain"}.get(name, name)
                metrics[f"projector_norm/{name}_mean_abs"] = _whole(parameter.abs().mean()).item()
                metrics[f"projector_norm/{name}_l2"] = _whole(parameter.norm()).item()
        metrics |= {f"grad_norm/{name}": value.item() for name, value in self.gradients.items()}
        self.gradients = {}
        return metrics


class StepsFile(TrainerCallback):
    """A file with lines of JSON, each with its `step`, which a resumed run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the whole lines up to the step that training resumes from: later ones will be written again."""
        if state.is_world_process_zero:
            resumes = state.global_step > 0 and self._path.exists()
            lines = self._path.read_text(encoding="utf-8").splitlines(True) if resumes else []
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["step"] <= state.global_step]
            write_whole(self._path, "".join(kept))

    def append(self, state: TrainerState, entries: Iterable[dict[str, Any]]) -> None:
        """Write a line for each entry."""
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": state.global_step, **entry}) + "\n" for entry in entries)


class MetricsFile(StepsFile):
    """Everything that is logged; names of held-out figures begin with `eval/`, as in trackers."""

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write one line."""
        self.append(state, [{re.sub("^eval_", "eval/", name): value for name, value in logs.items()}])


class ConsoleTable(TrainerCallback):
    """Prints a header, a line per log, and a progress bar; everything else is in the files."""

    COLUMNS = ("step", "loss", "learning rate", "norm ratio", "tokens/s", "time left")
    NUM_ANSWERS = 4

    def __init__(self, shows_mfu: bool) -> None:
        self.shows_mfu = shows_mfu
        self.answers: list[Answer] = []
        """Answers to the held-out questions, set by the trainer before it logs an evaluation."""
        self.tokens_before = 0
        """Tokens of the run before this start, set by the trainer."""
        self.seconds_left_out = 0.0
        """Seconds since this start that were not spent on training, set by the trainer."""
        self._bar: Any = None
        self._started = self._steps_before = 0.0

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the header."""
        self._started, self._steps_before = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, leave=False, unit="step",
                disable=args.disable_tqdm or None,  # also off without a terminal
            )  # fmt: skip
            self._write((*self.COLUMNS, "MFU") if self.shows_mfu else self.COLUMNS)

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Update the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line."""
        if self._bar is not None and "eval_loss" in logs:
            self._write_held_out(logs)
        if self._bar is None or "loss" not in logs:
            return
        seconds = time.monotonic() - self._started - self.seconds_left_out
        left = round(seconds / (state.global_step - self._steps_before) * (state.max_steps - state.global_step))
        ratio = logs.get("norm/ratio")
        cells = [
            f"{state.global_step}/{state.max_steps}",
            f"{logs['loss']:.4f}",
            f"{logs['learning_rate']:.3g}",
            "no picture" if ratio is None else f"{ratio:.3f}",
            f"{(logs['num_tokens'] - self.tokens_before) / seconds:,.0f}",
            f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}",
        ]
        self._write([*cells, f"{logs['mfu']:.1%}"] if self.shows_mfu else cells)

    def _write_held_out(self, logs: dict[str, float]) -> None:
        figures = [f"held out: loss {logs['eval_loss']:.4f}"]
        if "eval_loss_blank" in logs:
            figures.append(f"with blank pictures {logs['eval_loss_blank']:.4f}")
        if self.answers:
            figures.append(f"{sum(answer.right for answer in self.answers)} of {len(self.answers)} answers right")
        tqdm.write("    " + ", ".join(figures), file=sys.stderr)
        for answer in self.answers[: self.NUM_ANSWERS]:
            cells = (answer.question, f"said: {answer.answer}", f"truth: {answer.truth}")
            line = " | ".join(textwrap.shorten(cell, 60, placeholder=" ...") for cell in cells)
            line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
            tqdm.write(f"        {line}", file=sys.stderr)

    @override
    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    @staticmethod
    def _write(cells: Sequence[str]) -> None:
        tqdm.write("".join(f"{cell:>15}" for cell in cells), file=sys.stderr)


class Epochs(TrainerCallback):
    """Counts epochs where Trainer does not: for the sampler when several processes resume in the middle of one, and
    for a stream (where the sampler is `None`), as its share of all steps."""

    def __init__(self, sampler: BatchRebalanceSampler | None) -> None:
        self._sampler = sampler

    @override
    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the sampler, whose epochs are integers."""
        if self._sampler is not None:
            self._sampler.set_epoch(int(state.epoch or 0))

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the part of the stream's steps that is done, as Trainer computes it in an uninterrupted run."""
        if self._sampler is None:
            state.epoch = state.global_step / state.max_steps
