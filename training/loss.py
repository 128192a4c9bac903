"""The loss: of supervised tokens only, each with the same weight, in training and on held-out rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerControl
from trl import SFTTrainer
from typing_extensions import override

from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaForConditionalGeneration
from training.key_alignment import KeyAlignment
from training.stages import base_model


def supervised(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a next token is supervised, as places in the flattened `(batch_size, sequence_length)`, and these tokens,
    both `(num_supervised,)`."""
    following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    places = (following != IGNORED).nonzero()[:, 0]
    return places, following[places]


@contextmanager
def head_on_supervised(model: NormLlavaForConditionalGeneration, places: torch.Tensor) -> Iterator[None]:
    """For the time of the block the head sees only the hidden states at `places`, which predict a supervised token.

    TRL does this itself where it has Triton. Elsewhere it scores every position, image tokens included.
    """

    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places][None]
        return output  # [1, num_supervised, hidden_size]

    with model.model.register_forward_hook(keep):
        yield


class SupervisedTrainer(SFTTrainer):
    """[`SFTTrainer`] with this loss, and in training with the losses of `key_alignment` on the decoder's keys."""

    control: TrainerControl

    def __init__(self, key_alignment: KeyAlignment | None = None, **kwargs: Any) -> None:
        self._key_alignment, self._penalty = key_alignment, torch.zeros(())
        super().__init__(**kwargs)

    def _unwrapped(self) -> Any:
        return base_model(self.accelerator.unwrap_model(self.model))

    def _sum_over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum")

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of a batch: TRL's, on the supervised tokens only, and in training the losses on keys.

        We cut the hidden states down to those that predict a supervised token. TRL's `compute_loss` calls the model,
        whose `forward` it has replaced: the head is applied in tiles without ever holding all logits, the sum of the
        tokens' losses is divided by the step's number of tokens, and multiplied by that of processes, which DDP and
        FSDP2 average over. TRL would gather a sharded head past FSDP2, so that each process keeps its own gradient.
        """
        base = self._unwrapped()
        head = base.get_output_embeddings()
        if model.training and isinstance(head, FSDPModule):
            head.unshard()
        places, tokens = supervised(inputs["labels"])
        with head_on_supervised(base, places):
            loss = super().compute_loss(model, {**inputs, "shift_labels": tokens[None]}, *args, **kwargs)
        if self._key_alignment is not None and model.training:
            # The mean over the passes of a step, and over processes, whose gradients are averaged.
            penalty = self._key_alignment.penalty().to(loss.device) / self.current_gradient_accumulation_steps
            self._penalty = penalty.detach()
            loss = loss + penalty
        return loss

    @override
    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Log the mean loss of the held-out rows' supervised tokens (not of batches' means) as `eval_loss`, and with a
        blank picture in place of every one as `eval_loss_blank`. The random state is restored."""
        device, count = self.args.device, self.accelerator.num_processes
        blank, sums = self.data_collator.pixels([]).to(device), torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for seen in map(self._prepare_inputs, self.get_eval_dataloader()):
                unseen = {**seen, "pixel_values": blank.expand_as(seen["pixel_values"])}
                # TRL multiplies by the number of processes, since DDP averages over them.
                losses: Any = [self.compute_loss(self.model, of, num_items_in_batch=count) for of in (seen, unseen)]
                sums[:2] += torch.stack(losses).to(sums)
                sums[2] += (seen["labels"] != IGNORED).sum().item()
        loss, loss_blank, num_tokens = self._sum_over_processes(sums).tolist()
        metrics = {"eval_loss": loss / num_tokens, "eval_loss_blank": loss_blank / num_tokens}
        self._metrics["eval"].clear()  # TRL's own, averaged over batches
        self.log(metrics)
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
