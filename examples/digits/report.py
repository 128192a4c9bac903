"""Evaluates the quickstart's model: its answers about unseen digits, and the norms of tokens through training.

    python examples/digits/report.py --run_dir runs/digits

The results are printed as tables, and written into `report.json`, `answers.png` and `norms.png` in the run's folder.
The trained model is loaded as a user would load it: by the auto classes, with `trust_remote_code`.
"""

import argparse
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from normllava.command_line import command, parse

import matplotlib.pyplot as plt
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from examples.digits.scenes import CHANCE, QUESTIONS_PER_TEST_SCENE, make_picture_turns
from examples.results import draw_answers, record_scores
from normllava.diagnostics import measure
from normllava.diagnostics.answers import Prompt, answer_prompts, make_prompt
from normllava.diagnostics.loading import load_model
from normllava.diagnostics.plots import draw_overview, save_figure
from normllava.diagnostics.table import Summary
from normllava.parts import THIRDS


logger = logging.getLogger(__name__)

PROBE_SIZE = 64  # pictures of the probe, the rows on which norms are measured
COMMAND = "python examples/digits/report.py --run_dir runs/digits"  # recorded with the scores
# Names of the rows of the printed table, which are also keys in report.json.
ABOUT_PICTURES = "image questions"
ABOUT_TEXT = "text-only questions"
LANGUAGE_MODEL = "language model before (ceiling)"
GUESSING = "guessing"
# The composed model without the norm layer behind its projector.
WITHOUT_NORM = "composed, norm taken out"
# The models whose norms are measured, and their folders.
MODELS = {
    WITHOUT_NORM: "composed",
    "composed": "composed",
    "after stage 1": "stage1",
    "after stage 2": "stage2",
}
# Shares of exact matches: one for each kind of question, and `all` for all questions together. A further key,
# `standard_error`, has the standard error of `all`.
Shares = dict[str, float]


@dataclass(frozen=True)
class SceneQuestion:
    """A question about a scene, with its answer and with the scene itself."""

    question: str
    answer: str
    kind: str
    """A key of `CHANCE`: what the question asks for."""
    image: Path
    """The file of the scene's picture."""
    description: str
    """The scene in words."""


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True, help="folder of the quickstart's run")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the run, and write and print the results."""
    plt.switch_backend("agg")  # which needs no screen
    run_dir = parse(build_parser(), argv).run_dir
    questions = load_scene_questions(run_dir / "data")
    shares, answers = evaluate_run(run_dir, questions)
    probe = run_dir / "data" / "probe.json"
    write_probe(questions, probe)
    summaries = measure_run(run_dir, probe)

    record_shares(run_dir / "stage2", shares, len(questions))
    draw_examples(questions, answers, run_dir / "answers.png")
    # The figure leaves out the model after stage 1, so that it shows what training as a whole changes.
    drawn_summaries = {label: summary for label, summary in summaries.items() if label != "after stage 1"}
    save_figure(draw_overview(drawn_summaries), run_dir / "norms.png")
    norms = {label: summary.rows for label, summary in summaries.items()}
    report = {"questions": len(questions), "accuracy": shares, "norms": norms}
    (run_dir / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    logger.info("%s\n\n%s", render_shares(shares, len(questions)), render_norms(summaries))


def load_scene_questions(data_dir: Path) -> list[SceneQuestion]:
    """The questions about the test's scenes."""
    scenes = json.loads((data_dir / "test.json").read_text(encoding="utf-8"))
    questions = []
    for scene in scenes:
        for entry in scene["questions"]:
            question = SceneQuestion(
                question=entry["question"],
                answer=entry["answer"],
                kind=entry["kind"],
                image=data_dir / scene["image"],
                description=scene["description"],
            )
            questions.append(question)
    return questions


# Answers


def evaluate_run(run_dir: Path, questions: list[SceneQuestion]) -> tuple[dict[str, Shares], list[str]]:
    """Ask the trained model all questions, once about pictures and once about descriptions.

    The language model as it was before composing is asked about descriptions too. Its share of right answers is a
    ceiling for the trained model, because a description says in words what a picture shows.

    Returns:
        The shares of right answers: for each row of the printed table, guessing included.
        The trained model's answers about pictures.
    """
    folder = run_dir / "stage2"
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    language_model = AutoModelForCausalLM.from_pretrained(run_dir / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "text", padding_side="left")

    image_prompts = [make_image_prompt(question) for question in questions]
    text_prompts = [make_text_prompt(question) for question in questions]
    image_answers = answer_prompts(model, processor, image_prompts, title="Answering about pictures")
    text_answers = answer_prompts(model, processor, text_prompts, title="Answering about descriptions")
    ceiling_answers = answer_prompts(language_model, tokenizer, text_prompts, title="The language model alone")

    chance = sum(CHANCE[question.kind] for question in questions) / len(questions)
    shares = {
        ABOUT_PICTURES: share_right(questions, image_answers),
        ABOUT_TEXT: share_right(questions, text_answers),
        LANGUAGE_MODEL: share_right(questions, ceiling_answers),
        GUESSING: {**CHANCE, "all": chance},
    }
    return shares, image_answers


def make_image_prompt(question: SceneQuestion) -> Prompt:
    """The question about the scene's picture, as a conversation."""
    with Image.open(question.image) as file:
        return make_prompt(question.question, file.convert("RGB"))


def make_text_prompt(question: SceneQuestion) -> Prompt:
    """The question about the scene's description, as a conversation."""
    return make_prompt(f"{question.description}\n{question.question}")


