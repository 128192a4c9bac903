"""Stage a trained folder for the Hub: what is on the list is copied, everything else stays behind."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoModelForImageTextToText, AutoProcessor

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import row_images, row_turns
from diagnostics.plots import draw_attention, draw_layers, save
from diagnostics.results import ModelReport
from hub_cards.card import Widget, read_prose, render_card
from hub_cards.facts import HUB_ID, Facts, collect_facts, read_json, weight_files
from hub_cards.licences import APACHE, Licence, licence_of
from hub_cards.manifest import MANIFEST, sha256, staged_files


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(__file__).with_name("assets")
# Files of a checkpoint that are copied if they are there, beside weights and class files.
JSON_FILES = (
    "config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json",
)  # fmt: skip
OTHER_FILES = ("tokenizer.json", "chat_template.jinja", "evaluation.json")
# Plots of the diagnostics' figures, and what is to be seen on them.
PLOTS = {
    "layers.png": "Norm of visual and text tokens at each layer, and how far each layer turns them",
    "attention.png": "Attention to the picture at each layer: its mass, its entropy, the share of the bottom third",
}
MAX_WIDGETS = 3


def build(
    run: Path,
    output_dir: Path,
    repo_id: str,
    prose_file: Path,
    revision: str = "v1.0",
    diagnostics: Path | None = None,
    widget_data: Path | None = None,
    text_model: str | None = None,
    vision_model: str | None = None,
    own_licence: str | None = None,
    base_licence_file: Path | None = None,
) -> Path:
    """Make the stage folder, its card last and its manifest after that.

    Args:
        run: Output folder of the last stage.
        output_dir: Folder to make; must be empty or not there.
        repo_id: What the repository will be called, `owner/name`.
        prose_file: YAML with the card's prose.
        revision: Tag that the card pins.
        diagnostics: Folder of a report about this model.
        widget_data: LLaVA JSON whose first pictures and questions become examples.
        text_model, vision_model: Hub ids of parts that were loaded from a folder.
        own_licence: Licence of parts that are on no Hub.
        base_licence_file: The base model's licence text, where its licence asks for a copy.

    Raises:
        ValueError: if a fact or file that is needed is not there, or the name breaks the base model's licence.
    """
    check_repo_id(repo_id)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} is not empty. Choose another folder, or empty it first.")
    facts = collect_facts(run, diagnostics, text_model, vision_model)
    licence = licence_of(facts.text_model, facts.vision_model, own_licence)
    check_name(repo_id, licence)
    text = licence_text(licence, base_licence_file)
    prose = read_prose(prose_file)
    output_dir.mkdir(parents=True, exist_ok=True)
    copy_model(run, output_dir)
    (output_dir / "LICENSE").write_text(text, encoding="utf-8")
    if "LICENSE-APACHE" in licence.files:
        shutil.copy(ROOT / "LICENSE", output_dir / "LICENSE-APACHE")
    if licence.notice is not None:
        (output_dir / "NOTICE").write_text(licence.notice, encoding="utf-8")
    shutil.copy(ASSETS / "handler.py", output_dir)
    shutil.copy(ASSETS / "requirements.txt", output_dir)
    plots = draw_plots(facts.diagnostics, repo_id.split("/")[1], output_dir)
    widgets = make_widgets(run, widget_data, output_dir) if widget_data is not None else []
    code_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in output_dir.glob("*_normllava.py"))
    card = render_card(facts, licence, prose, repo_id, revision, plots, widgets, code_lines)
    (output_dir / "README.md").write_text(str(card), encoding="utf-8")
    write_manifest(output_dir, repo_id, revision, facts)
    return output_dir


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` if it is not owner/name, or a name that the Hub refuses."""
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"--repo_id {repo_id!r} is not owner/name.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"--repo_id {repo_id!r}: {error}") from error


def check_name(repo_id: str, licence: Licence) -> None:
    """Raises `ValueError` if the licence asks for a name that begins otherwise."""
    name = repo_id.split("/")[1]
    if licence.name_prefix is not None and not name.startswith(licence.name_prefix):
        raise ValueError(
            f"The {licence.title} asks that the model's name begin with {licence.name_prefix!r}: not {name!r}, but "
            f"for example {licence.name_prefix}-{name}."
        )


