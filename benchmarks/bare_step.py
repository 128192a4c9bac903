"""A training step of plain PyTorch, which the benchmarks time beside our trainer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from normllava.tokens import IGNORED


def take_step(
    model: Any, batches: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer, args: Any
) -> torch.Tensor:
    """Take a step with the trainer's arithmetic. Returns the mean loss of the step's supervised tokens.

    Args:
        model: The model, not inside a `PeftModel`.
        batches: The step's batches, on the model's device.
        optimizer: The optimizer of the parameters that are trained.
        args: The trainer's arguments, of which `bf16` and `max_grad_norm` are read.
    """
    # For each batch the rows and positions whose next token is supervised. They are found before the first pass,
    # because `nonzero` waits for the GPU.
    supervised = [(batch["labels"][:, 1:] != IGNORED).nonzero(as_tuple=True) for batch in batches]
    num_supervised = sum(len(rows) for rows, _ in supervised)

    step_loss = torch.zeros((), device=model.device)
    for batch, (rows, positions) in zip(batches, supervised, strict=True):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16):
            states = model.model(**inputs, use_cache=False).last_hidden_state  # [batch_size, length, hidden_size]
            logits = model.lm_head(states[rows, positions])  # [supervised tokens, vocabulary]
        next_tokens = batch["labels"][rows, positions + 1]

        # Summed over the step's batches, `batch_loss` is the mean loss of all supervised tokens.
        batch_loss = F.cross_entropy(logits.float(), next_tokens, reduction="sum") / num_supervised
        batch_loss.backward()
        step_loss += batch_loss.detach()

    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return step_loss


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same batch with its tensors on the device."""
    moved = {}
    for name, value in batch.items():
        moved[name] = value.to(device) if torch.is_tensor(value) else value
    return moved
