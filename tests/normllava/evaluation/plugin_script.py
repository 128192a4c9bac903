"""Asks the lmms-eval plug-in about made-up rows, in the harnesses' environment, and prints what it answers as JSON.

    python tests/normllava/evaluation/plugin_script.py MODEL

Its `generate` is replaced by one that writes an answer of two paragraphs. The harness and the plug-in are real.
"""

import json
import sys
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.task import TaskConfig
from PIL import Image

from normllava.evaluation.lmms_eval_model import ImageTextToText


ANSWER = "A sign.\n\nIt reads: HELLO; or not"
# The generation settings in a task's file.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "without until": {"max_new_tokens": 16},
    "an empty line": {"until": ["\n\n"]},
    "a semicolon": {"until": ";"},
}


def answer(model: ImageTextToText, settings: dict[str, Any], kind: str = "image") -> str:
    """What the plug-in gives the harness for a question about a picture."""
    picture = Image.new("RGB", (30, 30), "red")
    content = [{"type": kind, "url": picture}, {"type": "text", "text": "What is it?"}]
    model.task_dict = {"made-up": {"test": [{}]}}
    arguments = ("What is it?", lambda row: [{"role": "user", "content": content}], settings, 0, "made-up", "test")
    metadata = {"task": "made-up", "doc_id": 0, "repeats": 1}
    request = Instance(request_type="generate_until", arguments=arguments, idx=0, metadata=metadata)
    (text,) = model.generate_until([request])
    return text


def main(folder: str) -> None:
    """Print the answers by the settings, and the error about a video."""
    model = ImageTextToText(folder, dtype="float32")
    ids = model._processor.tokenizer(ANSWER, add_special_tokens=False, return_tensors="pt").input_ids
    model._model.generate = lambda input_ids, **options: torch.cat([input_ids, ids], dim=1)

    answers = {}
    for name, settings in SETTINGS.items():
        config = TaskConfig(task="made-up", generation_kwargs=None if settings is None else dict(settings))
        answers[name] = answer(model, config.generation_kwargs)
    try:
        answer(model, {}, kind="video")
    except ValueError as error:
        answers["video"] = str(error)
    print(json.dumps(answers))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
