"""Asks the emoji example's model about all drawings by two artists, and prints how often its answers are right.

    python -m examples.emoji.evaluate

The two artists are held out: the model wasn't trained on their drawings. For comparison, linear probes on the features
of the vision encoder alone are tested on the same drawings. The command writes report.json and answers.png into the
model's folder. The main results also go into the folder's evaluation.json, from which the model's card is made.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

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

from examples.emoji.parts import RUN
from examples.emoji.pictures import ASK_GROUP, ASK_NAME, ASK_WHETHER_THERE, HELD_OUT, Record, choose_other_name
from examples.results import draw_answers, record_scores
from normllava.diagnostics.answers import answer_prompts, encode_prompts, likeliest, make_prompt, read_prompt


logger = logging.getLogger(__name__)

COMMAND = "python -m examples.emoji.evaluate"  # recorded with the results
CREDIT = "Drawings: Twemoji, © Twitter, Inc. and other contributors, CC BY 4.0. Chosen by lot."
QUESTIONS = Path(__file__).with_name("questions.txt")
ENCODER_BATCH = 64  # pictures that the vision encoder takes at once
NAMING_BATCH = 32  # pictures that the model names at once
# The artist whose drawings are shown on the figure.
FIGURE_ARTIST = "twemoji"
# What the model saw when it was asked about a drawing. These are values of the field `seen` in report.json.
OWN_DRAWING = "the drawing"
OTHER_DRAWING = "another drawing"
BLANK = "a blank"
Result = dict[str, Any]  # a share of right answers, as `score` returns it


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the model, and write and print the results."""
    parse(build_parser(), argv)
    folder = RUN / "stage2"  # of the model
    records = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    names = sorted({record["name"] for record in records})
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)

    results: list[Result] = []
    for artist in HELD_OUT:
        drawings = [record for record in records if record["set"] == artist]
        artist_results, free_answers = ask_about_drawings(model, processor, drawings, names)
        results += artist_results
        if artist == FIGURE_ARTIST:
            draw_examples(drawings, free_answers, folder / "answers.png")
    results += probe_encoder(records)
    text = evaluate_text(model, processor)

    logger.info("%s", render(results))
    perplexities = text["perplexity"]
    logger.info("perplexity of other text: %.2f before, %.2f after", perplexities["before"], perplexities["after"])
    (folder / "report.json").write_text(json.dumps({"results": results, "text": text}, indent=1), encoding="utf-8")
    record_results(folder, results)


def record_results(folder: Path, results: Sequence[Result]) -> None:
    """Write the results of the model's answers into its evaluation.json. Guesses and probes are left out."""
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


def draw_examples(drawings: Sequence[Record], answers: Sequence[str], path: Path) -> None:
    """Write a figure of eight drawings, chosen at random, with the model's answers."""
    drawings_and_answers = list(zip(drawings, answers, strict=True))
    images = []
    titles = []
    mistakes = []
    for drawing, answer in random.Random(0).sample(drawings_and_answers, 8):
        is_right = answer == drawing["name"]
        images.append(open_picture(drawing))
        titles.append(f"“{answer}”")
        mistakes.append("" if is_right else f"it is: {drawing['name']}")
    draw_answers(images, titles, mistakes, path, CREDIT)


def open_picture(drawing: Record) -> Image.Image:
    """The picture of a drawing."""
    with Image.open(RUN / "pictures" / drawing["image"]) as file:
        return file.convert("RGB")


# The model


