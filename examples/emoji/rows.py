"""Makes the rows of the real model: captions, conversations about pictures, and text that the language model wrote.

    python -m examples.emoji.rows

Writes captions.json for the aligned start, train.json for stage 2, and twemoji.json and openmoji.json with the name of
every held-out drawing. Text-only rows, as in LLaVA's mixture, are the untouched language model's own answers.
"""

import json
import logging
import random
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversations.chat_template import chat_template
from conversations.rows import IMAGE_MARK
from examples.emoji.parts import RUN
from examples.emoji.pictures import HELD_OUT


logger = logging.getLogger(__name__)

NAME, GROUP, THERE = "What is this?", "Is it nature or food?", "Is there any {} here?"
TEXT = ("What is a {}?", "Tell me about the {}.", "What color is a {}?", "Write a sentence with the word {}.")
PICTURE = f"{IMAGE_MARK}\n"
PASSES = 3  # Each with other questions about the same drawings.
TEXT_QUESTIONS, TEXT_BATCH, TEXT_TOKENS = 640, 32, 40
Record = dict[str, Any]


def turns(question: str, answer: str, mark: str = PICTURE) -> list[dict[str, str]]:
    """LLaVA's turns of a question and its answer, about a picture unless `mark` is empty."""
    return [{"from": "human", "value": mark + question}, {"from": "gpt", "value": answer}]


def ask_about(record: Record, names: list[str], draw: random.Random) -> list[dict[str, str]]:
    """A picture's turns: its name is always asked, for four in ten also its group or whether something is there."""
    questions = [(NAME, record["name"])]
    if draw.random() < 0.4:
        there = draw.random() < 0.5
        shown = record["name"] if there else draw.choice([name for name in names if name != record["name"]])
        other = draw.choice([(GROUP, record["group"]), (THERE.format(shown), "yes" if there else "no")])
        questions.insert(draw.randrange(2), other)
    return [turn for number, pair in enumerate(questions) for turn in turns(*pair, mark="" if number else PICTURE)]


@torch.no_grad()
def answer_texts(questions: list[str]) -> list[tuple[str, str]]:
    """Questions with the language model's greedy answers, asked in the composed model's format; none that is cut."""
    model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    template, end, pairs = chat_template(tokenizer, IMAGE_MARK), model.config.eos_token_id, []
    for start in tqdm(range(0, len(questions), TEXT_BATCH), desc="The language model answers"):
        batch = questions[start : start + TEXT_BATCH]
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": question}] for question in batch],
            chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
        )  # fmt: skip
        generated = model.generate(**inputs, max_new_tokens=TEXT_TOKENS, do_sample=False)
        answers = generated[:, inputs["input_ids"].shape[1] :]
        for question, answer in zip(batch, answers, strict=True):
            if end in answer:
                pairs.append((question, tokenizer.decode(answer, skip_special_tokens=True).strip()))
    return pairs


def main() -> None:
    """Write the four files."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    records: list[Record] = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    names, draw = sorted({record["name"] for record in records}), random.Random(42)
    trained = [record for record in records if record["set"] not in HELD_OUT]
    named = [record | {"conversations": turns(NAME, record["name"])} for record in records]
    texts = draw.sample([question.format(name) for question in TEXT for name in names], TEXT_QUESTIONS)
    spoken = [{"conversations": turns(*pair, mark="")} for pair in answer_texts(texts)]
    asked = [
        {"image": row["image"], "conversations": ask_about(row, names, draw)} for _ in range(PASSES) for row in trained
    ]
    files = {held_out: [row for row in named if row["set"] == held_out] for held_out in HELD_OUT}
    files |= {"captions": [row for row in named if row["set"] not in HELD_OUT], "train": asked + spoken}
    for name, rows in files.items():
        (RUN / "pictures" / f"{name}.json").write_text(json.dumps(rows, indent=0), encoding="utf-8")
        logger.info("%s.json: %d rows", name, len(rows))


if __name__ == "__main__":
    main()
