"""Stage a trained folder for the Hub: only listed files are copied."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from common.errors import UserError
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import IMAGE_MARK, row_images, row_turns
from diagnostics.answers import answer_prompts, make_prompt
from hub_cards.card import Widget, read_prose, render_card
from hub_cards.check import find_model_faults
from hub_cards.contents import ASSETS, CARD, OTHERS, PIXELS, PLOT, SERVING, SETTINGS, SPACE, class_files
from hub_cards.facts import Facts, collect_facts, hub_id, read_json
from hub_cards.licences import APACHE, Licence, licence_of


APACHE_TEXT = ASSETS / "LICENSE-APACHE"
# Tags that git and the Hub accept and that are not like a branch or a commit, which pins nothing.
TAG = re.compile(r"(?!.*(?:\.\.|\.$|\.lock$)|(?i:main|master|head|[0-9a-f]{7,64})$)[A-Za-z0-9][\w.+-]*")
MAX_WIDGETS = 3


def build(
    run: Path, repo_id: str, output_dir: Path | None = None, prose: Path | None = None, revision: str = "v1.0",
    widget_data: Path | None = None, text_model: str | None = None, vision_model: str | None = None,
    license: str | None = None, base_licence_file: Path | None = None,
) -> Path:  # fmt: skip
    """Make the stage folder, its card last. It appears only when it is complete. Arguments are the command's. Raises
    `UserError` if a fact or file is missing, the name breaks a licence, or the model has faults, and lists them."""
    if hub_id(repo_id) is None:
        raise UserError(f"--repo_id {repo_id!r} is not owner/name.")
    if not TAG.fullmatch(revision):
        raise UserError(f"--revision {revision!r} is not a tag that pins code. Give one such as v1.0.")
    output_dir = output_dir or run / "release"
    if output_dir.exists() and any(output_dir.iterdir()):
        raise UserError(f"{output_dir} is not empty. Choose another folder, or empty it first.")
    facts = collect_facts(run, text_model=text_model, vision_model=vision_model)
    licence = licence_of({"text_model": facts.text_model, "vision_model": facts.vision_model}, license)
    name = repo_id.split("/")[1]
    if not name.startswith(licence.name_prefix):
        raise UserError(f"The {licence.title} asks for another name than {name}: {licence.name_prefix}-{name}.")
    text = licence_text(licence, base_licence_file)
    said = read_prose(prose or find_prose(run), facts)
    if faults := [*find_model_faults(run, facts.weights, facts.steps)]:
        raise UserError("\n  ".join([f"The model in {run} can't be published:", *faults]))
    stage = output_dir.with_name(f"{output_dir.name}.partial")
    shutil.rmtree(stage, ignore_errors=True)  # from an interrupted build
    stage.mkdir(parents=True)
    code = copy_model(run, stage, facts)
    (stage / "LICENSE").write_text(text, encoding="utf-8")
    if licence.notice is not None:
        (stage / "NOTICE").write_text(licence.notice, encoding="utf-8")
    if licence is not APACHE:
        shutil.copy(APACHE_TEXT, stage)  # of the class files and the vision encoder; its section 4a requires a copy
    for name in SERVING:
        shutil.copy(ASSETS / name, stage)
    shutil.copy(PIXELS, stage)
    build_space(output_dir.with_name(f"{output_dir.name}-space"))
    if facts.diagnostics:
        with Image.open(run / "diagnostics" / "figures" / Path(PLOT).name) as picture:
            save_picture(picture, stage / PLOT)
    widgets = make_widgets(stage, widget_data) if widget_data is not None else []
    card = render_card(facts, licence, said, repo_id, revision, widgets, code)
    (stage / CARD).write_text(card, encoding="utf-8")
    return stage.rename(output_dir)  # an empty folder gives way


def build_space(folder: Path) -> None:
    """Write the Space's files, beside the release: the page, and the rule for a picture's pixels.

    What else is in the folder stays.
    """
    shutil.copytree(SPACE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(PIXELS, folder)


def find_prose(run: Path) -> Path:
    """The prose next to the recipe that a run was started with. Raises `UserError` if there is none."""
    record = run / "run.json"
    recipe = read_json(record).get("recipe") if record.exists() else None
    prose = Path(recipe).with_name("card.yaml") if recipe else None
    if prose is None or not prose.exists():
        lacks = f"{prose} is missing" if prose else f"{record} names no recipe"
        raise UserError(f"{lacks}: give the card's prose with --prose. training/recipes/*/card.yaml are examples.")
    return prose


def copy_model(run: Path, stage: Path, facts: Facts) -> dict[str, int]:
    """Copy weights, class files and settings, these without names of this machine. Returns lines by class file."""
    for name in [*facts.weights.sha256, *OTHERS]:
        if (run / name).exists():
            shutil.copy(run / name, stage)
    for name in SETTINGS:
        if (run / name).exists():
            text = json.dumps(without_local_names(read_json(run / name)), indent=2, ensure_ascii=False)
            (stage / name).write_text(text + "\n", encoding="utf-8")
    files = class_files(AutoConfig.from_pretrained(run))
    for path in files:
        shutil.copy(path, stage)
    return {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}


def without_local_names(value: Any) -> Any:
    """The same value without `_name_or_path` fields that don't name a Hub repository."""
    if isinstance(value, dict):
        return {
            key: without_local_names(entry)
            for key, entry in value.items()
            if not key.endswith("name_or_path") or hub_id(str(entry))
        }
    return [without_local_names(entry) for entry in value] if isinstance(value, list) else value


def licence_text(licence: Licence, base_licence_file: Path | None) -> str:
    """Text of `LICENSE`. Raises `UserError` if it is missing, or of another licence."""
    if licence is APACHE:
        return APACHE_TEXT.read_text(encoding="utf-8")
    if base_licence_file is None:
        raise UserError(f"The {licence.title} requires a copy of it: --base_licence_file, the base's LICENSE.txt.")
    text = base_licence_file.read_text(encoding="utf-8")
    if licence.title.split(" License")[0].lower() not in " ".join(text.lower().split()):
        raise UserError(f"{base_licence_file} does not read like the {licence.title}.")
    return text


def make_widgets(stage: Path, data: Path) -> list[Widget]:
    """The data's first pictures, saved, with the model's own greedy answers to their first questions."""
    model = AutoModelForImageTextToText.from_pretrained(stage).eval()
    processor = AutoProcessor.from_pretrained(stage)
    widgets: list[Widget] = []
    for row in load_rows(str(data)):
        questions = [turn["value"] for turn in row_turns(row) or [] if turn.get("from") == "human"]
        if len(row_images(row)) != 1 or not questions:
            continue
        question = questions[0].replace(IMAGE_MARK, "").strip()
        (picture,) = open_images(row)
        name = f"images/example{len(widgets) + 1}.png"
        save_picture(picture, stage / name)
        (reply,) = answer_prompts(
            model, processor, [make_prompt(question, picture)], f"Example {len(widgets) + 1}", 64
        )
        content = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": question}]
        widgets.append({"messages": [{"role": "user", "content": content}], "output": {"text": reply}})
        if len(widgets) == MAX_WIDGETS:
            break
    if not widgets:
        raise UserError(f"{data} has no row with one picture and a question for an example.")
    return widgets


def save_picture(picture: Image.Image, path: Path) -> None:
    """Save only the pixels: no EXIF, text or colour profile, all of which can name places and people."""
    path.parent.mkdir(exist_ok=True)
    Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(path)
