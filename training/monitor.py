"""What training measures and reports: norms at the modality interface, a file of all that is logged, and a table."""

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
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
    """Measures the step that is about to be logged, through hooks that stay idle on every other step. They sit on the
    model and on its first layer, not inside that layer, which may be compiled.

    `norm/visual` and `norm/text` are mean L2 norms of the tokens that enter the decoder's first layer. Tokens are
    classified as in the diagnostics, but sinks, which appear only at later layers, are not excluded here.

    Args:
        model: The model that is trained, with adapters and without wrappers.
        processor: Its processor, for the special tokens.
    """

    def __init__(self, model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
        self.active = False
        self._ids = token_ids(model, processor)
        self._sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2))  # sum of norms, tokens
        self._tokens: Tokens | None = None
        model.model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
        find_decoder(model).layers[0].register_forward_pre_hook(self._see_entrance, with_kwargs=True)

    @override
    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Become active for a step that will be logged."""
        step = state.global_step + 1
        self.active = step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        if self.active and module.training:
            self._tokens = classify(kwargs, self._ids)

    @torch.no_grad()
    def _see_entrance(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tokens is not None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            norms = token_norms(hidden_states)  # [batch_size, sequence_length]
            for name, mask in (("visual", self._tokens.visual), ("text", self._tokens.text)):
                self._sums[name] += torch.stack([norms[mask].sum(), mask.sum()]).cpu()
            self._tokens = None  # gradient checkpointing runs the layer again

    @torch.no_grad()
    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The measurements since the last call. `reduce` sums a tensor over processes; all must call this."""
        sums = reduce(torch.stack([self._sums["visual"], self._sums["text"]]))  # [modality, (sum of norms, tokens)]
        self._sums.clear()
        if (sums[:, 1] == 0).any():  # a logged step may hold no picture
            return {}
        visual, text = (sums[:, 0] / sums[:, 1]).tolist()
        return {"norm/visual": visual, "norm/text": text, "norm/ratio": visual / text}


class MetricsFile(TrainerCallback):
    """All that is logged, as lines of JSON; names of held-out figures begin with `eval/`, as in trackers. A resumed
    run's file begins with the lines of its checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the lines up to the step that training begins with."""
        if state.is_world_process_zero:
            write_whole(self._path, "".join(map(self._line, state.log_history)))

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write one line."""
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._line(state.log_history[-1]))

    @staticmethod
    def _line(entry: dict[str, float]) -> str:
        return json.dumps({re.sub("^eval_", "eval/", name): value for name, value in entry.items()}) + "\n"


class ConsoleTable(TrainerCallback):
    """Prints a header and a line per log; everything else is in the file."""

    COLUMNS = ("step", "loss", "learning rate", "norm ratio", "tokens/s", "time left")

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the clock, also where a run is resumed, and print the header."""
        self._started = time.monotonic()
        self._steps_before, self._tokens_before = state.global_step, state.num_input_tokens_seen
        self._print(state, "", *self.COLUMNS)

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line."""
        if "eval_loss" in logs:
            blank = f"with blank pictures {logs['eval_loss_blank']:.4f}"
            self._print(state, f"    held out: loss {logs['eval_loss']:.4f}, {blank}")
        if "loss" in logs:
            seconds, steps = time.monotonic() - self._started, state.global_step - self._steps_before
            left = round(seconds / steps * (state.max_steps - state.global_step))
            ratio = f"{logs['norm/ratio']:.3f}" if "norm/ratio" in logs else "no picture"
            speed = f"{(state.num_input_tokens_seen - self._tokens_before) / seconds:,.0f}"
            learned = (f"{state.global_step}/{state.max_steps}", f"{logs['loss']:.4f}", f"{logs['learning_rate']:.3g}")
            self._print(state, "", *learned, ratio, speed, str(timedelta(seconds=left)))

    @staticmethod
    def _print(state: TrainerState, text: str, *cells: str) -> None:
        if state.is_world_process_zero:
            sys.stderr.write(text + "".join(f"{cell:>15}" for cell in cells) + "\n")
