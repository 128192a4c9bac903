"""Watches the norms of image and text embeddings while a model trains, in any trainer or loop."""

import sys
from typing import Any

import torch
import torch.distributed
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from typing_extensions import override

from normllava.errors import UserError
from normllava.norms import token_norms
from normllava.parts import find_decoder, layer_input
from normllava.tokens import Inputs, Tokens, classify, token_ids


# Ratios between these need no advice. Those of a scaled projector differ with the words of a batch.
NEAR_ONE = (0.7, 1.4)


class NormMonitor:
    """Measures what enters the decoder's first layer and how far this layer turns it, in the steps that are asked for.

    The figures are means over the tokens of all passes with gradients, since the monitor began to watch:

    - `norm/image`, `norm/text`: L2 norms of image and of text embeddings; `norm/ratio`: the first over the second.
    - `turning/image`, `turning/text`: 1 − cosine of a token before and after the first layer, which says how far the
      layer turns it.

    Special tokens and padding are left out; newline features, as LLaVA-NeXT has them, count as image embeddings. In
    other steps the hooks touch no tensor.

    With a trainer: `NormMonitor(model, processor).attach(trainer)`. In a loop of one's own: `monitor.watch()` before a
    step's forward passes, and `monitor.collect()` after them.

    Args:
        model: A vision-language model, or the `PeftModel` around it.
        processor: The model's processor, which tells the special tokens; without it the model's config does.
    """

    def __init__(self, model: PreTrainedModel, processor: Any = None) -> None:
        if hasattr(model, "get_base_model"):  # PEFT's
            model = model.get_base_model()
        self.is_watching = False
        self._token_ids = token_ids(model, processor)
        # The types of the tokens of the current forward pass; `None` if the pass isn't measured.
        self._tokens: Tokens | None = None
        self._layer_input: torch.Tensor | None = None
        # Rows: image tokens, text tokens. Columns: sum of norms, sum of turnings, number of tokens.
        self._sums: torch.Tensor | None = None

        # Trainers call the model with or without its head, and `base_model` gets the inputs in both cases. The other
        # hooks are on the first layer, not inside of it, where it may be compiled.
        first_layer = find_decoder(model).layers[0]
        self._hooks = [
            model.base_model.register_forward_pre_hook(self._classify_tokens, with_kwargs=True),
            first_layer.register_forward_pre_hook(self._keep_input, with_kwargs=True),
            first_layer.register_forward_hook(self._add),
        ]

    def watch(self) -> None:
        """Measure the forward passes from here on, until `collect`."""
        self.is_watching = True
        # What a pass left that ended by an error is dropped.
        self._tokens = None
        self._layer_input = None
        self._sums = None

    def collect(self) -> dict[str, float]:
        """The figures since `watch`; empty if there was no image token or no text token. Every process must call this.

        Where several processes train, the figures are of all of them.
        """
        self.is_watching = False
        sums = torch.zeros(2, 3) if self._sums is None else self._sums.cpu()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # As objects, since a process without an image token has no tensor on the device that they are reduced on.
            sums_of_processes: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(sums_of_processes, sums)
            sums = torch.stack(sums_of_processes).sum(0)

        norm_sums, turning_sums, num_tokens = sums.unbind(dim=1)
        if not (num_tokens > 0).all():
            return {}
        image_norm, text_norm = (norm_sums / num_tokens).tolist()
        image_turning, text_turning = (turning_sums / num_tokens).tolist()
        return {
            "norm/image": image_norm,
            "norm/text": text_norm,
            "norm/ratio": image_norm / text_norm,
            "turning/image": image_turning,
            "turning/text": text_turning,
        }

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def attach(self, trainer: Any) -> None:
        """Add the figures to what a trainer logs: to its history, its trackers and its console.

        Args:
            trainer: transformers' `Trainer`, or one of TRL's. What it logs must be logged by steps.

        Raises:
            UserError: if the trainer logs by epochs, or nothing, or if it splits batches over GPUs by DataParallel.
        """
        strategy = trainer.args.logging_strategy.value
        if strategy != "steps":
            raise UserError(f"NormMonitor needs logging_strategy 'steps', got {strategy!r}.")
        if trainer.args.n_gpu > 1:
            raise UserError("NormMonitor needs a process for each GPU: start the script by accelerate launch.")
        # Trackers are callbacks too, and log what the callbacks before them have left. So this one comes first.
        trainer.callback_handler.callbacks.insert(0, _LogNorms(self))

    def _classify_tokens(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        self._tokens = None
        # Passes without gradients generate, evaluate or ask a reference model.
        if not self.is_watching or not torch.is_grad_enabled():
            return
        inputs = kwargs
        if args:
            inputs = {"input_ids": args[0], **kwargs}
        if inputs.get("input_ids") is not None:  # without ids, image tokens can't be told from text
            self._tokens = classify(inputs, self._token_ids)

    def _keep_input(self, layer: nn.Module, args: Any, kwargs: Inputs) -> None:
        if self._tokens is not None:
            self._layer_input = layer_input(args, kwargs)

    @torch.no_grad()
    def _add(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._tokens is None or self._layer_input is None:
            return

        after = output if isinstance(output, torch.Tensor) else output[0]  # [batch_size, sequence_length, hidden_size]
        before = self._layer_input.to(after.device)  # with a `device_map`, layers move their inputs themselves
        norms = token_norms(before)  # [batch_size, sequence_length]
        turnings = 1 - nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)

        rows = []
        for mask in (self._tokens.image.to(after.device), self._tokens.text.to(after.device)):
            norm_sum = torch.where(mask, norms, 0).sum()
            turning_sum = torch.where(mask, turnings, 0).sum()  # padding, which may be NaN, is left out
            rows.append(torch.stack([norm_sum, turning_sum, mask.sum()]))
        sums = torch.stack(rows)
        self._sums = sums if self._sums is None else self._sums + sums
        # Gradient checkpointing runs the layer again, which must not be added again.
        self._tokens = None
        self._layer_input = None


class _LogNorms(TrainerCallback):
    """Lets a monitor watch the steps that a trainer logs, and adds its figures to the log."""

    def __init__(self, monitor: NormMonitor) -> None:
        self._monitor = monitor
        # The figures of a step that will be logged, from its end to its log.
        self._figures: dict[str, float] = {}

    @override
    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Watch a step that will be logged."""
        step = state.global_step + 1
        is_logged_as_first = step == 1 and args.logging_first_step
        if is_logged_as_first or step % state.logging_steps == 0:
            self._monitor.watch()

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Collect the figures. All processes come here, whereas a log may be one process's own."""
        if self._monitor.is_watching:
            self._figures = self._monitor.collect()

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of a step to its log. Evaluations, and what a user logs, stay without."""
        if not self._figures or "loss" not in logs:
            return
        logs.update(self._figures)
        state.log_history[-1].update(self._figures)  # a copy of the log, which the trainer made before

        is_first_log = len(state.log_history) == 1
        if is_first_log and state.is_world_process_zero:
            # On a line of its own, above a progress bar.
            tqdm.write(describe_ratio(self._figures["norm/ratio"]), file=sys.stderr)
        self._figures = {}


def describe_ratio(ratio: float) -> str:
    """What the first logged ratio says, in words."""
    text = f"In this step image embeddings enter the decoder with {ratio:.3g} times the norm of text embeddings."
    lowest, highest = NEAR_ONE
    if lowest <= ratio <= highest:
        return text
    return (
        f"{text} normllava.scale_projector starts a new projector at 1, and a lower learning rate keeps it nearer; "
        "what that was worth is in docs/findings.md of NormLlava."
    )
