"""Asks the real model about every drawing by the two held-out artists, and prints how often its answers are right.

    python -m examples.emoji.evaluate

To compare, it also fits linear probes of the vision encoder alone on the same drawings. It writes report.json and
answers.png into the model's folder, and the main results into the model's evaluation.json, for its card.
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
from examples.emoji.pictures import GROUP, HELD_OUT, NAME, THERE, Record, draw_other_name
from examples.results import draw_answers, record_scores


logger = logging.getLogger(__name__)

COMMAND = "python -m examples.emoji.evaluate"
CREDIT = "Drawings: Twemoji, © Twitter, Inc. and other contributors, CC BY 4.0. Chosen by lot."
QUESTIONS = Path(__file__).with_name("questions.txt")
# The artist whose drawings are shown on the figure.
DRAWN_SET = "twemoji"
# What the model saw for the answers of a result; values of the field `seen` in report.json.
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
        artist_results, free_answers = ask_about(model, processor, drawings, names)
        results += artist_results
        if artist == DRAWN_SET:
            draw_some(drawings, free_answers, folder / "answers.png")
    results += probe_encoder(records)
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
    """Draw eight drawings, chosen at random, with the model's answers."""
    chosen = random.Random(0).sample(list(zip(drawings, answers, strict=True)), 8)
    images = [open_picture(record) for record, _ in chosen]
    titles = [f"“{answer}”" for _, answer in chosen]
    mistakes = []
    for record, answer in chosen:
        mistakes.append("" if answer == record["name"] else f"it is: {record['name']}")
    draw_answers(images, titles, mistakes, path, CREDIT)


def open_picture(record: Record) -> Image.Image:
    """The picture of a drawing."""
    with Image.open(RUN / "pictures" / record["image"]) as file:
        return file.convert("RGB")


# The model


def ask_about(model: Any, processor: Any, records: list[Record], names: list[str]) -> tuple[list[Record], list[str]]:
    """Ask all questions about one artist's drawings.

    Guessing is measured in two ways: by the answers to a blank picture, and by the answers to another drawing.

    Returns:
        The results, and the free answers to the drawings.
    """
    draw = random.Random(0)
    # For each drawing the number of the other drawing whose answers it is given.
    others = []
    for number in range(len(records)):
        steps_ahead = draw.randrange(1, len(records))
        others.append((number + steps_ahead) % len(records))
    images = [open_picture(record) for record in records]
    images_and_blank = [*images, Image.new("RGB", images[0].size, "white")]
    name_prompts = [make_prompt(NAME, image) for image in images_and_blank]
    group_prompts = [make_prompt(GROUP, image) for image in images_and_blank]

    likeliest_names = name_pictures(model, processor, images_and_blank, names)
    free_answers = answer_prompts(model, processor, name_prompts, "free")
    groups = answer_prompts(model, processor, group_prompts, "group")

    artist = records[0]["set"]
    results = []
    for question, field, answers in (
        ("likeliest of all names", "name", likeliest_names),
        ("free answer, exact", "name", free_answers),
        ("group", "group", groups),
    ):
        right = [record[field] for record in records]
        *own_answers, blank_answer = answers
        other_answers = [own_answers[other] for other in others]
        results.append(score(artist, question, OWN_DRAWING, own_answers, right))
        results.append(score(artist, question, OTHER_DRAWING, other_answers, right))
        blank_result = score(artist, question, BLANK, [blank_answer] * len(right), right)
        results.append(blank_result | {"answer": blank_answer})

    results.append(ask_whether_there(model, processor, records, images, names, draw))
    return results, free_answers[:-1]  # without the answer to the blank


