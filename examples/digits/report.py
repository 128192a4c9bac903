"""Evaluates the quickstart's model: its answers about unseen digits, and the norms of tokens through training.

    python examples/digits/report.py --run_dir runs/digits

The checkpoints are loaded as a user would load them: by the auto classes, with `trust_remote_code`. The results are
printed as tables, and written into `report.json`, `answers.png` and `norms.png`.
"""

import argparse
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image
from scenes import CHANCE, QUESTIONS_PER_TEST_SCENE, ask
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from common.console import command, parse
from diagnostics import measure
from diagnostics.answers import Prompt, answer_prompts, make_prompt
from diagnostics.loading import load_model
from diagnostics.parts import THIRDS
from diagnostics.plots import draw_overview, save_figure
from diagnostics.table import Summary
from examples.results import draw_answers, record_scores


logger = logging.getLogger(__name__)

PROBE_SIZE = 64  # pictures on which norms are measured
COMMAND = "python examples/digits/report.py --run_dir runs/digits"
# The rows of the printed table, and the keys of report.json.
ABOUT_PICTURES = "image questions"
ABOUT_TEXT = "text-only questions"
LANGUAGE_MODEL = "language model before (ceiling)"
GUESSING = "guessing"
# The models whose norms are measured, and their folders.
WITHOUT_NORM = "composed, norm taken out"
MODELS = {
    WITHOUT_NORM: "composed",
    "composed": "composed",
    "after stage 1": "stage1",
    "after stage 2": "stage2",
}
# The share of exact matches by kind of question, and of all questions as `all`. `standard_error` is that of `all`.
Shares = dict[str, float]


