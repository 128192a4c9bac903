"""Shows on the quickstart's parts what tiles are for: pictures whose content is too small once they are squashed.

    python examples/digits/wide.py

The pictures are six times as wide as high. A scene of the quickstart fills a sixth of each, in a random place, and the
rest is black. One model cuts such a picture into six tiles and a thumbnail, another squashes it to one square, which
leaves two pixels of a digit's width. Both are trained in the same steps and asked about unseen digits.

It needs the quickstart's data and backbones. A step is skipped if its folder is complete.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from quickstart import RUN, training_command
from report import load_scene_questions, make_image_prompt, share_right
from scenes import CHANCE
from transformers import AutoModelForImageTextToText, AutoProcessor

from common.console import command, parse
from common.errors import UserError
from diagnostics.answers import answer_prompts
from examples.steps import ROOT, Step, run_steps


logger = logging.getLogger(__name__)

WIDE = RUN / "wide"
MAX_TILES = 6
# The stage-2 runs: the folder of each, and the number of tiles that it may cut a picture into.
ARMS = {"tiles": MAX_TILES, "squashed": 1}
# The files of the quickstart's data whose pictures are made wide: rows to train on, and scenes with test questions.
FILES = ("stage2.json", "test.json")


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=["data", "report"], help="run one step alone")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done, and the report."""
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
    """All steps: data, composing, stage 1 on the quickstart's captions, stage 2 of both arms, and the report."""
    steps = [
        Step("Wide pictures", ["examples/digits/wide.py", "--step", "data"], (WIDE / "data/test.json",)),
        Step(
            "Composing with tiles",
            [
                *("training/compose.py", "--output_dir", str(WIDE / "composed"), "--max_tiles", str(MAX_TILES)),
                *("--vision_model", str(RUN / "vision"), "--vision_feature_layer", "-1"),
                *("--text_model", str(RUN / "text")),
            ],
            (WIDE / "composed/processor_config.json",),
        ),
        Step(
            "Stage 1: whole pictures",
            [
                *training_command("training/recipes/digits/stage1.yaml"),
                *("--model_name_or_path", str(WIDE / "composed"), "--output_dir", str(WIDE / "stage1")),
                *("--max_tiles", "1"),
            ],
            (WIDE / "stage1/trainer_state.json",),
        ),
    ]
    for arm, max_tiles in ARMS.items():
        steps.append(
            Step(
                f"Stage 2: {arm}",
                [
                    *training_command("training/recipes/digits/stage2.yaml"),
                    *("--model_name_or_path", str(WIDE / "stage1"), "--output_dir", str(WIDE / arm)),
                    *("--dataset_name", str(WIDE / "data/stage2.json"), "--max_tiles", str(max_tiles)),
                ],
                (WIDE / arm / "trainer_state.json",),
            )
        )
    steps.append(Step("Questions about unseen handwriting", ["examples/digits/wide.py", "--step", "report"]))
    return steps


def write_data(source: Path, output_dir: Path) -> None:
    """Write rows and test questions of the quickstart anew, about wide pictures.

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
    """Write a picture as wide as `MAX_TILES` scenes, with one scene in a random place."""
    with Image.open(scene_path) as scene:
        picture = Image.new("RGB", (MAX_TILES * scene.width, scene.height))
        picture.paste(scene, (rng.randrange(MAX_TILES) * scene.width, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def report() -> None:
    """Ask both models about the test's scenes, and print the shares of right answers."""
    data = ROOT / WIDE / "data"
    questions = load_scene_questions(data)
    prompts = [make_image_prompt(question) for question in questions]
    shares = {}
    for arm, max_tiles in ARMS.items():
        folder = ROOT / WIDE / arm
        model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        processor.image_processor.max_patches = max_tiles
        answers = answer_prompts(model, processor, prompts, f"Answering ({arm})")
        shares[arm] = share_right(questions, answers)

    lines = [f"right answers, {len(questions)} questions", f"{'':12}{'digit':>10}{'colour':>10}"]
    for arm, shares_of_arm in shares.items():
        lines.append(f"{arm:12}{shares_of_arm['digit']:10.1%}{shares_of_arm['colour']:10.1%}")
    lines.append(f"{'guessing':12}{CHANCE['digit']:10.1%}{CHANCE['colour']:10.1%}")
    logger.info("%s", "\n".join(lines))
    (ROOT / WIDE / "report.json").write_text(json.dumps(shares, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
