"""Held-out questions that a model answers during training, and how its answers compare with the truth."""

import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


@contextmanager
def generating(trained: nn.Module, accelerator: Accelerator) -> Iterator[NormLlavaForConditionalGeneration]:
    """The unwrapped model, ready to generate from padded prompts in the precision of training."""
    model = base_model(accelerator.unwrap_model(trained))
    if isinstance(trained, FSDPModule):  # generating encodes pictures outside of the forward that gathers the weights
        trained.unshard()
    try:
        with accelerator.autocast():
            yield model
    finally:
        if isinstance(trained, FSDPModule):
            trained.reshard()


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
        """Generate greedy answers with at most as many tokens as the longest truth. All processes must call this.

        Args:
            trained: The model, or the `PeftModel` around it; under FSDP2 after a forward pass.
            accelerator: Holds the processes and the precision.

        Returns:
            The answers to all questions, on every process.
        """
        count, step = len(self._rows), accelerator.num_processes
        # All processes answer equally many, as a sharded model requires; repeated answers are dropped.
        numbers = range(accelerator.process_index, -(-count // step) * step, step)
        answers: list[tuple[int, Answer]] = []
        for start in range(0, len(numbers), self._batch_size):
            batch = [number % count for number in numbers[start : start + self._batch_size]]
            inputs = {name: tensor.to(accelerator.device) for name, tensor in self._inputs(batch).items()}
            with generating(trained, accelerator) as model:
                generated = model.generate(
                    **inputs,
                    **GREEDY,
                    use_cache=True,
                    max_new_tokens=max(map(len, self._truths)),
                    synced_gpus=step > 1,
                )
                ends = model.generation_config.eos_token_id
            said = generated[:, inputs["input_ids"].shape[1] :].tolist()
            ends = set(ends if isinstance(ends, list) else [ends])
            answers += [
                (number, self._compare(number, tokens, ends)) for number, tokens in zip(batch, said, strict=True)
            ]
        return [answer for _, answer in sorted(dict(gather_object(answers)).items())]

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

    def _compare(self, number: int, said: list[int], ends: set[int]) -> Answer:
        row = self._rows[number]
        question = ""
        for turn in row_turns(row):
            if turn["from"] == "gpt":
                break
            question = turn["value"] if turn["from"] == "human" else question
        answer, truth = self._text(said), self._text(self._truths[number])
        # An answer that was cut off after the truth is not the same answer.
        ended = "\n" in self._decode(said) if self._one_line else not ends.isdisjoint(said)
        right = ended and normalise(answer) == normalise(truth)
        return Answer(row["source"], question.replace(IMAGE_MARK, "").strip(), answer, truth, right)

    def _text(self, tokens: list[int]) -> str:
        text = self._decode(tokens)
        return (text.split("\n")[0] if self._one_line else text).strip()

    def _decode(self, tokens: list[int]) -> str:
        return self._collate.tokenize.processor.tokenizer.decode(tokens, skip_special_tokens=True)
