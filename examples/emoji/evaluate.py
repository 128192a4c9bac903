"""Asks the real model about every drawing by two artists who were held out, and prints how often it is right.

    python -m examples.emoji.evaluate

Beside the model stands what its vision encoder alone knows of the same drawings. Writes report.json and answers.png
into the model's folder, and the main results into its evaluation.json, for its card.
"""

import json
import logging
import random
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

from diagnostics.answers import answer_prompts, encode_prompts, likeliest, make_prompt, read_prompt
from examples.emoji.parts import RUN
from examples.emoji.pictures import GROUP, HELD_OUT, NAME, THERE, Record
from examples.results import draw_answers, record_scores


logger = logging.getLogger(__name__)

COMMAND = "python -m examples.emoji.evaluate"
CREDIT = "Drawings: Twemoji, © Twitter, Inc. and other contributors, CC BY 4.0. Chosen by lot."


def open_picture(record: Record) -> Image.Image:
    """A drawing's pixels."""
    with Image.open(RUN / "pictures" / record["image"]) as file:
        return file.convert("RGB")


def name_pictures(model: Any, processor: Any, images: list[Image.Image], names: list[str]) -> list[str]:
    """The likeliest of all names for each picture, by its log-probability up to the end token."""
    tokenizer = processor.tokenizer
    answers = tokenizer([f"{name}{tokenizer.eos_token}" for name in names], add_special_tokens=False).input_ids
    prompts = tqdm([make_prompt(NAME, image) for image in images], desc="Naming")
    read_ones = (read_prompt(model, encode_prompts(processor, [prompt]).to(model.device)) for prompt in prompts)
    return [names[likeliest(model, prompt, answers)] for prompt in read_ones]


def score(artist: str, question: str, seen: str, given: list[str], right: list[str]) -> Record:
    """A row of the results: the share of right answers, with its 95% interval over drawings (Wilson's)."""
    hits = sum(answer == wanted for answer, wanted in zip(given, right, strict=True))
    interval = binomtest(hits, len(right)).proportion_ci(method="wilson")
    found = {"share": hits / len(right), "low": interval.low, "high": interval.high, "n": len(right)}
    return {"artist": artist, "question": question, "seen": seen} | found


def ask_about(model: Any, processor: Any, records: list[Record], names: list[str]) -> tuple[list[Record], list[str]]:
    """Results on one artist's drawings, and the free answers; each also with a blank, and with another's picture."""
    artist, images, draw = records[0]["set"], [open_picture(record) for record in records], random.Random(0)
    with_blank = [*images, Image.new("RGB", images[0].size, "white")]
    # Whose answers a drawing is given, to see what guessing would score.
    others = [(number + draw.randrange(1, len(records))) % len(records) for number in range(len(records))]
    given = {
        ("likeliest of all names", "name"): name_pictures(model, processor, with_blank, names),
        ("free answer, exact", "name"): answer_prompts(
            model, processor, [make_prompt(NAME, image) for image in with_blank], "free"
        ),
        ("group", "group"): answer_prompts(
            model, processor, [make_prompt(GROUP, image) for image in with_blank], "group"
        ),
    }
    results = []
    for (question, field), (*answers, of_blank) in given.items():
        right = [record[field] for record in records]
        of_others = [answers[other] for other in others]
        results.append(score(artist, question, "the drawing", answers, right))
        results.append(score(artist, question, "another drawing", of_others, right))
        results.append(score(artist, question, "a blank", [of_blank] * len(right), right) | {"answer": of_blank})
    # Every second drawing is asked for what it shows, the others for something else.
    shown = [
        record["name"] if number % 2 else draw.choice([name for name in names if name != record["name"]])
        for number, record in enumerate(records)
    ]
    asked = [make_prompt(THERE.format(name), image) for name, image in zip(shown, images, strict=True)]
    right = ["yes" if number % 2 else "no" for number in range(len(records))]
    said = answer_prompts(model, processor, asked, "is it there?")
    results.append(score(artist, "is it there? (for half)", "the drawing", said, right))
    return results, given["free answer, exact", "name"][:-1]


