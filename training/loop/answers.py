"""Lets the model answer some held-out rows at each evaluation, so that one sees what it has learned so far."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from PIL import Image
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from typing_extensions import override

from normllava.conversations.pictures import open_images
from normllava.conversations.rows import IMAGE_MARK, Row, row_turns
from normllava.diagnostics.answers import GREEDY
from normllava.diagnostics.training_answers import ANSWERS_FILE
from normllava.files import write_whole
from normllava.tokens import IGNORED
from training.modules.stages import base_model
from training.rows.collator import VisionLanguageCollator


MAX_NEW_TOKENS = 64
# The most characters of a text on the console.
CONSOLE_WIDTH = 100


@dataclass(frozen=True)
class Answer:
    """A line of `answers.jsonl`: the model's answer to the first question of a held-out row."""

    step: int
    row: int
    """The row's number among the held-out rows."""
    question: str
    expected: str
    """What the row says."""
    answer: str
    """What the model says."""


@dataclass(frozen=True)
class Prompt:
    """A held-out row up to its first answer."""

    input_ids: list[int]
    """The tokens, with all image tokens of each picture."""
    images: list[Image.Image]
    question: str
    expected: str


class HeldOutAnswers(TrainerCallback):
    """Answers some held-out rows greedily after each evaluation, and reports the answers.

    They go into `answers.jsonl` of the run's folder, onto the console (one of them), and as a table with pictures to
    trackio and wandb and as text and pictures to TensorBoard, where a run reports to these. The random state and the
    weights stay as they are, so training goes on as it would without.

    Args:
        trainer: The trainer.
        rows: The checked held-out rows, which must have their turns.
        num_answers: How many of them are answered. They are spread evenly over the rows.
    """

    def __init__(self, trainer: Any, rows: Dataset, num_answers: int) -> None:
        self._trainer = trainer
        self._collator: VisionLanguageCollator = trainer.data_collator
        self._rows = rows
        positions = np.linspace(0, len(rows) - 1, min(num_answers, len(rows)))
        self._row_numbers = [round(position) for position in positions]
        self._path = Path(trainer.args.output_dir) / ANSWERS_FILE

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the answers up to the step that a resumed run goes on from, and those of no other run."""
        if not state.is_world_process_zero or not self._path.exists():
            return
        kept_lines = []
        with self._path.open(encoding="utf-8") as file:  # `splitlines` would split inside of answers, too, at U+2028
            for line in file:
                if json.loads(line)["step"] <= state.global_step and state.global_step > 0:
                    kept_lines.append(line)
        write_whole(self._path, "".join(kept_lines))

    @override
    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Answer the rows, on all processes together, and report the answers."""
        answers = self._answer(args, state.global_step)
        if not state.is_world_process_zero:
            return

        # The file is written whole, so that a killed run leaves no part of a line.
        lines = [json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers]
        earlier = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        write_whole(self._path, earlier + "".join(lines))
        print_answer(answers[0])
        pictures = [prompt.images for prompt in map(self._read_prompt, self._row_numbers)]
        log_tables(args.report_to, answers, pictures)
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                log_to_tensorboard(callback.tb_writer, answers, pictures)

    @torch.no_grad()
    def _answer(self, args: Any, step: int) -> list[Answer]:
        """The answers to all rows that were chosen. Every process must call this."""
        # Every process gets as many rows, since a sharded model runs on all processes at once. A row that comes twice
        # is answered twice.
        num_rows = len(self._row_numbers)
        num_shares = math.ceil(num_rows / args.world_size)
        share = []
        for number in range(num_shares):
            index = (number * args.world_size + args.process_index) % num_rows
            share.append(self._row_numbers[index])

        answers = []
        with generating(self._trainer) as model:
            for start in range(0, len(share), args.per_device_eval_batch_size):
                row_numbers = share[start : start + args.per_device_eval_batch_size]
                prompts = [self._read_prompt(number) for number in row_numbers]
                texts = self._generate(model, prompts, args.device)
                for row, prompt, text in zip(row_numbers, prompts, texts, strict=True):
                    answers.append(Answer(step, row, prompt.question, prompt.expected, text))

        all_answers = gather_object(answers)
        answer_by_row = {answer.row: answer for answer in all_answers}
        return [answer_by_row[row] for row in sorted(answer_by_row)]

    def _generate(self, model: Any, prompts: list[Prompt], device: torch.device) -> list[str]:
        """The model's greedy answers to a batch of prompts."""
        tokenizer = self._trainer.processing_class.tokenizer
        images = [image for prompt in prompts for image in prompt.images]
        # As in training, a batch without pictures gets a blank one, which no token sees: a sharded encoder must run on
        # every process or on none.
        row_tokenizer = self._collator.row_tokenizer
        num_blank_tokens = 0 if images else row_tokenizer.tokens_per_tile

        length = num_blank_tokens + max(len(prompt.input_ids) for prompt in prompts)
        rows = []
        masks = []
        for prompt in prompts:
            padding = length - len(prompt.input_ids)
            rows.append(pad(torch.tensor(prompt.input_ids), (padding, 0), value=tokenizer.pad_token_id))
            masks.append(pad(torch.ones(len(prompt.input_ids), dtype=torch.long), (padding, 0)))
        inputs = {"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks)}
        inputs["input_ids"][0, :num_blank_tokens] = row_tokenizer.processor.image_token_id
        inputs["pixel_values"] = self._collator.process_images(images)

        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        generated = model.generate(
            **inputs,
            **GREEDY,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            synced_gpus=self._trainer.is_fsdp_enabled,  # with adapters, the sharded root is the model around this one
        )
        texts = tokenizer.batch_decode(generated[:, length:], skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _read_prompt(self, row_number: int) -> Prompt:
        """Read a row up to its first answer."""
        row = self._rows[row_number]
        row_tokenizer = self._collator.row_tokenizer
        input_ids = row_tokenizer.repeat_at_pictures(row["input_ids"], row)
        labels = row_tokenizer.repeat_at_pictures(row["labels"], row)

        start = next(position for position, label in enumerate(labels) if label != IGNORED)
        end = start
        while end < len(labels) and labels[end] != IGNORED:
            end += 1
        tokenizer = row_tokenizer.processor.tokenizer
        expected = tokenizer.decode(labels[start:end], skip_special_tokens=True).strip()

        num_prompt_tokens = next(position for position, label in enumerate(row["labels"]) if label != IGNORED)
        num_images = row["input_ids"][:num_prompt_tokens].count(row_tokenizer.processor.image_token_id)
        # In stage 'align' the model gets the picture alone.
        question = "" if row_tokenizer.is_plain_template else first_question(row)
        return Prompt(input_ids[:start], open_images(row)[:num_images], question, expected)


def first_question(row: Row) -> str:
    """The text before a row's first answer that isn't empty, without the marks of pictures."""
    question = ""
    for turn in row_turns(row):
        if turn["from"] == "human":
            question = turn["value"].replace(IMAGE_MARK, "").strip()
        if turn["from"] == "gpt" and turn["value"].strip():
            return question
    return question


@contextmanager
def generating(trainer: Any) -> Iterator[Any]:
    """A block in which the model, which is returned, can generate. After it, training goes on as before.

    Where FSDP2 shards the model, what is not in one of its blocks, such as the embeddings, is gathered here: the model
    reads it outside of the forward pass that would gather it. accelerate's autocast is on that forward pass too, so
    the block has its own.
    """
    device = trainer.args.device
    cuda_devices = [device] if device.type == "cuda" else []
    root = trainer.accelerator.unwrap_model(trainer.model)  # the model, or the `PeftModel` around it
    was_training = trainer.model.training
    trainer.model.eval()
    if isinstance(root, FSDPModule):
        root.unshard()
    with torch.random.fork_rng(cuda_devices), trainer.accelerator.autocast():
        yield base_model(root)
    if isinstance(root, FSDPModule):
        root.reshard()
    trainer.model.train(was_training)


def print_answer(answer: Answer) -> None:
    """Write an answer onto the console, in two lines."""
    question = answer.question or "(a picture alone)"
    for label, text in (("asked", f"{question} ({answer.expected})"), ("answers", answer.answer)):
        line = " ".join(text.split())
        if len(line) > CONSOLE_WIDTH:
            line = line[:CONSOLE_WIDTH] + " ..."
        sys.stderr.write(f"    {label}: {line}\n")


def log_tables(report_to: list[str], answers: list[Answer], pictures: list[list[Image.Image]]) -> None:
    """Send a table with pictures to trackio and wandb, if the run reports to these."""
    trackers = []
    if "trackio" in report_to:
        import trackio

        trackers.append(trackio)
    if "wandb" in report_to:
        import wandb

        trackers.append(wandb)

    for tracker in trackers:
        table = pd.DataFrame([asdict(answer) for answer in answers])
        table["pictures"] = [[tracker.Image(picture) for picture in of_row] for of_row in pictures]
        tracker.log({"eval/answers": tracker.Table(dataframe=table), "train/global_step": answers[0].step})


def log_to_tensorboard(writer: Any, answers: list[Answer], pictures: list[list[Image.Image]]) -> None:
    """Send the answers as text, and the first picture of each, to TensorBoard."""
    for answer, of_row in zip(answers, pictures, strict=True):
        tag = f"answers/row {answer.row}"
        text = f"{answer.question}\n\n**should say** {answer.expected}\n\n**says** {answer.answer}"
        writer.add_text(tag, text, answer.step)
        if of_row:
            writer.add_image(tag, np.asarray(of_row[0].convert("RGB")), answer.step, dataformats="HWC")
