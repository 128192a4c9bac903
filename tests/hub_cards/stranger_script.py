"""Load a release as a stranger does, who has transformers but not this project, and write the release's answers.

python -I stranger_script.py RELEASE PICTURE ANSWERS [--trust_remote_code]

ANSWERS is a file for `torch.load`: a dict with the answers of the pipeline and of the release's handler.py, the logits
for the question, and the modules of the model's and the processor's class.
"""

import base64
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline


# Packages of this project. A release must need none of them.
PACKAGES = ("hub_cards", "modeling_normllava", "normllava", "training")
QUESTION = "what is it?"
NUM_TOKENS = 8


def main() -> None:
    """Ask the release in each way, and write the answers."""
    # Imports of this project fail, even where the project is installed.
    for package in PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment]

    release, picture_file, answers_file, *options = sys.argv[1:]
    flags: dict[str, Any] = {}
    if options:
        flags["trust_remote_code"] = True

    picture = Image.open(picture_file).convert("RGB")
    model = AutoModelForImageTextToText.from_pretrained(release, **flags).eval()
    processor = AutoProcessor.from_pretrained(release, **flags)

    with torch.no_grad():
        logits = model(**encode_question(processor, picture)).logits
    answers = {
        "logits": logits,
        "pipeline": ask_pipeline(release, picture, flags),
        "handler": ask_handler(Path(release), Path(picture_file)),
        "modules": [type(model).__module__, type(processor).__module__],
    }
    torch.save(answers, answers_file)


def make_messages(image: Any) -> list[dict[str, Any]]:
    """The question about a picture, as messages. `image` is the picture, or its base64 text for the handler."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def encode_question(processor: Any, picture: Image.Image) -> Any:
    """The model's inputs for the question about a picture."""
    return processor.apply_chat_template(
        make_messages(picture),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def ask_pipeline(release: str, picture: Image.Image, flags: dict[str, Any]) -> str:
    """The greedy answer of transformers' pipeline."""
    ask = pipeline("image-text-to-text", model=release, **flags)
    (answer,) = ask(text=make_messages(picture), max_new_tokens=NUM_TOKENS, do_sample=False, return_full_text=False)
    return answer["generated_text"].strip()


def ask_handler(release: Path, picture_file: Path) -> str:
    """The greedy answer of the release's handler.py, which an inference endpoint imports by its path."""
    spec: Any = importlib.util.spec_from_file_location("handler", release / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    encoded = base64.b64encode(picture_file.read_bytes()).decode()
    request = {"inputs": make_messages(encoded), "parameters": {"max_new_tokens": NUM_TOKENS}}
    return module.EndpointHandler(str(release))(request)["generated_text"]


if __name__ == "__main__":
    main()
