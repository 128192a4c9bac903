"""A loop of plain PyTorch on the model and the batches of our trainer, which compiles the same modules.

All batches are on the device before the loop begins, and the loop does nothing but train. Llava looks for the image
tokens itself, as it does without our trainer.
"""

from itertools import islice
from typing import Any

import torch

from benchmarks.bare_step import take_step, to_device
from benchmarks.gpu.recorder import StepRecorder, TrainingMeasured
from training.modules.attention import unread_mask
from training.modules.compiling import compile_modules, modules_to_compile
from training.modules.stages import base_model


class BareLoop(StepRecorder):
    """A callback that runs the loop when our trainer begins, and ends the training before the trainer takes a step."""

    def __init__(self, warmup: int, steps: int, compile_backend: str) -> None:
        super().__init__(warmup, steps)
        self.compile_backend = compile_backend

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Train by the loop, keep the figures, and end the training."""
        base = base_model(model)  # the model inside a `PeftModel`
        compile_modules(modules_to_compile(base), self.compile_backend)

        passes_per_step = args.gradient_accumulation_steps
        num_batches = passes_per_step * args.max_steps
        batches = [to_device(batch, args.device) for batch in islice(train_dataloader, num_batches)]
        for batch in batches:
            if "cu_seq_lens_q" in batch:
                batch["attention_mask"] = unread_mask(args.device)  # as our trainer gives it

        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.learning_rate, weight_decay=0.0, fused=True)

        model.train()
        self.watch(model, args.device)
        losses = []
        for start in range(0, num_batches, passes_per_step):
            step_batches = batches[start : start + passes_per_step]
            self.begin_profile()
            for batch in step_batches:
                self.record_pass(batch)
            losses.append(take_step(base, step_batches, optimizer, args))
            self.end_step()

        loss = torch.stack(losses).mean().item()
        self.figures |= {"loss": loss, **self.summary()}
        raise TrainingMeasured
