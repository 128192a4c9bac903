"""Asks the real model about every drawing by two artists who were held out, and prints how often it is right.

    python -m examples.emoji.evaluate

Beside the model stands what its vision encoder alone knows of the same drawings. Writes report.json and answers.png
below `runs/emoji`, and the main results into the model's evaluation.json, for its card.
"""

import json
import logging
import random
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
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

from conversations.files import weights_fingerprint
from diagnostics.answers import answer, ask, encode, likeliest
from evaluation.record import Evaluation, write_evaluations
from examples.emoji.parts import RUN
from examples.emoji.pictures import HELD_OUT
from examples.emoji.rows import GROUP, NAME, THERE


logger = logging.getLogger(__name__)

MODEL = RUN / "stage2"
COMMAND = "python -m examples.emoji.evaluate"
CREDIT = "Drawings: Twemoji, © Twitter, Inc. and other contributors, CC BY 4.0. Chosen by lot."
PLAIN_QUESTIONS = [
    "What is the capital of France?", "How many days are in a week?", "What is 2 plus 3?", "Who wrote Hamlet?",
    "What is the opposite of hot?", "What do bees make?", "Which planet is known as the red planet?",
    "What is water made of?", "What color is the sky?", "In which country is Tokyo?", "What is the largest ocean?",
    "How many legs does a spider have?", "What is the first month of the year?", "What do you use to write?",
    "What is frozen water called?", "Name a fruit that is yellow.", "What language is spoken in Brazil?",
    "What is the past tense of go?", "What season comes after winter?", "What is ten minus four?",
]  # fmt: skip
Record = dict[str, Any]
Scores = dict[str, Record]


def open_picture(record: Record) -> Image.Image:
    """A drawing's pixels."""
    with Image.open(RUN / "pictures" / record["image"]) as file:
        return file.convert("RGB")


def name_pictures(model: Any, processor: Any, images: list[Image.Image], names: list[str]) -> list[str]:
    """The likeliest of all names for each picture."""
    answers = [
        processor.tokenizer(f"{name}{processor.tokenizer.eos_token}", add_special_tokens=False).input_ids
        for name in names
    ]
    prompts = tqdm([ask(NAME, image) for image in images], desc="Naming")
    return [names[likeliest(model, encode(processor, [prompt]), answers)] for prompt in prompts]


def score(given: list[str], right: list[str]) -> Record:
    """The share of right answers, with its 95% interval over drawings (Wilson's)."""
    hits = sum(answer == wanted for answer, wanted in zip(given, right, strict=True))
    interval = binomtest(hits, len(right)).proportion_ci(method="wilson")
    return {"share": hits / len(right), "low": interval.low, "high": interval.high, "n": len(right)}


def ask_about(model: Any, processor: Any, records: list[Record], names: list[str]) -> tuple[Scores, list[str]]:
    """Scores on one artist's drawings, and the free answers; each also with a blank, and with another's picture."""
    images, draw = [open_picture(record) for record in records], random.Random(0)
    with_blank = [*images, Image.new("RGB", images[0].size, "white")]
    # Whose answers a drawing is given, to see what guessing would score.
    others = [(number + draw.randrange(1, len(records))) % len(records) for number in range(len(records))]
    given = {
        ("likeliest of all names", "name"): name_pictures(model, processor, with_blank, names),
        ("free answer, exact", "name"): answer(model, processor, [ask(NAME, image) for image in with_blank], "free"),
        ("group", "group"): answer(model, processor, [ask(GROUP, image) for image in with_blank], "group"),
    }
    scores = {}
    for (label, field), (*answers, of_blank) in given.items():
        right = [record[field] for record in records]
        scores[label] = score(answers, right)
        scores[f"  with another's picture ({label})"] = score([answers[other] for other in others], right)
        scores[f"  with a blank: “{of_blank}” ({label})"] = score([of_blank] * len(right), right)
    # Every second drawing is asked for what it shows, the others for something else.
    shown = [
        record["name"] if number % 2 else draw.choice([name for name in names if name != record["name"]])
        for number, record in enumerate(records)
    ]
    asked = [ask(THERE.format(name), image) for name, image in zip(shown, images, strict=True)]
    right = ["yes" if number % 2 else "no" for number in range(len(records))]
    scores["is it there? (it is for half)"] = score(answer(model, processor, asked, "is it there?"), right)
    return scores, given["free answer, exact", "name"][:-1]