def ask_about_drawings(
    model: Any, processor: Any, drawings: list[Record], names: list[str]
) -> tuple[list[Result], list[str]]:
    """Ask what each drawing of an artist is, what group it belongs to, and whether it shows a certain thing.

    The model says in two ways what a drawing is: by the likeliest of all names, and by a free answer.

    Returns:
        The results.
        The free answer for each drawing.
    """
    images = [open_picture(drawing) for drawing in drawings]
    blank = Image.new("RGB", images[0].size, "white")
    images_and_blank = [*images, blank]
    name_prompts = [make_prompt(ASK_NAME, image) for image in images_and_blank]
    group_prompts = [make_prompt(ASK_GROUP, image) for image in images_and_blank]

    # Each list of answers ends with the answer for the blank.
    likeliest_names = name_pictures(model, processor, images_and_blank, names)
    free_answers = answer_prompts(model, processor, name_prompts, title="free")
    groups = answer_prompts(model, processor, group_prompts, title="group")

    right_names = [drawing["name"] for drawing in drawings]
    right_groups = [drawing["group"] for drawing in drawings]
    artist = drawings[0]["set"]
    rng = random.Random(0)
    other_numbers = choose_others(len(drawings), rng)
    results = [
        *score_with_guesses(artist, "likeliest of all names", likeliest_names, right_names, other_numbers),
        *score_with_guesses(artist, "free answer, exact", free_answers, right_names, other_numbers),
        *score_with_guesses(artist, "group", groups, right_groups, other_numbers),
        ask_whether_there(model, processor, drawings, images, names, rng),
    ]
    answers_without_blank = free_answers[:-1]
    return results, answers_without_blank


def choose_others(num_drawings: int, rng: random.Random) -> list[int]:
    """For each drawing, the number of another drawing, chosen at random."""
    others = []
    for number in range(num_drawings):
        steps_ahead = rng.randrange(1, num_drawings)  # never so many that they lead back to the same drawing
        others.append((number + steps_ahead) % num_drawings)
    return others


def score_with_guesses(
    artist: str, question: str, answers: Sequence[str], right: Sequence[str], other_numbers: Sequence[int]
) -> list[Result]:
    """Score the answers to a question, and two kinds of guesses: answers to other drawings and to a blank.

    Args:
        artist: The artist of the drawings.
        question: Name of the question.
        answers: The model's answer for each drawing, and at the end its answer for a blank picture.
        right: The right answer for each drawing.
        other_numbers: For each drawing, the number of the drawing whose answer serves as a guess.

    Returns:
        The results of the model's answers, of the answers to other drawings, and of the answer to the blank.
    """
    *own_answers, blank_answer = answers
    other_answers = [own_answers[number] for number in other_numbers]
    blank_answers = [blank_answer] * len(right)
    own_result = score(artist, question, OWN_DRAWING, own_answers, right)
    other_result = score(artist, question, OTHER_DRAWING, other_answers, right)
    blank_result = score(artist, question, BLANK, blank_answers, right)
    blank_result["answer"] = blank_answer  # the same guess for all drawings
    return [own_result, other_result, blank_result]


def name_pictures(model: Any, processor: Any, images: list[Image.Image], names: list[str]) -> list[str]:
    """For each picture, the name that is the model's likeliest answer. An answer is a name and the end token."""
    tokenizer = processor.tokenizer
    answers = [f"{name}{tokenizer.eos_token}" for name in names]
    answer_ids = tokenizer(answers, add_special_tokens=False).input_ids

    chosen: list[str] = []
    for start in tqdm(range(0, len(images), NAMING_BATCH), desc="Naming"):
        # All prompts have the same length, since they have the same question and pictures of the same size.
        prompts = [make_prompt(ASK_NAME, image) for image in images[start : start + NAMING_BATCH]]
        inputs = encode_prompts(processor, prompts)
        prompt_state = read_prompt(model, inputs.to(model.device))
        chosen += [names[index] for index in likeliest(model, prompt_state, answer_ids)]
    return chosen


def ask_whether_there(
    model: Any,
    processor: Any,
    drawings: Sequence[Record],
    images: Sequence[Image.Image],
    names: Sequence[str],
    rng: random.Random,
) -> Result:
    """Ask about each drawing whether it shows a certain thing. For every second drawing, the right answer is yes."""
    prompts = []
    right = []
    for number, (drawing, image) in enumerate(zip(drawings, images, strict=True)):
        if number % 2 == 1:
            thing = drawing["name"]
            right.append("yes")
        else:
            thing = choose_other_name(drawing, names, rng)
            right.append("no")
        prompts.append(make_prompt(ASK_WHETHER_THERE.format(thing), image))
    answers = answer_prompts(model, processor, prompts, title="is it there?")
    return score(drawings[0]["set"], "is it there? (for half)", OWN_DRAWING, answers, right)


