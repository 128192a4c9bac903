"""What training reports: norms at the decoder's input, a file of all that is logged, and a table on the console."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlavaProcessor, TrainerCallback, TrainerState
from typing_extensions import override

from common.files import write_whole
from diagnostics.norms import token_norms
from diagnostics.parts import find_decoder
from diagnostics.tokens import Inputs, Tokens, classify, token_ids
from modeling_normllava import NormLlavaForConditionalGeneration


class InterfaceMonitor(TrainerCallback):
    """Measures norms in each step that will be logged. In all other steps its hooks do nothing.

    `norm/visual` and `norm/text` are mean L2 norms of the image tokens and of the text tokens that enter the decoder's
    first layer. Tokens are classified as in the diagnostics, except that attention sinks aren't left out: they appear
    only at later layers.

    The hooks are on the model and on the decoder's first layer, not inside the layer, which may be compiled.

    Args:
        model: The model that is trained, with adapters and without wrappers.
        processor: The model's processor, which tells the special tokens.
    """

    def __init__(self, model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
        self.active = False  # whether the current step will be logged
        self._token_ids = token_ids(model, processor)
        # The types of the tokens of the current forward pass; `None` if no norms are to be added.
        self._tokens: Tokens | None = None
        # Rows: image tokens, text tokens. Columns: sum of norms, number of tokens.
        self._sums = torch.zeros(2, 2)
        model.model.register_forward_pre_hook(self._classify_tokens, with_kwargs=True)
        find_decoder(model).layers[0].register_forward_pre_hook(self._add_norms, with_kwargs=True)

    @override
    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Become active for a step that will be logged."""
        step = state.global_step + 1
        is_logged_as_first = step == 1 and args.logging_first_step
        self.active = is_logged_as_first or step % state.logging_steps == 0

    def _classify_tokens(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        if self.active and module.training:
            self._tokens = classify(kwargs, self._token_ids)

    @torch.no_grad()
    def _add_norms(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tokens is None:
            return

        hidden_states = args[0] if args else kwargs["hidden_states"]  # decoders pass them by position or by name
        norms = token_norms(hidden_states)  # [batch_size, sequence_length]
        visual_norms = norms[self._tokens.visual]  # [num_image_tokens]
        text_norms = norms[self._tokens.text]  # [num_text_tokens]
        self._sums[:, 0] += torch.stack([visual_norms.sum(), text_norms.sum()]).cpu()
        self._sums[:, 1] += torch.tensor([len(visual_norms), len(text_norms)])
        # Gradient checkpointing runs the layer again, which must not add the norms again.
        self._tokens = None

    @torch.no_grad()
    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The mean norms since the last call; empty if there was no image token or no text token since then.

        Every process must call this.

        Args:
            reduce: Sums a tensor over all processes.
        """
        sums = reduce(self._sums.clone())
        self._sums.zero_()

        norm_sums, num_tokens = sums.unbind(dim=1)
        has_both_kinds = (num_tokens > 0).all()
        if not has_both_kinds:
            return {}
        visual_norm, text_norm = (norm_sums / num_tokens).tolist()
        return {"norm/visual": visual_norm, "norm/text": text_norm, "norm/ratio": visual_norm / text_norm}


class MetricsFile(TrainerCallback):
    """Writes each log as a line of JSON. Names of held-out figures begin with `eval/`, as they do in trackers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin the file with all logs so far: none, unless the run is resumed."""
        if state.is_world_process_zero:
            lines = [self._line(log) for log in state.log_history]
            write_whole(self._path, "".join(lines))

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the line of the newest log."""
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._line(state.log_history[-1]))

    @staticmethod
    def _line(log: dict[str, float]) -> str:
        """A log as a line of JSON."""
        renamed_log = {}
        for name, value in log.items():
            if name.startswith("eval_"):  # Trainer's prefix
                name = "eval/" + name.removeprefix("eval_")
            renamed_log[name] = value
        return json.dumps(renamed_log) + "\n"


class ConsoleTable(TrainerCallback):
    """Prints a table. Each log is a line, which shows only the figures that a person watches."""

    COLUMNS = ("step", "loss", "learning rate", "norm ratio", "tokens/s", "time left")

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the header. Note the time, and the steps and tokens so far, which aren't 0 if a run is resumed."""
        self._start_time = time.monotonic()
        self._start_step = state.global_step
        self._start_tokens = state.num_input_tokens_seen
        self._print(state, format_row(self.COLUMNS))

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line for a training step's log, or for an evaluation's."""
        if "eval_loss" in logs:
            loss = logs["eval_loss"]
            loss_blank = logs["eval_loss_blank"]
            self._print(state, f"    held out: loss {loss:.4f}, with blank pictures {loss_blank:.4f}")
        if "loss" in logs:
            self._print(state, format_row(self._cells(state, logs)))

    def _cells(self, state: TrainerState, logs: dict[str, float]) -> list[str]:
        """The cells of a step's line. Speed and time left are computed from the mean since `on_train_begin`."""
        seconds = time.monotonic() - self._start_time
        num_tokens = state.num_input_tokens_seen - self._start_tokens
        num_steps = state.global_step - self._start_step
        num_steps_left = state.max_steps - state.global_step
        seconds_left = round(seconds / num_steps * num_steps_left)
        ratio = "no picture"
        if "norm/ratio" in logs:
            ratio = f"{logs['norm/ratio']:.3f}"
        return [
            f"{state.global_step}/{state.max_steps}",
            f"{logs['loss']:.4f}",
            f"{logs['learning_rate']:.3g}",
            ratio,
            f"{num_tokens / seconds:,.0f}",
            str(timedelta(seconds=seconds_left)),
        ]

    @staticmethod
    def _print(state: TrainerState, line: str) -> None:
        if state.is_world_process_zero:
            sys.stderr.write(line + "\n")


def format_row(cells: Sequence[str]) -> str:
    """A line of the table, each cell right-aligned in 15 characters."""
    return "".join(f"{cell:>15}" for cell in cells)
