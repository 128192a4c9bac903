"""Write a plain Llava's files for llama.cpp, and prove that llama.cpp answers from them as transformers does."""

import logging
from pathlib import Path

from huggingface_hub import metadata_load

from hub_cards.card import read_widget
from hub_cards.contents import CARD_FILE, RELEASE_FILE
from hub_cards.llama_cpp_files import (
    DTYPES,
    require_exportable,
    require_packages,
    write_language_model,
    write_vision,
)
from hub_cards.llama_cpp_proof import Comparison, compare, describe
from hub_cards.model_folder import ModelFolder
from hub_cards.release import read_release
from normllava.errors import UserError
from normllava.files import let_others_read


logger = logging.getLogger(__name__)

# The title of the section that is added to a card.
TITLE = "## llama.cpp and Ollama"


def export(folder: Path, output_dir: Path) -> None:
    """Write a plain Llava's files for llama.cpp in float32 and float16, with the commands that run them.

    If `output_dir` is the release folder itself, the commands are added to its card, and else stand in its README.md.

    Args:
        folder: A release folder, or the folder of a run.
        output_dir: Where the files go.

    Raises:
        UserError: if the model can't run in llama.cpp, a package is missing, or llama.cpp answers otherwise in
            float32. Then the files are deleted.
    """
    require_packages()
    model = ModelFolder(folder)
    require_exportable(model)
    output_dir.mkdir(parents=True, exist_ok=True)
    name = folder.resolve().name
    if (folder / RELEASE_FILE).exists():
        name = read_release(folder).repo_id.split("/")[1]

    largest_differences = {}
    for dtype in DTYPES:
        language_model, vision = file_names(name, dtype)
        write_language_model(folder, output_dir / language_model, dtype)
        write_vision(folder, output_dir / vision, dtype)
        comparisons = compare(folder, output_dir / language_model, output_dir / vision, read_examples(folder))
        logger.info("%s\n%s", language_model, describe(comparisons))
        if dtype == "f32" and any(comparison.problem for comparison in comparisons):
            (output_dir / language_model).unlink()
            (output_dir / vision).unlink()
            raise UserError(describe_problems(comparisons))
        largest_differences[dtype] = max(comparison.largest_difference for comparison in comparisons)

    size = model.config.vision_config.image_size
    text = describe_files(name, size, len(comparisons), largest_differences)
    card = output_dir / CARD_FILE
    earlier = ""
    if card.exists():
        earlier, _, _ = card.read_text(encoding="utf-8").partition(f"\n{TITLE}\n")
    card.write_text(f"{earlier.rstrip()}\n\n{text}".lstrip(), encoding="utf-8")
    let_others_read(output_dir)
    logger.info("Written to %s", output_dir)


def find_problems(folder: Path) -> list[str]:
    """Why the files for llama.cpp in a release don't answer as the release does; empty if they do, or there are none.

    Raises:
        UserError: if a package that this takes is missing.
    """
    files = sorted(folder.glob("mmproj-*-f32.gguf"))
    if not files:
        return []
    require_packages()
    problems = []
    for vision in files:
        language_model = vision.with_name(vision.name.removeprefix("mmproj-"))
        comparisons = compare(folder, language_model, vision, read_examples(folder))
        if any(comparison.problem for comparison in comparisons):
            problems.append(f"{language_model.name}: {describe_problems(comparisons)}")
    return problems


def file_names(name: str, dtype: str) -> tuple[str, str]:
    """The names of the files with the language model and with the encoder and the projector."""
    return f"{name}-{dtype}.gguf", f"mmproj-{name}-{dtype}.gguf"


def read_examples(folder: Path) -> list[tuple[Path, str]]:
    """The examples on a release's card: a picture's file and a question each. Empty for other folders."""
    card = folder / CARD_FILE
    if not card.exists():
        return []
    metadata = metadata_load(card) or {}
    examples = []
    for widget in metadata.get("widget", []):
        picture, question = read_widget(widget)
        examples.append((folder / picture, question))
    return examples


def describe_problems(comparisons: list[Comparison]) -> str:
    """The error for files from which llama.cpp answers otherwise."""
    problems = [
        f"{comparison.question.name}: {comparison.problem}" for comparison in comparisons if comparison.problem
    ]
    lines = "\n  ".join(problems)
    return f"llama.cpp doesn't answer as transformers does, about {len(problems)} pictures:\n  {lines}"


def describe_files(name: str, size: int, num_pictures: int, largest_differences: dict[str, float]) -> str:
    """The section on the files: what they are, how they run, and what was compared.

    Args:
        name: The beginning of the files' names.
        size: The side of the pictures that the model takes, in pixels.
        num_pictures: The number of pictures that were asked about.
        largest_differences: By dtype, the largest difference of the log-probability of a token.
    """
    language_model, vision = file_names(name, "f16")
    return f"""\
{TITLE}

`{language_model}` is the language model, and `{vision}` the vision encoder with the projector. The files with `f32`
are the same in float32. Asked about {num_pictures} pictures, llama.cpp gave transformers' greedy tokens in float32,
and their log-probabilities to {largest_differences["f32"]:.1g} (in float16 to {largest_differences["f16"]:.1g}).

The model saw pictures squashed to {size} x {size} pixels, and llama.cpp pads those that aren't square. Squash yours:

```bash
convert picture.png -resize {size}x{size}! squashed.png
llama-server -m {language_model} --mmproj {vision} --jinja
```

Ollama takes a `Modelfile` of these two lines (not tried):

```
FROM ./{language_model}
FROM ./{vision}
```
"""
