"""A real model in two minutes: it names eight drawings by an artist nobody trained on, or the pictures that you give.

    python -m examples.emoji.demo [picture ...]

Downloads the pretrained parts, composes them, and merges the trained difference in `examples/emoji/adapter` into them:
projector, norm and adapters, trained by training/recipes/SmolLM2-135M-Instruct/adapt.yaml.
"""

import argparse
import logging
import random
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from conversations.pictures import to_rgb
from diagnostics.answers import answer, ask
from examples.emoji.evaluate import CREDIT
from examples.emoji.parts import RUN
from examples.emoji.pictures import read_drawings
from examples.emoji.rows import NAME
from examples.emoji.run import COMPOSE, PARTS
from examples.figures import draw_answers
from examples.steps import Step, run_steps


logger = logging.getLogger(__name__)

MODEL, BASE = RUN / "demo", RUN / "composed"
MERGE = ["training/merge.py", "--adapter", "examples/emoji/adapter", "--base", str(BASE), "--output_dir", str(MODEL)]
STEPS: list[Step] = [
    ("Two pretrained backbones", [RUN / "vision/preprocessor_config.json"], PARTS),
    ("Composing", [BASE / "processor_config.json"], [*COMPOSE, "--output_dir", str(BASE)]),
    ("The trained difference", [MODEL / "processor_config.json"], MERGE),
]


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", type=Path, help="files to ask about; by default eight drawings, by lot")
    paths = parser.parse_args().pictures
    run_steps(STEPS)
    if paths:
        names, images = [str(path) for path in paths], [to_rgb(Image.open(path)) for path in paths]
    else:
        drawings = [drawing for drawing in read_drawings(RUN / "downloads")[0] if drawing.icon_set == "twemoji"]
        chosen = random.sample(drawings, 8)
        names, images = [drawing.name for drawing in chosen], [drawing.render() for drawing in chosen]
    model = AutoModelForImageTextToText.from_pretrained(MODEL, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(MODEL, trust_remote_code=True)
    answers = answer(model, processor, [ask(NAME, image) for image in images], "Answering", 16)
    for name, text in zip(names, answers, strict=True):
        logger.info("%-32s%s", name, text)
    if not paths:
        mistakes = ["" if text == name else f"it is: {name}" for name, text in zip(names, answers, strict=True)]
        draw_answers(images, [f"“{text}”" for text in answers], mistakes, MODEL / "answers.png", CREDIT)
        logger.info("figure: %s. Yours: python -m examples.emoji.demo FILE", MODEL / "answers.png")


if __name__ == "__main__":
    main()