def share_right(questions: list[SceneQuestion], answers: list[str]) -> Shares:
    """The shares of answers that match exactly.

    If all answers are right, or all are wrong, there is no `standard_error`. An error of 0 would claim that the share
    is certain.
    """
    hits_by_kind: defaultdict[str, list[bool]] = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        is_right = answer == question.answer
        hits_by_kind[question.kind].append(is_right)
        hits_by_kind["all"].append(is_right)

    shares = {kind: sum(hits) / len(hits) for kind, hits in sorted(hits_by_kind.items())}
    error = sqrt(shares["all"] * (1 - shares["all"]) / len(questions))
    if error > 0:
        shares["standard_error"] = error
    return shares


def record_shares(folder: Path, shares: dict[str, Shares], num_questions: int) -> None:
    """Write the trained model's shares of right answers into its evaluation.json."""
    rows = []
    for task in (ABOUT_PICTURES, ABOUT_TEXT):
        rows.append({
            "task": task,
            "dataset": "digits-quickstart",
            "split": "test",
            "n": num_questions,
            "value": shares[task]["all"],
            "baseline": shares[GUESSING]["all"],
            "baseline_name": GUESSING,
        })  # fmt: skip
    record_scores(folder, COMMAND, rows)


def draw_examples(questions: list[SceneQuestion], answers: list[str], path: Path) -> None:
    """Write a figure of eight pictures, each with a question and the model's answer.

    The pictures are those of the first eight scenes, each with its first question. But if the model answered
    questions wrongly, the first such question takes the last place, with its picture.
    """
    # A scene's questions follow each other, so these are the numbers of the first questions of the first eight scenes.
    chosen = [QUESTIONS_PER_TEST_SCENE * scene for scene in range(8)]
    wrong_numbers = [number for number, question in enumerate(questions) if answers[number] != question.answer]
    if wrong_numbers:
        chosen[-1] = wrong_numbers[0]

    images = []
    titles = []
    mistakes = []
    for number in chosen:
        question = questions[number]
        images.append(Image.open(question.image))
        titles.append(f"{question.question}\n{answers[number]}")
        mistakes.append(f"right: {question.answer}" if number in wrong_numbers else "")
    draw_answers(images, titles, mistakes, path)


# Norms


def write_probe(questions: list[SceneQuestion], path: Path) -> None:
    """Write rows for the diagnostics: the first `PROBE_SIZE` pictures, each with its first question."""
    first_questions: dict[Path, SceneQuestion] = {}
    for question in questions:
        if question.image not in first_questions:
            first_questions[question.image] = question

    rows = []
    for image in sorted(first_questions)[:PROBE_SIZE]:
        question = first_questions[image]
        turns = make_picture_turns(question.question, question.answer)
        rows.append({"image": str(image.relative_to(path.parent)), "conversations": turns})
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def measure_run(run_dir: Path, probe: Path) -> dict[str, Summary]:
    """For each of `MODELS`, measure the norms of tokens, and how far layers turn the tokens.

    Args:
        run_dir: Folder of the quickstart's run.
        probe: The file that `write_probe` wrote.

    Returns:
        A summary of the measures for each model, by the model's name in `MODELS`.
    """
    summaries = {}
    for label, folder in MODELS.items():
        model, processor = load_model(str(run_dir / folder))
        if label == WITHOUT_NORM:
            model.model.multi_modal_projector.norm = torch.nn.Identity()
        # `layers=[]` leaves out the measures of attention and keys, which the tables don't show.
        measured = measure(model, processor, probe, label, num_samples=PROBE_SIZE, layers=[])
        (model_report,) = measured.report.models  # one model was measured
        summaries[label] = model_report.summary
    return summaries


# The tables that the quickstart prints


def render_shares(shares: dict[str, Shares], num_questions: int) -> str:
    """The table of right answers in percent: a column for all questions, then a column for each kind."""
    header = f"{'':34}{'all':>16}"
    for kind in CHANCE:
        header += f"{kind:>9}"
    lines = [f"Exact match on {num_questions} held-out questions, ± one standard error", header]

    for name, row in shares.items():
        total = f"{100 * row['all']:.1f}%"
        if "standard_error" in row:
            total += f" ± {100 * row['standard_error']:.1f}"
        line = f"{name:34}{total:>16}"
        for kind in CHANCE:
            line += f"{100 * row[kind]:8.1f}%"
        lines.append(line)
    return "\n".join(lines)


def render_norms(summaries: dict[str, Summary]) -> str:
    """The table of norms: a row for each model.

    The columns are the mean norms of image tokens and of text tokens where they enter the decoder, the ratio of these
    norms, and the gap of cosines in each third of the decoder's layers. A cosine compares a token before a layer with
    the same token after the layer. The gap is the mean cosine of image tokens less the mean cosine of text tokens. If
    the gap is above 0, layers turn image tokens less than text tokens.
    """
    title = f"{'':26}{'norm of tokens at the decoder':>31}{'gap of cosines, image - text':>36}"
    header = f"{'':26}{'image':>10}{'text':>10}{'ratio':>11}"
    for third in THIRDS:
        header += f"{third:>14}"
    lines = [title, header]

    for label, summary in summaries.items():
        image_norm = mean_or_nan(summary, "at_decoder", "image")
        text_norm = mean_or_nan(summary, "at_decoder", "text")
        ratio = mean_or_nan(summary, "ratio")
        line = f"{label:26}{image_norm:10.3f}{text_norm:10.3f}{ratio:10.2f}x"
        for third in THIRDS:
            gap = mean_or_nan(summary, f"gap, {third}")
            line += f"{gap:14.3f}"
        lines.append(line)
    return "\n".join(lines)


def mean_or_nan(summary: Summary, measure_name: str, modality: str = "") -> float:
    """The mean of a measure; NaN if the summary doesn't have this measure."""
    estimate = summary.look(measure_name, modality)
    if estimate is None:
        return float("nan")
    return estimate.mean


if __name__ == "__main__":
    main()