@torch.no_grad()
def encoder_alone(records: list[Record]) -> list[Record]:
    """Results of linear probes of the untrained encoder's features, fitted to the drawings that are trained on."""
    encoder = AutoModel.from_pretrained(RUN / "vision").eval()
    image_processor = AutoImageProcessor.from_pretrained(RUN / "vision")
    states = []
    for start in tqdm(range(0, len(records), 64), desc="The encoder alone"):
        pixels = image_processor([open_picture(record) for record in records[start : start + 64]], return_tensors="pt")
        states.append(encoder(**pixels, output_hidden_states=True).hidden_states[-1])
    tokens, labels = torch.cat(states), np.array([record["name"] for record in records])
    of_set = np.array([record["set"] for record in records])
    trained, results = ~np.isin(of_set, list(HELD_OUT)), []
    for part, values in (("patches", tokens[:, 1:].mean(dim=1).numpy()), ("CLS", tokens[:, 0].numpy())):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=100))
        probe.fit(values[trained], labels[trained])
        for artist in HELD_OUT:
            given, right = probe.predict(values[of_set == artist]), labels[of_set == artist]
            results.append(score(artist, f"linear probe, {part}", "the encoder alone", list(given), list(right)))
    return results


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """On what scikit-learn says of three data sets, in pieces of 512 tokens: text that nothing here trained on."""
    text = "\n".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device).input_ids[0].split(512)[:-1]
    return float(np.exp(np.mean([model(input_ids=piece[None], labels=piece[None]).loss.item() for piece in ids])))


def evaluate_text(model: Any, processor: Any) -> dict[str, Any]:
    """Perplexity, and answers to plain questions, of the language model before training and of the trained model."""
    before = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    questions = Path(__file__).with_name("questions.txt").read_text(encoding="utf-8").splitlines()
    prompts = [make_prompt(question) for question in questions]
    return {
        "perplexity": {"before": perplexity(before, tokenizer), "after": perplexity(model, tokenizer)},
        "questions": questions,
        "before": answer_prompts(before, tokenizer, prompts, "before", 24),
        "after": answer_prompts(model, processor, prompts, "after", 24),
    }


def render(results: list[Record]) -> str:
    """The table that the command prints: percent right, 95% intervals over drawings."""
    table = pd.DataFrame(results)
    percent = 100 * table[["share", "low", "high"]]
    table["right"] = [f"{share:.1f} ({low:.1f} to {high:.1f})" for share, low, high in percent.to_numpy()]
    return table.set_index(["question", "seen", "artist"])["right"].unstack(sort=False).to_string()


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = RUN / "stage2"
    records = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    names = sorted({record["name"] for record in records})
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    results = []
    for artist in HELD_OUT:
        asked = [record for record in records if record["set"] == artist]
        of_artist, free = ask_about(model, processor, asked, names)
        results += of_artist
        if artist == "twemoji":
            chosen = random.Random(0).sample(list(zip(asked, free, strict=True)), 8)
            images = [open_picture(row) for row, _ in chosen]
            mistakes = ["" if given == row["name"] else f"it is: {row['name']}" for row, given in chosen]
            draw_answers(images, [f"“{given}”" for _, given in chosen], mistakes, folder / "answers.png", CREDIT)
    results += encoder_alone(records)
    text = evaluate_text(model, processor)
    logger.info("%s", render(results))
    logger.info("perplexity of other text: %(before).2f before, %(after).2f after", text["perplexity"])
    (folder / "report.json").write_text(json.dumps({"results": results, "text": text}, indent=1), encoding="utf-8")
    record_scores(folder, COMMAND, [
        {"task": row["question"], "dataset": row["artist"], "split": "held out", "value": row["share"], "n": row["n"]}
        for row in results if row["seen"] == "the drawing"
    ])  # fmt: skip


if __name__ == "__main__":
    main()
