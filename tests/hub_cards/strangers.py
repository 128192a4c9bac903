"""Ask a release as a stranger does: in a process of its own that can't import this project."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from stranger_script import NUM_TOKENS, encode_question


SCRIPT = Path(__file__).with_name("stranger_script.py")


def ask_as_stranger(release: Path, picture: Image.Image, folder: Path, trusts_code: bool) -> dict[str, Any]:
    """Ask a release the question of `stranger_script.py` about a picture, and return what the script writes.

    Args:
        release: The release folder.
        picture: The picture.
        folder: An empty folder for the process's cache and files.
        trusts_code: Whether to load the release with `trust_remote_code=True`. If not, the flag is left out.
    """
    picture.save(folder / "picture.png")
    # With -I, Python looks for modules neither in PYTHONPATH nor in the folder of the script.
    command = [sys.executable, "-I", SCRIPT, release, folder / "picture.png", folder / "answers.pt"]
    if trusts_code:
        command.append("--trust_remote_code")
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "modules")}
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-5000:]
    return torch.load(folder / "answers.pt")


@torch.no_grad()
def ask_here(model: Any, processor: Any, picture: Image.Image) -> tuple[torch.Tensor, str]:
    """The logits and the greedy answer of a model in this process, to the question of `stranger_script.py`."""
    inputs = encode_question(processor, picture)
    logits = model(**inputs).logits
    generated = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    answer = processor.decode(generated[0, num_prompt_tokens:], skip_special_tokens=True)
    return logits, answer.strip()
