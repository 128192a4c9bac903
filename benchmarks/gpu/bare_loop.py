"""A loop of plain PyTorch with compiled layers, on the model and the batches of our trainer.

All batches are on the device before the loop begins, and the loop does nothing but train. So the loop's speed is an
upper bound of our trainer's speed.
"""

from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.recorder import StepRecorder, TrainingMeasured
from training.loss import supervised_tokens
from training.stages import base_model


class BareLoop(StepRecorder):
    """A callback that runs the loop when our trainer begins, and ends the training before the trainer takes a step."""

    def __init__(self, warmup: int, compile_backend: str) -> None:
        super().__init__(warmup)
        self.compile_backend = compile_backend

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Train by the loop, keep the figures, and end the training."""
        base = base_model(model)  # the model inside a `PeftModel`
        for layer in base.model.language_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=self.compile_backend)

        passes_per_step = args.gradient_accumulation_steps
        num_batches = passes_per_step * args.max_steps
        batches = [to_device(batch, args.device) for batch in islice(train_dataloader, num_batches)]

        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.learning_rate, weight_decay=0.0, fused=True)

        model.train()
        self.watch(model, args.device)
        losses = []
        for start in range(0, num_batches, passes_per_step):
            step_batches = batches[start : start + passes_per_step]
            step_loss = self.compute_gradients(base, step_batches, args)
            losses.append(step_loss)
            torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            self.end_step()

        loss = torch.stack(losses).mean().item()
        self.figures = {"loss": loss, **self.summary()}
        raise TrainingMeasured

    def compute_gradients(self, base: Any, batches: list[dict[str, Any]], args: Any) -> torch.Tensor:
        """Do the forward and backward passes of a step. Returns the mean loss of the step's supervised tokens."""
        # For each batch: the positions whose next token is supervised, and the tokens that follow them.
        targets = [supervised_tokens(batch["labels"]) for batch in batches]
        num_supervised = sum(len(next_tokens) for _, next_tokens in targets)

        step_loss = torch.zeros((), device=args.device)
        for batch, (positions, next_tokens) in zip(batches, targets, strict=True):
            self.record_pass(batch)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
                states = base.model(**inputs, use_cache=False).last_hidden_state  # [batch_size, length, hidden_size]
                logits = base.lm_head(states.flatten(0, 1)[positions])  # [supervised tokens, vocabulary]

            # Summed over the step's batches, `batch_loss` is the mean loss of all supervised tokens.
            batch_loss = F.cross_entropy(logits.float(), next_tokens, reduction="sum") / num_supervised
            batch_loss.backward()
            step_loss += batch_loss.detach()
        return step_loss


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same batch with its tensors on the device."""
    moved = {}
    for name, value in batch.items():
        moved[name] = value.to(device) if torch.is_tensor(value) else value
    return moved
