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
        UserError: if the model can't run in llama.cpp, a package is missing, or llama.cpp answers otherwise, as
            [`find_problem`] judges. Then the files of this dtype are deleted.
    """
    require_packages()
    model = ModelFolder(folder)
    require_exportable(model)
    output_dir.mkdir(parents=True, exist_ok=True)
    name = folder.resolve().name
    if (folder / RELEASE_FILE).exists():
        name = read_release(folder).repo_id.split("/")[1]

    comparisons = {dtype: write_and_compare(folder, output_dir, name, dtype) for dtype in DTYPES}

    size = model.config.vision_config.image_size
    add_section(output_dir / CARD_FILE, describe_files(name, size, comparisons))
    let_others_read(output_dir)
    logger.info("Written to %s", output_dir)


def write_and_compare(folder: Path, output_dir: Path, name: str, dtype: str) -> list[Comparison]:
    """Write the two files of a dtype, and compare their answers with transformers'.

    Args:
        folder: The plain Llava's folder.
        output_dir: Where the files go.
        name: The beginning of the files' names.
        dtype: "f32" or "f16".

    Raises:
        UserError: if llama.cpp answers otherwise. Then the files are deleted.
    """
    language_model, vision = (output_dir / file for file in file_names(name, dtype))
    write_language_model(folder, language_model, dtype)
    write_vision(folder, vision, dtype)

    comparisons = compare(folder, language_model, vision, read_examples(folder))
    logger.info("%s\n%s", language_model.name, describe(comparisons))
    problem = find_problem(dtype, comparisons)
    if problem is not None:
        language_model.unlink()
        vision.unlink()
        raise UserError(f"{language_model.name}: {problem}")
    return comparisons


def add_section(card: Path, section: str) -> None:
    """Write the section on the files at the end of a card, in place of an earlier one."""
    earlier = ""
    if card.exists():
        earlier, _, _ = card.read_text(encoding="utf-8").partition(f"\n{TITLE}\n")
    card.write_text(f"{earlier.rstrip()}\n\n{section}".lstrip(), encoding="utf-8")


def find_problems(folder: Path) -> list[str]:
    """Why the files for llama.cpp in a release don't answer as the release does; empty if they do."""
    problems = []
    for dtype in DTYPES:
        for vision in sorted(folder.glob(f"mmproj-*-{dtype}.gguf")):
            language_model = vision.with_name(vision.name.removeprefix("mmproj-"))
            try:
                comparisons = compare(folder, language_model, vision, read_examples(folder))
                problem = find_problem(dtype, comparisons)
            except UserError as error:  # llama.cpp can't load the files, for example
                problem = str(error)
            if problem is not None:
                problems.append(f"{language_model.name}: {problem}")
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


def find_problem(dtype: str, comparisons: list[Comparison]) -> str | None:
    """Why llama.cpp doesn't answer as transformers does; `None` if it does.

    In float16, rounding may change a token. So the answers are refused only if a prompt has another length, or if
    fewer than half of the pictures get the same tokens.
    """
    if dtype == "f16":
        has_same_prompts = all(comparison.has_same_prompt for comparison in comparisons)
        if has_same_prompts and 2 * count_same_tokens(comparisons) >= len(comparisons):
            return None

    problems = [
        f"{comparison.question.name}: {comparison.problem}" for comparison in comparisons if comparison.problem
    ]
    if not problems:
        return None
    lines = "\n  ".join(problems)
    return f"llama.cpp doesn't answer as transformers does, about {len(problems)} pictures:\n  {lines}"


def count_same_tokens(comparisons: list[Comparison]) -> int:
    """The number of pictures about which both give the same greedy tokens, but for ties."""
    return sum(comparison.has_same_tokens for comparison in comparisons)


def describe_files(name: str, size: int, comparisons: dict[str, list[Comparison]]) -> str:
    """The section on the files: what they are, how they run, and what was compared.

    Args:
        name: The beginning of the files' names.
        size: The side of the pictures that the model takes, in pixels.
        comparisons: The comparisons of each dtype.
    """
    language_model, vision = file_names(name, "f16")
    num_pictures = len(comparisons["f16"])
    num_same = count_same_tokens(comparisons["f16"])
    largest = {dtype: max(c.largest_difference for c in of_dtype) for dtype, of_dtype in comparisons.items()}
    return f"""\
{TITLE}

`{language_model}` is the language model, and `{vision}` the vision encoder with the projector. The files with `f32`
are the same in float32. Asked about {num_pictures} pictures, llama.cpp gave transformers' greedy tokens in float32,
and their log-probabilities to {largest["f32"]:.1g}. In float16, {num_same} of {num_pictures} pictures get the same
tokens; log-probabilities before another token are within {largest["f16"]:.1g}.

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