@torch.no_grad()
def encoder_alone(records: list[Record]) -> dict[str, dict[str, float]]:
    """What the untrained encoder's features tell of held-out drawings: the name of the nearest training drawing, and a
    linear probe's. Shares by artist and method."""
    encoder = AutoModel.from_pretrained(RUN / "vision").eval()
    image_processor = AutoImageProcessor.from_pretrained(RUN / "vision")
    states = []
    for start in tqdm(range(0, len(records), 64), desc="The encoder alone"):
        pixels = image_processor([open_picture(record) for record in records[start : start + 64]], return_tensors="pt")
        states.append(encoder(**pixels, output_hidden_states=True).hidden_states[-1])
    tokens, labels = torch.cat(states), np.array([record["name"] for record in records])
    of_set = np.array([record["set"] for record in records])
    trained = ~np.isin(of_set, list(HELD_OUT))
    shares: dict[str, dict[str, float]] = {held_out: {} for held_out in HELD_OUT}
    for part, values in (("CLS", tokens[:, 0].numpy()), ("patches", tokens[:, 1:].mean(dim=1).numpy())):
        near = KNeighborsClassifier(1, metric="cosine")
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=100))
        for method, classifier in (("nearest drawing", near), ("linear probe", probe)):
            classifier.fit(values[trained], labels[trained])
            for held_out in HELD_OUT:
                asked = of_set == held_out
                shares[held_out][f"{method}, {part}"] = classifier.score(values[asked], labels[asked])
    return shares


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """On what scikit-learn says of three data sets, in pieces of 512 tokens: text that nothing here trained on."""
    text = "\n".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine))
    pieces = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0].split(512)[:-1]
    return float(np.exp(np.mean([model(input_ids=piece[None], labels=piece[None]).loss.item() for piece in pieces])))


def draw_answers(images: list[Image.Image], names: list[str], answers: list[str], path: Path) -> None:
    """Eight drawings with what the model says of them; wrong answers are red."""
    figure, axes = plt.subplots(2, 4, figsize=(9, 5.6))
    for axis, image, name, text in zip(axes.flat, images, names, answers, strict=True):
        axis.imshow(image)
        axis.set_title(f"“{text}”", color="black" if text == name else "firebrick")
        axis.set_xlabel("" if text == name else f"it is: {name}", color="firebrick")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.text(0.5, 0.01, CREDIT, ha="center", fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def render(scores: dict[str, Scores], alone: dict[str, dict[str, float]]) -> str:
    """The table that the command prints."""
    lines = ["% right (95% interval over drawings)".ljust(56) + "".join(f"{name:>24}" for name in scores)]
    for measures in zip(*(of_set.items() for of_set in scores.values()), strict=True):
        cells = [f"{100 * s['share']:.1f} ({100 * s['low']:.1f} to {100 * s['high']:.1f})" for _, s in measures]
        lines.append(measures[0][0].ljust(56) + "".join(f"{cell:>24}" for cell in cells))
    lines.append("the vision encoder alone, before training")
    for method in next(iter(alone.values())):
        lines.append(f"  {method}".ljust(56) + "".join(f"{100 * shares[method]:24.1f}" for shares in alone.values()))
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    records = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    names = sorted({record["name"] for record in records})
    model = AutoModelForImageTextToText.from_pretrained(MODEL, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(MODEL, trust_remote_code=True)
    language_model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    scores, weights = {}, weights_fingerprint(MODEL)
    for held_out in HELD_OUT:
        asked = [record for record in records if record["set"] == held_out]
        scores[held_out], free = ask_about(model, processor, asked, names)
        if held_out == "twemoji":
            chosen = random.Random(0).sample(list(zip(asked, free, strict=True)), 8)
            images, right = [open_picture(row) for row, _ in chosen], [row["name"] for row, _ in chosen]
            draw_answers(images, right, [text for _, text in chosen], RUN / "answers.png")
    alone = encoder_alone(records)
    prompts, tokenizer = [ask(question) for question in PLAIN_QUESTIONS], AutoTokenizer.from_pretrained(RUN / "text")
    tokenizer.padding_side = "left"
    text: dict[str, Any] = {
        "perplexity": [perplexity(one, tokenizer) for one in (language_model, model)],
        "questions": PLAIN_QUESTIONS,
        "before": answer(language_model, tokenizer, prompts, "before", 24),
        "after": answer(model, processor, prompts, "after", 24),
    }
    logger.info("%s", render(scores, alone))
    logger.info("perplexity of other text: %.2f before, %.2f after", *text["perplexity"])
    report = {"scores": scores, "encoder alone": alone, "text": text}
    (RUN / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    rows = [
        Evaluation(
            task=label, dataset=held_out, split="held out", metric="exact_match", value=result["share"], n=result["n"],
            standard_error=(result["share"] * (1 - result["share"]) / result["n"]) ** 0.5, command=COMMAND,
            weights=weights,
        )
        for held_out, of_set in scores.items() for label, result in of_set.items() if not label.startswith(" ")
    ]  # fmt: skip
    write_evaluations(MODEL, rows, lambda row: row.get("command") == COMMAND)


if __name__ == "__main__":
    main()
