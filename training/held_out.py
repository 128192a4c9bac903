"""Held-out questions that a model answers during training, and how its answers compare with the truth."""

import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule

from conversations.pictures import open_images
from conversations.rows import IMAGE_MARK, Row, row_turns
from conversations.tokens import IGNORED
from diagnostics.answers import GREEDY
from diagnostics.tokens import Inputs
from modeling_normllava import NormLlavaForConditionalGeneration
from training.collator import VisionLanguageCollator
from training.stages import base_model


@dataclass(frozen=True)
class Answer:
    """What a model said to a held-out question.

    Attributes:
        source: File or dataset and number of the row.
        question: The last human turn before the answer, without image marks.
        answer: What the model said.
        truth: What the row says.
        right: Whether the answer is complete and equals the truth after [`normalise`].
    """

    source: str
    question: str
    answer: str
    truth: str
    right: bool


def normalise(answer: str) -> str:
    """An answer in lower case, without punctuation, articles and extra spaces: what SQuAD's exact match compares
    (Rajpurkar et al. 2016, arXiv 1606.05250; `normalize_answer` of its evaluation script). An answer that consists
    only of these is kept, such as the "A" of a multiple choice."""
    text = "".join(character for character in answer.lower() if character not in string.punctuation)
    words = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join((words.strip() or text.strip() or answer).split())


def held_out_losses(
    batches: Iterable[Inputs], blank: torch.Tensor | None, loss_of: Callable[[Inputs], float],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:  # fmt: skip
    """The mean loss of all supervised tokens, each with the same weight, as `loss`; with a `blank` picture in place of
    every one, as `loss_blank`. transformers averages the means of batches, whatever their size.

    Args:
        batches: The batches of this process.
        blank: The picture; `None` if the rows have none.
        loss_of: The sum of a batch's losses.
        reduce: Sums a tensor over processes.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # of the loss, of the loss with blank pictures, of tokens
    for inputs in batches:
        sums[0] += loss_of(inputs)
        if blank is not None:
            sums[1] += loss_of({**inputs, "pixel_values": blank.expand_as(inputs["pixel_values"])})
        sums[2] += (inputs["labels"] != IGNORED).sum().item()
    total, total_blank, num_tokens = reduce(sums).tolist()
    return {"loss": total / num_tokens} | ({} if blank is None else {"loss_blank": total_blank / num_tokens})


class HeldOutQuestions:
    """The first question of each of some rows, for a model to answer.

    The prompt is all tokens before the first supervised one, the truth the supervised tokens from there on, both as in
    training. So questions work alike in every stage and chat format.

    Args:
        rows: The rows, tokenized.
        collate: The collator of training.
        batch_size: Questions that are answered at once.
        one_line: Whether a line break ends an answer, as in the rows of stage "align"; nothing else does there.
    """

    def __init__(self, rows: Sequence[Row], collate: VisionLanguageCollator, batch_size: int, one_line: bool) -> None:
        self._rows, self._collate, self._batch_size, self._one_line = rows, collate, batch_size, one_line
        self._prompts: list[list[int]] = []
        self._truths: list[list[int]] = []
        for row in rows:
            input_ids, labels = row["input_ids"], row["labels"]
            start = next(place for place, label in enumerate(labels) if label != IGNORED)
            end = next((place for place in range(start, len(labels)) if labels[place] == IGNORED), len(labels))
            self._prompts.append(input_ids[:start])
            self._truths.append(labels[start:end])

    def answer(self, trained: nn.Module, accelerator: Accelerator) -> list[Answer]:
        """Greedy answers to all questions, on every process, with at most as many tokens as the longest truth. All
        processes must call this, under FSDP2 after a forward pass."""
        count, step = len(self._rows), accelerator.num_processes
        model = base_model(accelerator.unwrap_model(trained))
        # All processes answer equally many, as a sharded model requires; repeated answers are dropped.
        numbers = range(accelerator.process_index, -(-count // step) * step, step)
        answers: dict[int, Answer] = {}
        for start in range(0, len(numbers), self._batch_size):
            batch = [number % count for number in numbers[start : start + self._batch_size]]
            inputs = {name: tensor.to(accelerator.device) for name, tensor in self._inputs(batch).items()}
            if isinstance(trained, FSDPModule):  # pictures are encoded outside of the forward that gathers the weights
                trained.unshard()
            with accelerator.autocast():
                longest = max(map(len, self._truths))
                out = model.generate(
                    **inputs, **GREEDY, use_cache=True, max_new_tokens=longest, synced_gpus=step > 1
                )  # fmt: skip
            if isinstance(trained, FSDPModule):
                trained.reshard()
            said = out[:, inputs["input_ids"].shape[1] :].tolist()
            answers |= {
                number: self._compare(number, tokens, model) for number, tokens in zip(batch, said, strict=True)
            }
        return [answer for _, answer in sorted(dict(gather_object(list(answers.items()))).items())]

    def _inputs(self, numbers: list[int]) -> Inputs:
        """A batch of prompts, padded on the left; without pictures it holds a blank one, as in training."""
        collate, processor = self._collate, self._collate.tokenize.processor
        images = []
        for number in numbers:
            images += open_images(self._rows[number])[: self._prompts[number].count(processor.image_token_id)]
        prompts = [collate.tokenize.expand_pictures(self._prompts[number]) for number in numbers]
        num_blank = 0 if images else collate.tokenize.tokens_per_image
        longest = max(map(len, prompts)) + num_blank
        input_ids = torch.full((len(numbers), longest), processor.tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for place, prompt in enumerate(prompts):
            input_ids[place, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[place, longest - len(prompt) :] = 1
        input_ids[0, :num_blank] = processor.image_token_id
        return {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": collate.pixels(images)}

    def _compare(self, number: int, said: list[int], model: NormLlavaForConditionalGeneration) -> Answer:
        row, question = self._rows[number], ""
        for turn in takewhile(lambda turn: turn["from"] != "gpt", row_turns(row)):
            question = turn["value"] if turn["from"] == "human" else question
        answer, truth = self._text(said), self._text(self._truths[number])
        # An answer that was cut off after the truth is not the same answer.
        ends = model.generation_config.eos_token_id
        ended = not set(said).isdisjoint(ends if isinstance(ends, list) else [ends])
        if self._one_line:
            ended = "\n" in self._decode(said)
        right = ended and normalise(answer) == normalise(truth)
        return Answer(row["source"], question.replace(IMAGE_MARK, "").strip(), answer, truth, right)

    def _text(self, tokens: list[int]) -> str:
        text = self._decode(tokens)
        return (text.split("\n")[0] if self._one_line else text).strip()

    def _decode(self, tokens: list[int]) -> str:
        return self._collate.tokenize.processor.tokenizer.decode(tokens, skip_special_tokens=True)