def name_pictures(model: Any, processor: Any, images: list[Image.Image], names: list[str]) -> list[str]:
    """The likeliest of all names for each picture. A name's likelihood includes the end token."""
    tokenizer = processor.tokenizer
    texts = [f"{name}{tokenizer.eos_token}" for name in names]
    answers = tokenizer(texts, add_special_tokens=False).input_ids

    chosen = []
    for image in tqdm(images, desc="Naming"):
        inputs = encode_prompts(processor, [make_prompt(NAME, image)])
        prompt = read_prompt(model, inputs.to(model.device))
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
    """Ask about each drawing whether it shows a thing. Every second drawing does, the others show another thing."""
    prompts = []
    right = []
    for number, (record, image) in enumerate(zip(records, images, strict=True)):
        is_there = number % 2 == 1
        thing = record["name"] if is_there else draw_other_name(record, names, draw)
        prompts.append(make_prompt(THERE.format(thing), image))
        right.append("yes" if is_there else "no")
    answers = answer_prompts(model, processor, prompts, "is it there?")
    return score(records[0]["set"], "is it there? (for half)", OWN_DRAWING, answers, right)


def score(artist: str, question: str, seen: str, answers: Sequence[str], right: Sequence[str]) -> Record:
    """A result: the share of right answers, with Wilson's 95% interval over drawings."""
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


# The vision encoder alone


def probe_encoder(records: list[Record]) -> list[Record]:
    """The results of linear probes of the pretrained encoder's features.

    The probes are fitted to the drawings that the model is trained on, and tested on those of the held-out artists.
    """
    states = encode_pictures(records)
    features_by_kind = {"patches": states[:, 1:].mean(dim=1).numpy(), "CLS": states[:, 0].numpy()}
    labels = np.array([record["name"] for record in records])
    artists = np.array([record["set"] for record in records])
    is_trained = ~np.isin(artists, list(HELD_OUT))

    results = []
    for kind, features in features_by_kind.items():
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=100))
        probe.fit(features[is_trained], labels[is_trained])
        for artist in HELD_OUT:
            answers = probe.predict(features[artists == artist])
            right = labels[artists == artist]
            results.append(score(artist, f"linear probe, {kind}", "the encoder alone", list(answers), list(right)))
    return results


@torch.no_grad()
def encode_pictures(records: list[Record]) -> torch.Tensor:
    """The encoder's last hidden states of all drawings, `[num_drawings, 1 + num_patches, width]`; CLS comes first."""
    encoder = AutoModel.from_pretrained(RUN / "vision").eval()
    image_processor = AutoImageProcessor.from_pretrained(RUN / "vision")
    states = []
    for start in tqdm(range(0, len(records), 64), desc="The encoder alone"):
        images = [open_picture(record) for record in records[start : start + 64]]
        inputs = image_processor(images, return_tensors="pt")
        states.append(encoder(**inputs, output_hidden_states=True).hidden_states[-1])
    return torch.cat(states)


# The language model


def evaluate_text(model: Any, processor: Any) -> dict[str, Any]:
    """The perplexity of text and the answers to questions without pictures, before and after training."""
    before = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    prompts = [make_prompt(question) for question in questions]
    max_new_tokens = 24
    return {
        "perplexity": {"before": perplexity(before, tokenizer), "after": perplexity(model, tokenizer)},
        "questions": questions,
        "before": answer_prompts(before, tokenizer, prompts, "before", max_new_tokens),
        "after": answer_prompts(model, processor, prompts, "after", max_new_tokens),
    }


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """The perplexity of text that no model here is trained on: scikit-learn's descriptions of three data sets.

    It is measured in pieces of 512 tokens.
    """
    text = "\n".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine))
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device).input_ids[0]
    whole_pieces = input_ids.split(512)[:-1]
    losses = [model(input_ids=piece[None], labels=piece[None]).loss.item() for piece in whole_pieces]
    return float(np.exp(np.mean(losses)))


def render(results: list[Record]) -> str:
    """The printed table: percentages of right answers, with 95% intervals over drawings."""
    table = pd.DataFrame(results)
    percent = 100 * table[["share", "low", "high"]]
    table["right"] = [f"{share:.1f} ({low:.1f} to {high:.1f})" for share, low, high in percent.to_numpy()]
    return table.set_index(["question", "seen", "artist"])["right"].unstack(sort=False).to_string()


if __name__ == "__main__":
    main()
