"""Shows what tiles are for: pictures whose content becomes too small if each picture is squashed to one square.

    python examples/digits/wide.py

The pictures are six times as wide as high. A scene of the quickstart fills a sixth of each picture, in a random
position, and the rest is black. One model cuts such a picture into six tiles and a thumbnail. Another model squashes
the picture to one square, in which a digit is only two pixels wide. Both models are trained in the same way, and asked
about unseen digits.

The command needs the quickstart's data and backbones. A step is skipped if its folder is complete.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

from normllava.command_line import command, parse

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.digits.quickstart import RUN, training_command
from examples.digits.report import load_scene_questions, make_image_prompt, share_right
from examples.digits.scenes import CHANCE
from examples.steps import ROOT, Step, run_steps
from normllava.diagnostics.answers import answer_prompts
from normllava.errors import UserError


logger = logging.getLogger(__name__)

WIDE = RUN / "wide"
MAX_TILES = 6  # the most tiles of a picture; also a picture's width over its height
# The two models: the name of each model's folder, and the most tiles that the model cuts a picture into.
MODELS = {"tiles": MAX_TILES, "squashed": 1}
# The files of the quickstart's data whose pictures are made wide: rows to train on, and scenes with test questions.
FILES = ("stage2.json", "test.json")


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=["data", "report"], help="run one step alone")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done, and the report; or only the step that `--step` names."""
    step = parse(build_parser(), argv).step
    if step == "data":
        write_data(ROOT / RUN / "data", ROOT / WIDE / "data")
    elif step == "report":
        report()
    else:
        if not (ROOT / RUN / "text" / "tokenizer_config.json").exists():
            raise UserError(f"{RUN} has no backbones: run make quickstart first.")
        run_steps(plan_steps())


def plan_steps() -> list[Step]:
    """All steps: data, composing, stage 1 on the quickstart's captions, stage 2 of both models, and the report."""
    make_data = Step(
        title="Wide pictures",
        command=["examples/digits/wide.py", "--step=data"],
        last_files=(WIDE / "data/test.json",),
    )
    compose = Step(
        title="Composing with tiles",
        command=[
            "training/compose.py",
            f"--vision_model={RUN}/vision",
            "--vision_feature_layer=-1",  # as in the quickstart
            f"--text_model={RUN}/text",
            "--projector_norm=gwc",
            f"--max_tiles={MAX_TILES}",
            f"--output_dir={WIDE}/composed",
        ],
        last_files=(WIDE / "composed/adapt.yaml",),
    )
    train_stage_1 = Step(
        title="Stage 1: whole pictures",
        command=[
            *training_command("training/recipes/digits/stage1.yaml"),
            f"--model_name_or_path={WIDE}/composed",
            "--max_tiles=1",
            f"--output_dir={WIDE}/stage1",
        ],
        last_files=(WIDE / "stage1/trainer_state.json",),
    )
    steps = [make_data, compose, train_stage_1]
    for name, max_tiles in MODELS.items():
        train_stage_2 = Step(
            title=f"Stage 2: {name}",
            command=[
                *training_command("training/recipes/digits/stage2.yaml"),
                f"--model_name_or_path={WIDE}/stage1",
                f"--dataset_name={WIDE}/data/stage2.json",
                f"--max_tiles={max_tiles}",
                f"--output_dir={WIDE}/{name}",
            ],
            last_files=(WIDE / name / "trainer_state.json",),
        )
        steps.append(train_stage_2)

    ask = Step(
        title="Questions about unseen handwriting",
        command=["examples/digits/wide.py", "--step=report"],
    )
    return [*steps, ask]


def write_data(source: Path, output_dir: Path) -> None:
    """Write the quickstart's rows and test questions again, with wide pictures.

    Args:
        source: The folder of the quickstart's data.
        output_dir: The folder to write.
    """
    rng = random.Random(0)
    for name in FILES:
        rows = json.loads((source / name).read_text(encoding="utf-8"))
        for row in rows:
            if "image" in row:
                widen(source / row["image"], output_dir / row["image"], rng)
        (output_dir / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def widen(scene_path: Path, path: Path, rng: random.Random) -> None:
    """Write a picture as wide as `MAX_TILES` scenes, with one scene in a random position."""
    with Image.open(scene_path) as scene:
        picture = Image.new("RGB", (MAX_TILES * scene.width, scene.height))
        left = rng.randrange(MAX_TILES) * scene.width
        picture.paste(scene, (left, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def report() -> None:
    """Ask both models about the test's scenes, and print the shares of right answers."""
    data = ROOT / WIDE / "data"
    questions = load_scene_questions(data)
    prompts = [make_image_prompt(question) for question in questions]
    shares = {}
    for name, max_tiles in MODELS.items():
        folder = ROOT / WIDE / name
        model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        processor.image_processor.max_patches = max_tiles  # transformers calls tiles patches
        answers = answer_prompts(model, processor, prompts, title=f"Answering ({name})")
        shares[name] = share_right(questions, answers)

    lines = [f"right answers, {len(questions)} questions", f"{'':12}{'digit':>10}{'colour':>10}"]
    for name, shares_of_model in shares.items():
        lines.append(f"{name:12}{shares_of_model['digit']:10.1%}{shares_of_model['colour']:10.1%}")
    lines.append(f"{'guessing':12}{CHANCE['digit']:10.1%}{CHANCE['colour']:10.1%}")
    logger.info("%s", "\n".join(lines))
    (ROOT / WIDE / "report.json").write_text(json.dumps(shares, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
