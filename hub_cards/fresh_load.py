"""Load a model as any user would, in a separate process without this repository's modules.

    python -I hub_cards/fresh_load.py <repository or folder> --revision v1.0 --output result/

Writes hashes of all files and a copy of the manifest, logits and greedy tokens on a fixed picture, and what the card's
snippet prints, in this order: the files that exist show how far it got.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor


CLIENT = runpy.run_path(str(Path(__file__).with_name("client.py")))


# Overrides the checkpoint's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def fixed_picture() -> Image.Image:
    """A picture with structure, the same everywhere."""
    values = torch.arange(48 * 64 * 3).reshape(48, 64, 3)
    return Image.fromarray(((values * 7) % 256).to(torch.uint8).numpy())


def ask(processor: Any, picture: Image.Image, question: str) -> Any:
    """Inputs for a picture and a question, as any user would prepare them."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


# Separate functions, so that a model is freed before the next is loaded: a large one may fit only once.
@torch.no_grad()
def generate(source: str, inputs: Any, **pinned: Any) -> dict[str, torch.Tensor]:
    """Logits and greedy tokens, computed in the dtype that the weights are stored in."""
    model = AutoModelForImageTextToText.from_pretrained(source, dtype="auto", **pinned).eval()
    logits = model(**inputs).logits
    tokens = model.generate(**inputs, **GREEDY, max_new_tokens=16)
    return {"logits": logits.contiguous(), "tokens": tokens.contiguous()}


@torch.no_grad()
def encode(source: str, inputs: Any, **pinned: Any) -> dict[str, torch.Tensor]:
    """Hidden states of the base model."""
    model = AutoModel.from_pretrained(source, dtype="auto", **pinned).eval()
    return {"last_hidden_state": model(**inputs).last_hidden_state.contiguous()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--revision", help="revision of a repository on the Hub; a folder has none")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    CLIENT["use_patient_client"]()
    is_folder = Path(args.source).is_dir()
    folder = Path(args.source) if is_folder else Path(snapshot_download(args.source, revision=args.revision))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    if "manifest.json" in hashes:
        shutil.copy(folder / "manifest.json", args.output)
    (args.output / "hashes.json").write_text(json.dumps(hashes), encoding="utf-8")

    pinned = {"trust_remote_code": True} | ({} if is_folder else {"revision": args.revision})
    processor = AutoProcessor.from_pretrained(args.source, **pinned)
    inputs = ask(processor, fixed_picture(), "What is in the picture?")
    results = generate(args.source, inputs, **pinned) | encode(args.source, inputs, **pinned)
    save_file(results, args.output / "results.safetensors")

    if not is_folder:
        card = (folder / "README.md").read_text(encoding="utf-8")
        first, *others = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for snippet in (first, *others):
                exec(compile(snippet, "the card's snippet", "exec"), {})
        (args.output / "snippet.txt").write_text(printed.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # from the repository's code, in one line for the caller
        raise SystemExit(CLIENT["explain"](error)) from error
