"""Notes what each step of a training is given and when it ends, by hooks and callbacks that make no one wait."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from benchmarks.gpu.definitions import PEAK_FLOPS, Work, model_flops
from benchmarks.gpu.results import Figures
from benchmarks.gpu.stopwatch import Stopwatch
from conversations.tokens import IGNORED
from training.stages import base_model


class TrainingMeasured(Exception):
    """Ends a training when its steps are done: saving the model would take longer than they did."""


@dataclass(frozen=True)
class Pass:
    """What the model is given in a forward pass. Tensors stay on the device until the training is over."""

    step: int
    attention_mask: torch.Tensor | None
    sample_ends: torch.Tensor | None
    """Of a packed row."""
    num_images: int
    supervised: torch.Tensor
    """Which next tokens are, boolean."""

    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        if self.sample_ends is not None:
            return self.sample_ends.diff().tolist()
        assert self.attention_mask is not None
        return self.attention_mask.sum(1).tolist()

    def computed_tokens(self) -> int:
        """Tokens of all samples, padding included."""
        if self.sample_ends is not None:
            return int(self.sample_ends[-1])
        assert self.attention_mask is not None
        return self.attention_mask.numel()


class StepRecorder(TrainerCallback):
    """Measures all steps of a trainer but those of the warm-up.

    Args:
        warmup: Steps that are not measured.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.step = 0
        self.passes: list[Pass] = []
        self.figures: Figures = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to watch the model."""
        self.watch(model, args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the figures, and leave the trainer."""
        loss = state.log_history[-1]["train_loss"]
        self.figures = {"loss": loss, **self.summary()}
        raise TrainingMeasured

    def watch(self, trained: Any, device: torch.device) -> None:
        """Begin to record a model's passes, and the time that they spend in the decoder's layers."""
        self.trained = trained
        self.steps = Stopwatch(device)
        self.layers = Stopwatch(device)
        decoder = base_model(trained).model.language_model
        trained.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        decoder.register_forward_pre_hook(self._enter_layers, with_kwargs=True)
        decoder.norm.register_forward_pre_hook(self._leave_layers)
        self.steps.mark()

    def end_step(self) -> None:
        """Note that a step has ended."""
        self.step += 1
        self.steps.mark()

    def _enter_model(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self.note(inputs)

    def note(self, inputs: dict[str, Any]) -> None:
        """Keep what a pass is given."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs["labels"][:, 1:]
        images = inputs.get("pixel_values")
        self.passes.append(
            Pass(
                step=self.step,
                attention_mask=inputs.get("attention_mask"),
                sample_ends=inputs.get("cu_seq_lens_q"),
                num_images=0 if images is None else len(images),
                supervised=labels != IGNORED,
            )
        )

    # Four marks a pass: the decoder's entrance and its last norm, then the gradients that come back there.
    def _enter_layers(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self.layers.mark()
        inputs["inputs_embeds"].register_hook(self._mark_gradient)

    def _leave_layers(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        self.layers.mark()
        args[0].register_hook(self._mark_gradient)

    def _mark_gradient(self, gradient: torch.Tensor) -> None:
        self.layers.mark()

    def summary(self) -> Figures:
        """All that is known of the measured steps, by the definitions of definitions.py."""
        step_seconds = self.steps.seconds()[self.warmup :]
        seconds = sum(step_seconds)
        measured = [forward for forward in self.passes if forward.step >= self.warmup]
        lengths: list[int] = []
        for forward in measured:
            lengths += forward.lengths()
        work = Work(
            lengths=lengths,
            num_images=sum(forward.num_images for forward in measured),
            num_supervised=sum(int(forward.supervised.sum()) for forward in measured),
        )
        computed = sum(forward.computed_tokens() for forward in measured)
        flops = model_flops(self.trained, work)
        layers_seconds = self._layers_seconds()

        return {
            "tokens_per_second": work.num_tokens / seconds,
            "seconds_per_step": seconds / len(step_seconds),
            "steps": step_seconds,
            "layers_seconds_per_step": layers_seconds / len(step_seconds),
            "model_flops_per_second": flops.whole / seconds,
            "layers_flops_per_second": flops.layers / layers_seconds,
            "share_of_peak": flops.whole / seconds / PEAK_FLOPS,
            "layers_share_of_peak": flops.layers / layers_seconds / PEAK_FLOPS,
            "tokens_per_step": work.num_tokens / len(step_seconds),
            "passes_per_step": len(measured) / len(step_seconds),
            "padding_share": 1 - work.num_tokens / computed,
            "peak_memory_gib": peak_memory_gib(),
        }

    def _layers_seconds(self) -> float:
        """The time in the decoder's layers, of the measured passes."""
        intervals = self.layers.seconds()
        total = 0.0
        for number, forward in enumerate(self.passes):
            if forward.step >= self.warmup:
                total += intervals[4 * number] + intervals[4 * number + 2]
        return total


def peak_memory_gib() -> float:
    """The most memory that tensors took on the device; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30