def score(artist: str, question: str, seen: str, answers: Sequence[str], right: Sequence[str]) -> Result:
    """The share of right answers, with Wilson's 95% interval over drawings. The other fields say what was asked."""
    hits = [answer == right_answer for answer, right_answer in zip(answers, right, strict=True)]
    interval = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    return {
        "artist": artist,
        "question": question,
        "seen": seen,
        "share": sum(hits) / len(hits),
        "low": interval.low,
        "high": interval.high,
        "n": len(hits),
    }


# The vision encoder alone


def probe_encoder(records: list[Record]) -> list[Result]:
    """The results of linear probes, which predict the name from features of the pretrained encoder.

    The probes are fitted to the drawings that the model is trained on, and tested on the held-out artists' drawings.
    """
    states = encode_pictures(records)
    features_by_kind = {
        "patches": states[:, 1:].mean(dim=1).numpy(),  # [num_drawings, width]
        "CLS": states[:, 0].numpy(),
    }
    names = np.array([record["name"] for record in records])
    artists = np.array([record["set"] for record in records])
    is_training_drawing = ~np.isin(artists, HELD_OUT)

    results = []
    for kind, features in features_by_kind.items():
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1))  # regularized more than by default
        probe.fit(features[is_training_drawing], names[is_training_drawing])
        for artist in HELD_OUT:
            is_by_artist = artists == artist
            predicted_names = probe.predict(features[is_by_artist])
            right_names = names[is_by_artist]
            question = f"linear probe, {kind}"
            results.append(score(artist, question, "the encoder alone", list(predicted_names), list(right_names)))
    return results


@torch.no_grad()
def encode_pictures(records: list[Record]) -> torch.Tensor:
    """The encoder's last hidden states of all drawings, `[num_drawings, 1 + num_patches, width]`; CLS comes first."""
    encoder = AutoModel.from_pretrained(RUN / "vision").eval()
    image_processor = AutoImageProcessor.from_pretrained(RUN / "vision")
    states = []
    for start in tqdm(range(0, len(records), ENCODER_BATCH), desc="The encoder alone"):
        images = [open_picture(record) for record in records[start : start + ENCODER_BATCH]]
        inputs = image_processor(images, return_tensors="pt")
        outputs = encoder(**inputs, output_hidden_states=True)
        states.append(outputs.hidden_states[-1])  # the layer from which the model's projector takes its features
    return torch.cat(states)


# The language model


def evaluate_text(model: Any, processor: Any) -> dict[str, Any]:
    """Test the model without pictures, and compare it with the language model before training.

    Returns:
        `perplexity`: the perplexity of text, `before` and `after` training.
        `questions`: the questions that are asked.
        `before` and `after`: the answers to these questions before and after training.
    """
    language_model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    prompts = [make_prompt(question) for question in questions]
    return {
        "perplexity": {"before": perplexity(language_model, tokenizer), "after": perplexity(model, tokenizer)},
        "questions": questions,
        "before": answer_prompts(language_model, tokenizer, prompts, title="before", max_new_tokens=24),
        "after": answer_prompts(model, processor, prompts, title="after", max_new_tokens=24),
    }


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """The perplexity of text that no model here is trained on: scikit-learn's descriptions of three data sets.

    The text is read in pieces of 512 tokens. A shorter piece at the end is left out.
    """
    descriptions = [load().DESCR for load in (load_breast_cancer, load_diabetes, load_wine)]
    inputs = tokenizer("\n".join(descriptions), return_tensors="pt", add_special_tokens=False).to(model.device)
    pieces = inputs.input_ids.split(512, dim=1)  # each [1, 512], but the last is shorter
    losses = [model(input_ids=piece, labels=piece).loss.item() for piece in pieces[:-1]]
    return float(np.exp(np.mean(losses)))


def render(results: list[Result]) -> str:
    """The printed table: percentages of right answers, with 95% intervals over drawings.

    There is a row for each question with each thing seen, and a column for each artist.
    """
    table = pd.DataFrame(results)
    percent = 100 * table[["share", "low", "high"]]
    table["right"] = [f"{share:.1f} ({low:.1f} to {high:.1f})" for share, low, high in percent.to_numpy()]
    right_by_artist = table.set_index(["question", "seen", "artist"])["right"].unstack(sort=False)
    return right_by_artist.to_string()


if __name__ == "__main__":
    main()