def copy_model(run: Path, output_dir: Path) -> None:
    """Weights, settings without names of this machine, and the class files that `auto_map` names."""
    for path in weight_files(run):
        shutil.copy(path, output_dir)
    for name in JSON_FILES:
        if (run / name).exists():
            text = json.dumps(without_local_names(read_json(run / name)), indent=2, ensure_ascii=False)
            (output_dir / name).write_text(text + "\n", encoding="utf-8")
    for name in OTHER_FILES:
        if (run / name).exists():
            shutil.copy(run / name, output_dir)
    config = read_json(run / "config.json")
    for module in {value.split(".")[0] for value in config["auto_map"].values()}:
        shutil.copy(run / f"{module}.py", output_dir)


def without_local_names(value: Any) -> Any:
    """The same without `_name_or_path` fields that don't name a Hub repository."""
    if isinstance(value, dict):
        return {
            key: without_local_names(entry)
            for key, entry in value.items()
            if not (key.endswith("name_or_path") and (not isinstance(entry, str) or not HUB_ID.fullmatch(entry)
                                                      or Path(entry).exists()))
        }  # fmt: skip
    return [without_local_names(entry) for entry in value] if isinstance(value, list) else value


def licence_text(licence: Licence, base_licence_file: Path | None) -> str:
    """Text of `LICENSE`. Raises `ValueError` if it is not at hand, or of another licence."""
    if licence is APACHE:
        return (ROOT / "LICENSE").read_text(encoding="utf-8")
    if base_licence_file is None:
        raise ValueError(
            f"The {licence.title} asks for a copy of the agreement: give --base_licence_file, which the base model's "
            "repository holds as LICENSE.txt."
        )
    text = base_licence_file.read_text(encoding="utf-8")
    if licence.title.split(" License")[0].lower() not in re.sub(r"\s+", " ", text).lower():
        raise ValueError(f"{base_licence_file} does not read like the {licence.title}.")
    return text


def draw_plots(measured: ModelReport | None, name: str, output_dir: Path) -> dict[str, str]:
    """Draw the diagnostics' figures under the model's own name: their report's plots may show a folder's.

    Returns:
        What is to be seen on each plot, by file name.
    """
    if measured is None:
        return {}
    folder = output_dir / "diagnostics"
    folder.mkdir()
    save(draw_layers([name], [measured.layers]), folder / "layers.png")
    save(draw_attention([name], [measured.attention]), folder / "attention.png")
    return PLOTS


@torch.no_grad()
def make_widgets(run: Path, data: Path, output_dir: Path) -> list[Widget]:
    """The data's first pictures, saved, with the model's own greedy answers to their questions."""
    model = AutoModelForImageTextToText.from_pretrained(run).eval()
    processor = AutoProcessor.from_pretrained(run)
    (output_dir / "images").mkdir()
    widgets: list[Widget] = []
    for row in load_rows(str(data)):
        if len(widgets) == MAX_WIDGETS:
            break
        if len(row_images(row)) != 1:
            continue
        question = row_turns(row)[0]["value"].replace("<image>", "").strip()
        (picture,) = open_images(row)
        name = f"images/example{len(widgets) + 1}.png"
        picture.save(output_dir / name)
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        generated = model.generate(**inputs.to(model.device), max_new_tokens=64, do_sample=False)
        answer = processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        widgets.append(Widget(name, question, answer.strip()))
    if not widgets:
        raise ValueError(f"{data} holds no row with one picture to make an example of.")
    return widgets


def write_manifest(folder: Path, repo_id: str, revision: str, facts: Facts) -> None:
    """What the folder is and is made of, and hash and size of every file in it.

    The commit is that of the last stage; it counts as clean only where that of no stage is known not to be.
    """
    environments = [stage.environment for stage in facts.stages if stage.environment is not None]
    clean = [environment.commit_is_clean for environment in environments] or [None]
    manifest = {
        "repo_id": repo_id,
        "revision": revision,
        "text_model": facts.text_model,
        "vision_model": facts.vision_model,
        "commit": environments[-1].commit if environments else None,
        "commit_is_clean": False if False in clean else clean[-1],
        "files": {
            path.relative_to(folder).as_posix(): {"sha256": sha256(path), "size": path.stat().st_size}
            for path in staged_files(folder)
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
