"""Trains the quickstart's model with a scaled projector, and asks it in llama.cpp what it was asked in transformers.

    make .venv-gguf/installed
    .venv-gguf/bin/python -m examples.digits.laptop

The command needs the quickstart's data and backbones. It composes a model without a norm, trains both stages by the
quickstart's recipes, writes the files for llama.cpp, and asks the 1,000 questions about unseen digits in transformers
and in llama.cpp, in float16 and with the language model in 8 bits. A step is skipped if its folder is complete.
"""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

import pandas as pd
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from examples.digits.quickstart import RUN, training_command
from examples.digits.report import SceneQuestion, load_scene_questions, make_image_prompt, share_right
from examples.steps import ROOT, Step, run_steps
from hub_cards.llama_cpp_files import write_language_model, write_vision
from hub_cards.llama_cpp_proof import Question, ask_llama_cpp
from normllava.diagnostics.answers import answer_prompts
from normllava.errors import UserError


logger = logging.getLogger(__name__)

LAPTOP = RUN / "laptop"
# The types of the language model's weights in llama.cpp.
DTYPES = ("f16", "q8_0")


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=["report"], help="run one step alone")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done, and the report; or only the step that `--step` names."""
    if parse(build_parser(), argv).step == "report":
        report()
        return
    if not (ROOT / RUN / "text" / "tokenizer_config.json").exists():
        raise UserError(f"{RUN} has no backbones: run make quickstart first.")
    run_steps(plan_steps())


def plan_steps() -> list[Step]:
    """All steps: composing, both stages, the files for llama.cpp, and the report."""
    compose = Step(
        title="Composing with a scaled projector",
        command=[
            "training/compose.py",
            f"--vision_model={RUN}/vision",
            "--vision_feature_layer=-1",  # as in the quickstart
            f"--text_model={RUN}/text",
            "--projector_norm=none",
            "--scale_projector",
            f"--output_dir={LAPTOP}/composed",
        ],
        last_files=(LAPTOP / "composed/adapt.yaml",),
    )
    steps = [compose]
    for stage, start in (("stage1", "composed"), ("stage2", "stage1")):
        train = Step(
            title=f"Training: {stage}",
            command=[
                *training_command(f"training/recipes/digits/{stage}.yaml"),
                f"--model_name_or_path={LAPTOP}/{start}",
                f"--output_dir={LAPTOP}/{stage}",
            ],
            last_files=(LAPTOP / stage / "trainer_state.json",),
        )
        steps.append(train)

    export = Step(
        title="Files for llama.cpp, compared with transformers",
        command=["-m", "hub_cards", "gguf", f"{LAPTOP}/stage2", f"--output_dir={LAPTOP}/files"],
        last_files=(LAPTOP / "files/README.md",),
    )
    ask = Step(title="Questions about unseen handwriting", command=["-m", "examples.digits.laptop", "--step=report"])
    return [*steps, export, ask]


def report() -> None:
    """Ask the test's questions in transformers and in llama.cpp, and print and write right answers, speed and size."""
    folder = ROOT / LAPTOP / "stage2"
    questions = load_scene_questions(ROOT / RUN / "data")
    processor = AutoProcessor.from_pretrained(folder)
    rows = [ask_in_llama_cpp(folder, processor.tokenizer, questions, dtype) for dtype in DTYPES]
    rows.insert(0, ask_in_transformers(folder, processor, questions, num_tokens=rows[0]["tokens"]))

    table = pd.DataFrame(rows)
    (ROOT / LAPTOP / "report.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    logger.info("%d questions\n%s", len(questions), table.to_string(index=False, float_format="%.3f"))


def ask_in_transformers(
    folder: Path, processor: Any, questions: Sequence[SceneQuestion], num_tokens: int
) -> dict[str, Any]:
    """The row of the table for transformers, in float32. It answers 50 questions at once.

    `num_tokens` is the number of tokens of all prompts and answers.
    """
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    prompts = [make_image_prompt(question) for question in questions]
    started = time.monotonic()
    answers = answer_prompts(model, processor, prompts, title="transformers")
    seconds = time.monotonic() - started
    num_bytes = (folder / "model.safetensors").stat().st_size
    return make_row("transformers, f32", questions, answers, num_tokens, seconds, num_bytes)


def ask_in_llama_cpp(folder: Path, tokenizer: Any, questions: Sequence[SceneQuestion], dtype: str) -> dict[str, Any]:
    """The row of the table for llama.cpp, which answers one question after the other."""
    files = folder.parent / "files"
    language_model = files / f"language-model-{dtype}.gguf"
    vision = files / "vision-f16.gguf"
    write_language_model(folder, language_model, dtype)
    write_vision(folder, vision, "f16")

    asked = []
    for number, question in enumerate(questions):
        with Image.open(question.image) as picture:
            asked.append(Question(f"question {number}", picture.convert("RGB"), question.question))
    started = time.monotonic()
    answers = ask_llama_cpp(language_model, vision, asked)
    seconds = time.monotonic() - started
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip() for answer in answers]
    num_tokens = sum(answer.num_prompt_tokens + len(answer.token_ids) for answer in answers)
    num_bytes = language_model.stat().st_size + vision.stat().st_size
    return make_row(f"llama.cpp, {dtype}", questions, texts, num_tokens, seconds, num_bytes)


def make_row(
    name: str,
    questions: Sequence[SceneQuestion],
    answers: Sequence[str],
    num_tokens: int,
    seconds: float,
    num_bytes: int,
) -> dict[str, Any]:
    """A row of the table."""
    shares = share_right(list(questions), list(answers))
    return {
        "runtime": name,
        "right": shares["all"],
        "standard error": shares.get("standard_error"),
        "tokens": num_tokens,
        "tokens a second": num_tokens / seconds,
        "MB": num_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