@dataclass(frozen=True)
class SceneQuestion:
    """A question about a scene, its answer and kind, and the scene as a picture and in words."""

    question: str
    answer: str
    kind: str
    image: Path
    description: str


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True, help="folder of the quickstart's run")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    plt.switch_backend("agg")
    run_dir = parse(build_parser(), argv).run_dir
    questions = load_scene_questions(run_dir / "data")
    shares, answers = evaluate_run(run_dir, questions)
    probe = run_dir / "data" / "probe.json"
    write_probe(questions, probe)
    summaries = measure_run(run_dir, probe)

    record_shares(run_dir / "stage2", shares, len(questions))
    draw_some(questions, answers, run_dir / "answers.png")
    # Without the model after stage 1, the figure shows what training as a whole changes.
    drawn = {label: summary for label, summary in summaries.items() if label != "after stage 1"}
    save_figure(draw_overview(drawn), run_dir / "norms.png")
    norms = {label: summary.rows for label, summary in summaries.items()}
    report = {"questions": len(questions), "accuracy": shares, "norms": norms}
    (run_dir / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    logger.info("%s\n\n%s", render_shares(shares, len(questions)), render_norms(summaries))


def load_scene_questions(data_dir: Path, split: str = "test") -> list[SceneQuestion]:
    """The questions of a split."""
    scenes = json.loads((data_dir / f"{split}.json").read_text(encoding="utf-8"))
    questions = []
    for scene in scenes:
        for question in scene["questions"]:
            image = data_dir / scene["image"]
            questions.append(SceneQuestion(**question, image=image, description=scene["description"]))
    return questions


# Answers


def evaluate_run(run_dir: Path, questions: list[SceneQuestion]) -> tuple[dict[str, Shares], list[str]]:
    """Ask the trained model all questions about pictures and about descriptions.

    Returns:
        The shares of right answers, with those of the language model before composing and of guessing to compare; and
        the trained model's answers about pictures.
    """
    folder = run_dir / "stage2"
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    language_model = AutoModelForCausalLM.from_pretrained(run_dir / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "text", padding_side="left")

    image_prompts = [make_image_prompt(question) for question in questions]
    text_prompts = [make_text_prompt(question) for question in questions]
    image_answers = answer_prompts(model, processor, image_prompts, "Answering about pictures")
    text_answers = answer_prompts(model, processor, text_prompts, "Answering about descriptions")
    ceiling_answers = answer_prompts(language_model, tokenizer, text_prompts, "The language model alone")

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
    """The shares of exact matches. The standard error is left out if all answers are right, or all are wrong."""
    is_right: defaultdict[str, list[bool]] = defaultdict(list)
    for question, given in zip(questions, answers, strict=True):
        for kind in (question.kind, "all"):
            is_right[kind].append(given == question.answer)

    shares = {kind: sum(hits) / len(hits) for kind, hits in sorted(is_right.items())}
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


def draw_some(questions: list[SceneQuestion], answers: list[str], path: Path) -> None:
    """Draw eight pictures with a question and the model's answer.

    They are the first questions about the first seven scenes, and the first question with a wrong answer. If there is
    no wrong answer, the last one is about the eighth scene.
    """
    wrong = [number for number, question in enumerate(questions) if answers[number] != question.answer]
    first_of_scenes = range(0, 8 * QUESTIONS_PER_TEST_SCENE, QUESTIONS_PER_TEST_SCENE)
    chosen = list(first_of_scenes[:7])
    chosen.append(wrong[0] if wrong else first_of_scenes[7])

    images = []
    titles = []
    mistakes = []
    for number in chosen:
        question = questions[number]
        images.append(Image.open(question.image))
        titles.append(f"{question.question}\n{answers[number]}")
        mistakes.append(f"right: {question.answer}" if number in wrong else "")
    draw_answers(images, titles, mistakes, path)


# Norms


def write_probe(questions: list[SceneQuestion], path: Path) -> None:
    """Write rows for the diagnostics: the first `PROBE_SIZE` pictures, each with its first question."""
    first_questions: dict[Path, SceneQuestion] = {}
    for question in questions:
        first_questions.setdefault(question.image, question)

    rows = []
    for image in sorted(first_questions)[:PROBE_SIZE]:
        question = first_questions[image]
        turns = ask(question.question, question.answer)
        rows.append({"image": str(image.relative_to(path.parent)), "conversations": turns})
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def measure_run(run_dir: Path, probe: Path) -> dict[str, Summary]:
    """Measure norms and turning of tokens on the probe, for each of `MODELS`."""
    summaries = {}
    for label, folder in MODELS.items():
        model, processor = load_model(str(run_dir / folder))
        if label == WITHOUT_NORM:
            model.model.multi_modal_projector.norm = torch.nn.Identity()
        report = measure(model, processor, probe, label, num_samples=PROBE_SIZE, layers=[]).report
        (model_report,) = report.models
        summaries[label] = model_report.summary
    return summaries


# The tables that the quickstart prints


def render_shares(shares: dict[str, Shares], num_questions: int) -> str:
    """The table of right answers in percent."""
    header = " " * 34 + f"{'all':>16}" + "".join(f"{kind:>9}" for kind in CHANCE)
    lines = [f"Exact match on {num_questions} held-out questions, ± one standard error", header]
    for name, row in shares.items():
        total = f"{100 * row['all']:.1f}%"
        if "standard_error" in row:
            total += f" ± {100 * row['standard_error']:.1f}"
        by_kind = "".join(f"{100 * row[kind]:8.1f}%" for kind in CHANCE)
        lines.append(f"{name:34}{total:>16}{by_kind}")
    return "\n".join(lines)


def render_norms(summaries: dict[str, Summary]) -> str:
    """The table of norms.

    It has the norms of tokens at the decoder's entrance and, for each third of its layers, the gap of cosines that the
    diagnostics measure.
    """
    lines = [f"{'':26}{'norm of tokens at the decoder':>31}{'gap of cosines, visual - text':>36}"]
    lines.append(f"{'':26}{'visual':>10}{'text':>10}{'ratio':>11}" + "".join(f"{third:>14}" for third in THIRDS))
    for label, summary in summaries.items():
        visual = mean_or_nan(summary, "at_decoder", "visual")
        text = mean_or_nan(summary, "at_decoder", "text")
        ratio = mean_or_nan(summary, "ratio")
        gaps = [mean_or_nan(summary, f"gap, {third}") for third in THIRDS]
        lines.append(f"{label:26}{visual:10.3f}{text:10.3f}{ratio:10.2f}x" + "".join(f"{gap:14.3f}" for gap in gaps))
    return "\n".join(lines)


def mean_or_nan(summary: Summary, *place: str) -> float:
    """The mean of a measure; NaN if the model doesn't have this measure."""
    estimate = summary.look(*place)
    return estimate.mean if estimate else float("nan")


if __name__ == "__main__":
    main()
