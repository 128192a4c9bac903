"""A loop of plain PyTorch with compiled layers, on the model and the batches of a trainer of ours.

What it reaches is what the trainer's own work could give at most. Its batches are ready on the device.
"""

from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.recorder import StepRecorder, TrainingMeasured
from training.loss import supervised_tokens
from training.stages import base_model


class BareLoop(StepRecorder):
    """Takes all steps itself, where a trainer would begin."""

    def __init__(self, warmup: int, compile_backend: str) -> None:
        super().__init__(warmup)
        self.compile_backend = compile_backend

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Train, keep the figures, and leave the trainer."""
        base = base_model(model)
        for layer in base.model.language_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=self.compile_backend)
        passes = args.gradient_accumulation_steps
        needed = islice(train_dataloader, passes * args.max_steps)
        batches = [to_device(batch, args.device) for batch in needed]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.learning_rate, weight_decay=0.0, fused=True)

        model.train()
        self.watch(model, args.device)
        losses = []
        for start in range(0, passes * args.max_steps, passes):
            losses.append(self.take_step(base, batches[start : start + passes], args))
            torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            self.end_step()

        loss = torch.stack(losses).mean().item()
        self.figures = {"loss": loss, **self.summary()}
        raise TrainingMeasured

    def take_step(self, base: Any, batches: list[dict[str, Any]], args: Any) -> torch.Tensor:
        """Forward and backward passes of a step: the mean loss of its supervised tokens."""
        targets = [supervised_tokens(batch["labels"]) for batch in batches]
        num_tokens = sum(len(tokens) for _, tokens in targets)

        total = torch.zeros((), device=args.device)
        for batch, (places, tokens) in zip(batches, targets, strict=True):
            self.note(batch)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
                states = base.model(**inputs, use_cache=False).last_hidden_state
                logits = base.lm_head(states.flatten(0, 1)[places])
            loss = F.cross_entropy(logits.float(), tokens, reduction="sum") / num_tokens
            loss.backward()
            total += loss.detach()
        return total


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch whose tensors are on the device."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
