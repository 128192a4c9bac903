"""Evaluates the quickstart's model: answers about unseen handwriting, and the norms before and after.

    python examples/digits/report.py --run_dir runs/digits

Loads the checkpoints as a user would, through the auto classes with `trust_remote_code`, prints a table, and
writes `report.json`, `answers.png` and `norms.png`.
"""

import argparse
import json
import logging
from collections import defaultdict
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image
from scenes import CHANCE, ask
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

PROBE_SIZE = 64
COMMAND = "python examples/digits/report.py --run_dir runs/digits"


@dataclass(frozen=True)
class SceneQuestion:
    """A question about a scene, its answer and kind, and the scene as a picture and in words."""

    question: str
    answer: str
    kind: str
    image: Path
    description: str


def load_scene_questions(data_dir: Path, split: str = "test") -> list[SceneQuestion]:
    """The questions of a split."""
    scenes = json.loads((data_dir / f"{split}.json").read_text(encoding="utf-8"))
    return [
        SceneQuestion(**question, image=data_dir / scene["image"], description=scene["description"])
        for scene in scenes
        for question in scene["questions"]
    ]


def accuracy(questions: list[SceneQuestion], answers: list[str]) -> dict[str, float]:
    """Share of exact matches by kind of question and over all, with the standard error of the latter: none where all
    answers are right, or all wrong."""
    hits: defaultdict[str, list[bool]] = defaultdict(list)
    for question, given in zip(questions, answers, strict=True):
        for kind in (question.kind, "all"):
            hits[kind].append(given == question.answer)
    scores = {kind: sum(found) / len(found) for kind, found in sorted(hits.items())}
    error = sqrt(scores["all"] * (1 - scores["all"]) / len(questions))
    return scores | ({"standard_error": error} if error else {})


def with_image(question: SceneQuestion) -> Prompt:
    """The question about the picture, as a conversation."""
    with Image.open(question.image) as file:  # else all pictures' files stay open until they are read
        return make_prompt(question.question, file.convert("RGB"))


def with_text(question: SceneQuestion) -> Prompt:
    """The question about the description, as a conversation."""
    return make_prompt(f"{question.description}\n{question.question}")


def evaluate_run(run_dir: Path, questions: list[SceneQuestion]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Accuracies of the trained model and of its language model before it saw pictures; the answers about pictures."""
    folder = run_dir / "stage2"
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    language_model = AutoModelForCausalLM.from_pretrained(run_dir / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "text", padding_side="left")

    image_prompts = [with_image(question) for question in questions]
    text_prompts = [with_text(question) for question in questions]
    image_answers = answer_prompts(model, processor, image_prompts, "Answering about pictures")
    text_answers = answer_prompts(model, processor, text_prompts, "Answering about descriptions")
    ceiling_answers = answer_prompts(language_model, tokenizer, text_prompts, "The language model alone")
    chance: dict[str, float] = {**CHANCE, "all": sum(CHANCE[question.kind] for question in questions) / len(questions)}
    return {
        "image questions": accuracy(questions, image_answers),
        "text-only questions": accuracy(questions, text_answers),
        "language model before (ceiling)": accuracy(questions, ceiling_answers),
        "guessing": chance,
    }, image_answers


def write_probe(questions: list[SceneQuestion], path: Path) -> None:
    """Write the first question about each of the first pictures in LLaVA's layout, for the diagnostics."""
    first = {question.image: question for question in reversed(questions)}
    rows = [
        {"image": str(row.image.relative_to(path.parent)), "conversations": ask(row.question, row.answer)}
        for row in sorted(first.values(), key=lambda row: row.image)[:PROBE_SIZE]
    ]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def measure_run(run_dir: Path, probe: Path) -> dict[str, Summary]:
    """Norms and turning of tokens on the probe, through composing and training."""
    measured, stages = {}, [("composed, norm taken out", "composed"), ("composed", "composed")]
    for label, name in [*stages, ("after stage 1", "stage1"), ("after stage 2", "stage2")]:
        model, processor = load_model(str(run_dir / name))
        if label.endswith("taken out"):
            model.model.multi_modal_projector.norm = torch.nn.Identity()
        (of_model,) = measure(model, processor, probe, label, num_samples=PROBE_SIZE, layers=[]).report.models
        measured[label] = of_model.summary
    return measured


def draw_some(questions: list[SceneQuestion], answers: list[str], path: Path) -> None:
    """A few pictures with question and answer, including a wrong one if there is one."""
    wrong = [number for number, row in enumerate(questions) if answers[number] != row.answer]
    chosen = [*range(0, 28, 4), *(wrong[:1] or [28])]
    images = [Image.open(questions[number].image) for number in chosen]
    titles = [f"{questions[number].question}\n{answers[number]}" for number in chosen]
    mistakes = [f"right: {questions[number].answer}" if number in wrong else "" for number in chosen]
    draw_answers(images, titles, mistakes, path)


def render_table(scores: dict[str, dict[str, float]], measured: dict[str, Summary], count: int) -> str:
    """The table that the quickstart prints."""
    lines = [
        f"Exact match on {count} held-out questions, ± one standard error",
        f"{'':34}{'all':>16}{'digit':>9}{'colour':>9}{'both':>9}",
    ]
    for name, score in scores.items():
        error = f" ± {100 * score['standard_error']:.1f}" if "standard_error" in score else ""
        total = f"{100 * score['all']:.1f}%{error}"
        lines.append(f"{name:34}{total:>16}" + "".join(f"{100 * score[kind]:8.1f}%" for kind in CHANCE))
    lines += ["", f"{'':26}{'norm of tokens at the decoder':>31}{'gap of cosines, visual - text':>36}"]
    lines.append(f"{'':26}{'visual':>10}{'text':>10}{'ratio':>11}" + "".join(f"{name:>14}" for name in THIRDS))
    for label, summary in measured.items():
        places = [
            ("at_decoder", "visual"),
            ("at_decoder", "text"),
            ("ratio",),
            *((f"gap, {name}",) for name in THIRDS),
        ]
        found = [summary.look(*place) for place in places]
        visual, text, ratio, *gaps = (estimate.mean if estimate else float("nan") for estimate in found)
        lines.append(f"{label:26}{visual:10.3f}{text:10.3f}{ratio:10.2f}x" + "".join(f"{gap:14.3f}" for gap in gaps))
    return "\n".join(lines)


@command()
def main() -> None:
    """Run the command line."""
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True)
    run_dir = parse(parser).run_dir
    questions = load_scene_questions(run_dir / "data")
    scores, answers = evaluate_run(run_dir, questions)
    probe = run_dir / "data" / "probe.json"
    write_probe(questions, probe)
    measured = measure_run(run_dir, probe)
    common = {"dataset": "digits-quickstart", "split": "test", "n": len(questions)}
    common |= {"baseline": scores["guessing"]["all"], "baseline_name": "guessing"}
    tasks = ("image questions", "text-only questions")
    rows = [{**common, "task": task, "value": scores[task]["all"]} for task in tasks]
    record_scores(run_dir / "stage2", COMMAND, rows)
    draw_some(questions, answers, run_dir / "answers.png")
    drawn = {label: summary for label, summary in measured.items() if label != "after stage 1"}
    save_figure(draw_overview(drawn), run_dir / "norms.png")
    norms = {label: summary.rows for label, summary in measured.items()}
    report = {"questions": len(questions), "accuracy": scores, "norms": norms}
    (run_dir / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    logger.info("%s", render_table(scores, measured, len(questions)))


if __name__ == "__main__":
    main()
