"""Asks the real model about every drawing by two artists who were held out, and prints how often it is right.

    python -m examples.emoji.evaluate

Beside the model stands what its vision encoder alone knows of the same drawings. Writes report.json and answers.png
into the model's folder, and the main results into its evaluation.json, for its card.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from common.console import command, parse
from diagnostics.answers import answer_prompts, encode_prompts, likeliest, make_prompt, read_prompt
from examples.emoji.parts import RUN
from examples.emoji.pictures import GROUP, HELD_OUT, NAME, THERE, Record
from examples.results import draw_answers, record_scores


logger = logging.getLogger(__name__)

COMMAND = "python -m examples.emoji.evaluate"
CREDIT = "Drawings: Twemoji, © Twitter, Inc. and other contributors, CC BY 4.0. Chosen by lot."
QUESTIONS = Path(__file__).with_name("questions.txt")
DRAWN_SET = "twemoji"
# What the model is shown, as report.json names it.
OWN_DRAWING = "the drawing"
OTHER_DRAWING = "another drawing"
BLANK = "a blank"


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parse(build_parser(), argv)
    folder = RUN / "stage2"
    records = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    names = sorted({record["name"] for record in records})
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)

    results = []
    for artist in HELD_OUT:
        drawings = [record for record in records if record["set"] == artist]
        of_artist, free_answers = ask_about(model, processor, drawings, names)
        results += of_artist
        if artist == DRAWN_SET:
            draw_some(drawings, free_answers, folder / "answers.png")
    results += encoder_alone(records)
    text = evaluate_text(model, processor)

    logger.info("%s", render(results))
    logger.info("perplexity of other text: %(before).2f before, %(after).2f after", text["perplexity"])
    (folder / "report.json").write_text(json.dumps({"results": results, "text": text}, indent=1), encoding="utf-8")
    record_results(folder, results)


def record_results(folder: Path, results: Sequence[Record]) -> None:
    """Write the results on the artists' own drawings into the model's evaluation.json."""
    rows = []
    for result in results:
        if result["seen"] == OWN_DRAWING:
            rows.append({
                "task": result["question"],
                "dataset": result["artist"],
                "split": "held out",
                "value": result["share"],
                "n": result["n"],
            })  # fmt: skip
    record_scores(folder, COMMAND, rows)


def draw_some(drawings: Sequence[Record], answers: Sequence[str], path: Path) -> None:
    """A figure of eight drawings, chosen by lot, with the model's answers."""
    chosen = random.Random(0).sample(list(zip(drawings, answers, strict=True)), 8)
    images = [open_picture(record) for record, _ in chosen]
    titles = [f"“{answer}”" for _, answer in chosen]
    mistakes = ["" if answer == record["name"] else f"it is: {record['name']}" for record, answer in chosen]
    draw_answers(images, titles, mistakes, path, CREDIT)


def open_picture(record: Record) -> Image.Image:
    """A drawing's pixels."""
    with Image.open(RUN / "pictures" / record["image"]) as file:
        return file.convert("RGB")


# The model


def ask_about(model: Any, processor: Any, records: list[Record], names: list[str]) -> tuple[list[Record], list[str]]:
    """Results on one artist's drawings, and the free answers.

    Each is also given for a blank, and for another drawing's answers, to see what guessing would score.
    """
    draw = random.Random(0)
    # Whose answers a drawing is given.
    others = [(number + draw.randrange(1, len(records))) % len(records) for number in range(len(records))]
    images = [open_picture(record) for record in records]
    with_blank = [*images, Image.new("RGB", images[0].size, "white")]

    likeliest_names = name_pictures(model, processor, with_blank, names)
    free_answers = answer_prompts(model, processor, [make_prompt(NAME, image) for image in with_blank], "free")
    groups = answer_prompts(model, processor, [make_prompt(GROUP, image) for image in with_blank], "group")

    results = []
    for question, field, answers in (
        ("likeliest of all names", "name", likeliest_names),
        ("free answer, exact", "name", free_answers),
        ("group", "group", groups),
    ):
        right = [record[field] for record in records]
        *own_answers, blank_answer = answers
        other_answers = [own_answers[other] for other in others]
        artist = records[0]["set"]
        results.append(score(artist, question, OWN_DRAWING, own_answers, right))
        results.append(score(artist, question, OTHER_DRAWING, other_answers, right))
        of_blank = score(artist, question, BLANK, [blank_answer] * len(right), right)
        results.append({**of_blank, "answer": blank_answer})

    results.append(ask_whether_there(model, processor, records, images, names, draw))
    return results, free_answers[:-1]


