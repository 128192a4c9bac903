"""Records the inputs and the time of each training step, by hooks and callbacks that don't wait for the GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import calculate_time_spent, counters, cumulative_time_spent_ns
from transformers import TrainerCallback

from benchmarks.gpu.definitions import PEAK_FLOPS, Work, model_flops
from benchmarks.gpu.profile import StepProfile
from benchmarks.gpu.results import Figures
from benchmarks.gpu.stopwatch import Stopwatch
from benchmarks.gpu.synchronisations import SynchronisationCounter
from normllava.tokens import IGNORED
from training.modules.stages import base_model


class TrainingMeasured(Exception):
    """Raised to end a training after its last step, because saving the model would take long."""


@dataclass(frozen=True)
class Pass:
    """The inputs of one forward pass. Tensors stay on the device until the training is over."""

    step: int
    """Number of the training step, from 0."""
    attention_mask: torch.Tensor | None
    """The mask of padded rows. For a packed row, `sample_bounds` is read instead."""
    sample_bounds: torch.Tensor | None
    """For a packed row, 0 and then the position at which each sample ends. `None` for padded rows."""
    num_images: int
    is_supervised: torch.Tensor
    """Whether the loss counts the next token, for each position."""

    def lengths(self) -> list[int]:
        """The number of tokens of each sample, without padding."""
        if self.sample_bounds is not None:
            return self.sample_bounds.diff().tolist()
        assert self.attention_mask is not None
        return self.attention_mask.sum(1).tolist()

    def num_computed_tokens(self) -> int:
        """The number of tokens of all samples, padding included."""
        if self.sample_bounds is not None:
            return int(self.sample_bounds[-1])
        assert self.attention_mask is not None
        return self.attention_mask.numel()


class StepRecorder(TrainerCallback):
    """Measures the steps of a trainer after its warm-up, and profiles one step more.

    Args:
        warmup: Number of steps of the warm-up.
        steps: Number of steps up to the last that is measured. The trainer must take one more.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = warmup
        self.steps = steps
        self.step = 0
        # The number of graphs that torch had compiled by the end of each step.
        self.num_graphs: list[int] = []
        counters.clear()
        cumulative_time_spent_ns.clear()
        self.passes: list[Pass] = []
        self.figures: Figures = {}
        self.synchronisation_counter = SynchronisationCounter()
        # How often each line of code waited for the GPU in one step.
        self.synchronisations: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to record steps and passes."""
        self.watch(model, args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what waits for the GPU, in the last step of the warm-up: counting would slow a measured step."""
        if self.step == self.warmup - 1:
            self.synchronisation_counter.start()
        self.begin_profile()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the count of what waits for the GPU, and record that the step has ended."""
        if self.step == self.warmup - 1:
            self.synchronisations = self.synchronisation_counter.stop()
        self.end_step()

    def begin_profile(self) -> None:
        """Begin to profile, if this is the step after the measured ones. bare_loop.py calls this itself."""
        if self.step == self.steps:
            self.step_profile.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the figures, and end the training."""
        loss = state.log_history[-1]["train_loss"]
        self.figures |= {"loss": loss, **self.summary(), "synchronisations": self.synchronisations}
        raise TrainingMeasured

    def watch(self, model: Any, device: torch.device) -> None:
        """Begin to record the time of each step, and each pass of the model with its time in the decoder's layers."""
        self.model = model
        self.step_stopwatch = Stopwatch(device)
        self.layers_stopwatch = Stopwatch(device)
        self.step_profile = StepProfile(device)
        decoder = base_model(model).model.language_model
        model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        decoder.register_forward_pre_hook(self._enter_layers, with_kwargs=True)
        decoder.register_forward_hook(self._leave_layers)
        self.step_stopwatch.mark()

    def end_step(self) -> None:
        """Record that a step has ended. bare_loop.py, a loop without a trainer, calls this itself."""
        if self.step == self.steps:
            self.figures |= self.step_profile.stop()
        self.step += 1
        self.num_graphs.append(counters["stats"]["unique_graphs"])
        self.step_stopwatch.mark()

    def _enter_model(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self.record_pass(inputs)

    def record_pass(self, inputs: dict[str, Any]) -> None:
        """Record the inputs of a forward pass."""
        # Our trainer passes the next token of each position as `shift_labels`. Other trainers pass `labels`, in which
        # the next token stands one position later.
        next_tokens = inputs.get("shift_labels")
        if next_tokens is None:
            next_tokens = inputs["labels"][:, 1:]

        images = inputs.get("pixel_values")
        self.passes.append(
            Pass(
                step=self.step,
                attention_mask=inputs.get("attention_mask"),
                sample_bounds=inputs.get("cu_seq_lens_q"),
                num_images=0 if images is None else len(images),
                is_supervised=next_tokens != IGNORED,
            )
        )

    # In each pass these hooks mark four times: when the forward pass enters the first layer and leaves the last layer,
    # and when the backward pass enters the last layer and leaves the first layer.
    def _enter_layers(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self.layers_stopwatch.mark()
        inputs["inputs_embeds"].register_hook(self._mark_gradient)  # called when the gradient leaves the first layer

    def _leave_layers(self, module: nn.Module, args: Any, output: Any) -> None:
        self.layers_stopwatch.mark()
        output.last_hidden_state.register_hook(self._mark_gradient)  # called when the gradient enters the decoder

    def _mark_gradient(self, gradient: torch.Tensor) -> None:
        self.layers_stopwatch.mark()

    def summary(self) -> Figures:
        """The figures of the measured steps, as definitions.py defines them. The peak of memory covers all steps."""
        step_seconds = self.step_stopwatch.seconds()[self.warmup : self.steps]
        seconds = sum(step_seconds)
        layers_seconds = self._layers_seconds()

        passes = [forward_pass for forward_pass in self.passes if self._is_measured(forward_pass)]
        lengths: list[int] = []
        num_images = 0
        num_supervised = 0
        num_computed_tokens = 0
        for forward_pass in passes:
            lengths += forward_pass.lengths()
            num_images += forward_pass.num_images
            num_supervised += int(forward_pass.is_supervised.sum())
            num_computed_tokens += forward_pass.num_computed_tokens()
        work = Work(lengths=lengths, num_images=num_images, num_supervised=num_supervised)
        flops = model_flops(self.model, work)

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
            "passes_per_step": len(passes) / len(step_seconds),
            "padding_share": 1 - work.num_tokens / num_computed_tokens,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,  # 0 on a CPU
            "reserved_memory_gib": torch.cuda.max_memory_reserved() / 2**30,
            "compile_seconds": calculate_time_spent()["total_wall_time"],
            "graphs": self.num_graphs[-1],
            "graphs_after_warmup": self.num_graphs[self.steps - 1] - self.num_graphs[self.warmup - 1],
        }

    def _is_measured(self, forward_pass: Pass) -> bool:
        return self.warmup <= forward_pass.step < self.steps

    def _layers_seconds(self) -> float:
        """The seconds that the measured passes spent in the decoder's layers, forward and backward."""
        intervals = self.layers_stopwatch.seconds()
        total = 0.0
        for number, forward_pass in enumerate(self.passes):
            if not self._is_measured(forward_pass):
                continue
            # A pass has four marks. The interval after the first mark is the forward time, and the interval after the
            # third mark is the backward time.
            first_mark = 4 * number
            forward_seconds = intervals[first_mark]
            backward_seconds = intervals[first_mark + 2]
            total += forward_seconds + backward_seconds
        return total
