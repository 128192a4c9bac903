"""The loss, in training and on held-out rows: of supervised tokens only, each with the same weight."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer
from typing_extensions import override

from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaForConditionalGeneration
from training.held_out import Answer, HeldOutQuestions
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
    """[`SFTTrainer`] with the loss of this file.

    Args:
        key_alignment: Losses on the decoder's keys.
        eval_sampler: The sampler of held-out rows.
        questions: Held-out questions to answer at each evaluation.
        kwargs: As for [`SFTTrainer`].
    """

    def __init__(
        self,
        key_alignment: KeyAlignment | None = None,
        eval_sampler: BatchRebalanceSampler | None = None,
        questions: HeldOutQuestions | None = None,
        **kwargs: Any,
    ) -> None:
        self._key_alignment, self._penalty = key_alignment, torch.zeros(())
        self._eval_sampler, self._questions = eval_sampler, questions
        held_out = kwargs.get("eval_dataset")
        self._eval_has_pictures = held_out is not None and any(held_out["num_images"])
        super().__init__(**kwargs)

    def _unwrapped(self) -> Any:
        return base_model(self.accelerator.unwrap_model(self.model))

    def _sum_over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum")

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of a batch: TRL's, on the supervised tokens only, and in training the losses on keys.

        Who computes what: Trainer counts the supervised tokens of all passes of a step on all processes and calls
        this. We cut the hidden states down to those that predict one of these tokens. TRL's `compute_loss` calls the
        model, whose `forward` it has replaced: the base model runs, the head is applied in tiles without ever holding
        all logits, and the sum of the tokens' losses is divided by the step's number of tokens. TRL multiplies by the
        number of processes, since DDP and FSDP2 average gradients over them. They do so for parameters that they
        gather themselves: TRL gathers a sharded head on its own, past FSDP2, and each process would keep its own
        gradient of it. So FSDP2 is told to gather it first.
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
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the held-out rows without any effect on training: its mode and its random state, from which a
        data loader takes a number for its workers, are restored."""
        training, device, started = self.model.training, self.args.device, time.monotonic()
        self.model.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            metrics = super().evaluate(*args, **kwargs)
        self.model.train(training)
        self.leave_out(time.monotonic() - started)
        return metrics

    @override
    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._eval_sampler

    @override
    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The loss on held-out rows, with their pictures and with blank ones, and how many questions are answered.

        Every supervised token has the same weight. transformers' own loop averages the means of batches, whatever
        their size.
        """
        has_pictures = self._eval_has_pictures
        blank = self.data_collator.pixels([]).to(self.args.device)
        sums = torch.zeros(3, dtype=torch.float64)  # of the loss, of the loss with blank pictures, of tokens
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            batches = [inputs]
            if has_pictures:
                batches.append({**inputs, "pixel_values": blank.expand_as(inputs["pixel_values"])})
            for number, batch in enumerate(batches):
                # TRL multiplies by the number of processes, since DDP averages over them.
                loss: Any = self.compute_loss(self.model, batch, num_items_in_batch=self.accelerator.num_processes)
                sums[number] += loss.item()
            sums[2] += (inputs["labels"] != IGNORED).sum().item()
        if self.accelerator.num_processes > 1:
            sums = self._sum_over_processes(sums)
        total, total_blank, num_tokens = sums.tolist()
        metrics = {"loss": total / num_tokens} | ({"loss_blank": total_blank / num_tokens} if has_pictures else {})
        self._metrics["eval"].clear()  # TRL's own, averaged over batches, and over tokens since the last resume
        if self._questions is not None:
            answers = self._questions.answer(self.model, self.accelerator)
            self.note_answers(answers)
            metrics["exact_match"] = share = sum(answer.right for answer in answers) / len(answers)
            metrics["exact_match_stderr"] = math.sqrt(share * (1 - share) / len(answers))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=self.num_examples(dataloader)
        )

    def note_answers(self, answers: list[Answer]) -> None:
        """Called with the answers of an evaluation."""

    def leave_out(self, seconds: float) -> None:
        """Called with seconds that have just passed, and were not spent on training."""