def name_pictures(model: Any, processor: Any, images: list[Image.Image], names: list[str]) -> list[str]:
    """The likeliest of all names for each picture, by its log-probability up to the end token."""
    tokenizer = processor.tokenizer
    answers = tokenizer([f"{name}{tokenizer.eos_token}" for name in names], add_special_tokens=False).input_ids

    chosen = []
    for image in tqdm(images, desc="Naming"):
        prompt = read_prompt(model, encode_prompts(processor, [make_prompt(NAME, image)]).to(model.device))
        chosen.append(names[likeliest(model, prompt, answers)])
    return chosen


def ask_whether_there(
    model: Any,
    processor: Any,
    records: Sequence[Record],
    images: Sequence[Image.Image],
    names: Sequence[str],
    draw: random.Random,
) -> Record:
    """The result of asking every second drawing for what it shows, and the others for something else."""
    prompts = []
    right = []
    for number, (record, image) in enumerate(zip(records, images, strict=True)):
        is_there = number % 2 == 1
        thing = record["name"] if is_there else draw.choice([name for name in names if name != record["name"]])
        prompts.append(make_prompt(THERE.format(thing), image))
        right.append("yes" if is_there else "no")
    answers = answer_prompts(model, processor, prompts, "is it there?")
    return score(records[0]["set"], "is it there? (for half)", OWN_DRAWING, answers, right)


def score(artist: str, question: str, seen: str, answers: Sequence[str], right: Sequence[str]) -> Record:
    """A row of the results: the share of right answers, with its 95% interval over drawings (Wilson's)."""
    hits = sum(given == wanted for given, wanted in zip(answers, right, strict=True))
    interval = binomtest(hits, len(right)).proportion_ci(method="wilson")
    return {
        "artist": artist,
        "question": question,
        "seen": seen,
        "share": hits / len(right),
        "low": interval.low,
        "high": interval.high,
        "n": len(right),
    }


# Its encoder


def encoder_alone(records: list[Record]) -> list[Record]:
    """Results of linear probes of the untrained encoder's features, fitted to the drawings that are trained on."""
    states = encode_pictures(records)
    features = {"patches": states[:, 1:].mean(dim=1).numpy(), "CLS": states[:, 0].numpy()}
    labels = np.array([record["name"] for record in records])
    artists = np.array([record["set"] for record in records])
    is_trained = ~np.isin(artists, list(HELD_OUT))

    results = []
    for part, values in features.items():
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=100))
        probe.fit(values[is_trained], labels[is_trained])
        for artist in HELD_OUT:
            given = probe.predict(values[artists == artist])
            right = labels[artists == artist]
            results.append(score(artist, f"linear probe, {part}", "the encoder alone", list(given), list(right)))
    return results


@torch.no_grad()
def encode_pictures(records: list[Record]) -> torch.Tensor:
    """The encoder's last hidden states of all drawings, [num_drawings, 1 + num_patches, width]."""
    encoder = AutoModel.from_pretrained(RUN / "vision").eval()
    image_processor = AutoImageProcessor.from_pretrained(RUN / "vision")
    states = []
    for start in tqdm(range(0, len(records), 64), desc="The encoder alone"):
        images = [open_picture(record) for record in records[start : start + 64]]
        pixels = image_processor(images, return_tensors="pt")
        states.append(encoder(**pixels, output_hidden_states=True).hidden_states[-1])
    return torch.cat(states)


# Its language model


def evaluate_text(model: Any, processor: Any) -> dict[str, Any]:
    """Perplexity, and answers to plain questions, of the language model before training and of the trained model."""
    before = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    prompts = [make_prompt(question) for question in questions]
    return {
        "perplexity": {"before": perplexity(before, tokenizer), "after": perplexity(model, tokenizer)},
        "questions": questions,
        "before": answer_prompts(before, tokenizer, prompts, "before", 24),
        "after": answer_prompts(model, processor, prompts, "after", 24),
    }


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """On what scikit-learn says of three data sets, in pieces of 512 tokens: text that nothing here trained on."""
    text = "\n".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine))
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device).input_ids[0]
    whole_pieces = input_ids.split(512)[:-1]
    losses = [model(input_ids=piece[None], labels=piece[None]).loss.item() for piece in whole_pieces]
    return float(np.exp(np.mean(losses)))


def render(results: list[Record]) -> str:
    """The table that the command prints: percent right, 95% intervals over drawings."""
    table = pd.DataFrame(results)
    percent = 100 * table[["share", "low", "high"]]
    table["right"] = [f"{share:.1f} ({low:.1f} to {high:.1f})" for share, low, high in percent.to_numpy()]
    return table.set_index(["question", "seen", "artist"])["right"].unstack(sort=False).to_string()


if __name__ == "__main__":
    main()
