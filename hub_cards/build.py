"""Stage a trained folder for the Hub: only listed files are copied."""

import json
import logging
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from conversations.files import sha256
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import IMAGE_MARK, check_row, row_images, row_turns
from diagnostics.plots import draw_attention, draw_layers, save
from diagnostics.results import ModelReport
from hub_cards.card import Widget, check_origins, read_prose, render_card
from hub_cards.check_model import CLASS_FILES, JSON_FILES, find_model_faults
from hub_cards.facts import HUB_ID, Cast, Facts, collect_facts, find_foreign_figures, hub_id, read_json
from hub_cards.findings import Finding
from hub_cards.fresh_load import GREEDY, ask, fixed_picture, generate
from hub_cards.licences import APACHE, Licence, licence_of
from hub_cards.manifest import MANIFEST, staged_files
from hub_cards.weights import INDEX, Weights, read_weights


logger = logging.getLogger(__name__)

ASSETS = Path(__file__).with_name("assets")
APACHE_TEXT = ASSETS / "LICENSE-APACHE"
SERVING_FILES = (ASSETS / "handler.py", ASSETS / "requirements.txt")
# Files of a checkpoint that are copied as they are, if they are there.
OTHER_FILES = ("tokenizer.json", "chat_template.jinja", "evaluation.json")
# Allowed tag names, without those that git refuses or the Hub reserves.
TAG = re.compile(r"[A-Za-z0-9][\w.+-]*")
BRANCHES = {"main", "master", "head"}
# Plots of the diagnostics' figures, with their captions.
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
    dtype: str | None = None,
) -> Path:
    """Make the stage folder, its card last and its manifest after that. It appears only when it is complete.

    Args:
        run: Output folder of the last stage.
        output_dir: Folder to make; must be empty or not exist.
        repo_id: Name that the repository will have, `owner/name`.
        prose_file: YAML with the card's prose.
        revision: Tag that the card pins.
        diagnostics: Folder of a report about this model.
        widget_data: LLaVA JSON whose first pictures and questions become examples.
        text_model, vision_model: Hub ids of parts that were loaded from a folder.
        own_licence: Licence of parts that are not on the Hub.
        base_licence_file: The base model's licence text, if its licence requires a copy.
        dtype: Cast all weights except the norm's to it.

    Raises:
        ValueError: if a needed fact or file is missing, the name breaks the base model's licence, or the model is not
            fit to be published; the message lists all findings.
    """
    check_repo_id(repo_id)
    check_revision(revision)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} is not empty. Choose another folder, or empty it first.")
    facts = collect_facts(run, diagnostics, text_model, vision_model)
    licence = licence_of(facts.text_model, facts.vision_model, own_licence)
    check_name(repo_id, licence)
    text = licence_text(licence, base_licence_file)
    prose = read_prose(prose_file)
    check_origins(facts, prose)
    refuse(run, [*find_model_faults(run, facts.weights, facts.steps), *find_foreign_figures(facts)])
    stage = output_dir.with_name(f"{output_dir.name}.partial")
    if stage.exists():  # from an interrupted build
        shutil.rmtree(stage)
    stage.mkdir(parents=True)
    if dtype is not None:
        facts = replace(facts, **cast_model(run, stage, dtype, facts.weights))
    copy_model(run, stage, facts.weights)
    if dtype is not None:
        refuse(stage, find_model_faults(stage, facts.weights, facts.steps))
        if facts.cast is not None and not math.isfinite(facts.cast.difference):
            raise ValueError(
                f"Logits before or after the cast to {dtype} are NaN or infinite: choose another --dtype."
            )
    (stage / "LICENSE").write_text(text, encoding="utf-8")
    if "LICENSE-APACHE" in licence.files:
        shutil.copy(APACHE_TEXT, stage / "LICENSE-APACHE")
    if licence.notice is not None:
        (stage / "NOTICE").write_text(licence.notice, encoding="utf-8")
    for path in SERVING_FILES:
        shutil.copy(path, stage)
    plots = draw_plots(facts.diagnostics, repo_id.split("/")[1], stage)
    widgets = make_widgets(stage, widget_data) if widget_data is not None else []
    code_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in CLASS_FILES)
    card = render_card(facts, licence, prose, repo_id, revision, plots, widgets, code_lines)
    (stage / "README.md").write_text(str(card), encoding="utf-8")
    write_manifest(stage, repo_id, revision, facts)
    if output_dir.exists():
        output_dir.rmdir()  # empty
    return stage.rename(output_dir)


def refuse(folder: Path, findings: Iterable[Finding]) -> None:
    """Raises `ValueError`, with all of them, if there are findings."""
    listed = "".join(f"\n  {finding}" for finding in findings)
    if listed:
        raise ValueError(f"The model in {folder} can't be published:{listed}")


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` if it is not owner/name, or a name that the Hub refuses."""
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"--repo_id {repo_id!r} is not owner/name.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"--repo_id {repo_id!r}: {error}") from error


def check_revision(revision: str) -> None:
    """Raises `ValueError` if it can't be a tag that pins code: invalid in git, or like a branch's or commit's name."""
    if not TAG.fullmatch(revision) or ".." in revision or revision.endswith((".", ".lock")):
        raise ValueError(f"--revision {revision!r} is not a valid tag. Give one such as v1.0.")
    if revision.lower() in BRANCHES or re.fullmatch("[0-9a-f]{7,64}", revision):
        raise ValueError(
            f"--revision {revision!r} is a branch or commit name, which pins nothing. Give a tag such as v1.0."
        )


def check_name(repo_id: str, licence: Licence) -> None:
    """Raises `ValueError` if the name lacks a prefix that the licence requires."""
    name = repo_id.split("/")[1]
    if licence.name_prefix is not None and not name.startswith(licence.name_prefix):
        raise ValueError(
            f"The {licence.title} requires a model name that begins with {licence.name_prefix!r}: not {name!r}, but "
            f"for example {licence.name_prefix}-{name}."
        )


@torch.no_grad()
def cast_model(run: Path, stage: Path, dtype: str, weights: Weights) -> dict[str, Any]:
    """Save the model in another dtype, and ask both the same fixed question.

    Returns:
        The facts that change: `weights`, and `cast` unless they were in that dtype.
    """
    model = AutoModelForImageTextToText.from_pretrained(run, dtype=dtype)  # which keeps the norm in float32
    model.save_pretrained(stage, max_shard_size="5GB")
    del model
    inputs = ask(AutoProcessor.from_pretrained(run), fixed_picture(), "What is in the picture?")
    before, after = generate(str(run), inputs), generate(str(stage), inputs)
    difference = (after["logits"].float() - before["logits"].float()).abs().max().item()
    asked = inputs["input_ids"].shape[1]
    pairs = [*zip(before["tokens"][0, asked:].tolist(), after["tokens"][0, asked:].tolist(), strict=False)]
    same = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    spread = before["logits"].float().std().item()
    cast = Cast(weights.count("dtype"), difference, spread, same, before["tokens"].shape[1] - asked)
    written = read_weights(stage)
    return {"weights": written, "cast": None if written.count("dtype") == cast.dtypes else cast}


def copy_model(run: Path, stage: Path, weights: Weights) -> None:
    """Copy weights, class files, and settings without names of this machine; keep what a cast has written."""
    for name in [*weights.sha256, *OTHER_FILES]:
        if (run / name).exists() and not (stage / name).exists():
            shutil.copy(run / name, stage)
    for name in JSON_FILES:
        source = stage / name if (stage / name).exists() else run / name
        cast_away = name == INDEX and weights.index is None
        if source.exists() and not cast_away:
            text = json.dumps(without_local_names(read_json(source)), indent=2, ensure_ascii=False)
            (stage / name).write_text(text + "\n", encoding="utf-8")
    for path in CLASS_FILES:
        shutil.copy(path, stage)


def without_local_names(value: Any) -> Any:
    """The same value without `_name_or_path` fields that don't name a Hub repository."""
    if isinstance(value, dict):
        return {
            key: without_local_names(entry)
            for key, entry in value.items()
            if not key.endswith("name_or_path") or (isinstance(entry, str) and hub_id(entry))
        }
    return [without_local_names(entry) for entry in value] if isinstance(value, list) else value


def licence_text(licence: Licence, base_licence_file: Path | None) -> str:
    """Text of `LICENSE`. Raises `ValueError` if it is missing, or of another licence."""
    if licence is APACHE:
        return APACHE_TEXT.read_text(encoding="utf-8")
    if base_licence_file is None:
        raise ValueError(
            f"The {licence.title} requires a copy of the agreement: give --base_licence_file, LICENSE.txt in the base "
            "model's repository."
        )
    text = base_licence_file.read_text(encoding="utf-8")
    if licence.title.split(" License")[0].lower() not in re.sub(r"\s+", " ", text).lower():
        raise ValueError(f"{base_licence_file} does not read like the {licence.title}.")
    return text


def draw_plots(measured: ModelReport | None, name: str, output_dir: Path) -> dict[str, str]:
    """Draw the diagnostics' figures with the model's own name: the report's plots may show a folder's name.

    Returns:
        The caption of each plot, by file name.
    """
    if measured is None:
        return {}
    folder = output_dir / "diagnostics"
    folder.mkdir()
    save(draw_layers([name], [measured.layers]), folder / "layers.png")
    save(draw_attention([name], [measured.attention]), folder / "attention.png")
    for plot in PLOTS:
        with Image.open(folder / plot) as picture:
            save_picture(picture, folder / plot)
    return PLOTS


@torch.no_grad()
def make_widgets(stage: Path, data: Path) -> list[Widget]:
    """The data's first pictures, saved, with the model's own greedy answers to their first questions."""
    model = AutoModelForImageTextToText.from_pretrained(stage).eval()
    processor = AutoProcessor.from_pretrained(stage)
    (stage / "images").mkdir()
    widgets: list[Widget] = []
    for row in load_rows(str(data)):
        if len(widgets) == MAX_WIDGETS:
            break
        turns = row_turns(row) or []
        if turns:
            check_row(row, needs_answer=False)
        questions = [turn["value"] for turn in turns if turn["from"] == "human"]
        if len(row_images(row)) != 1 or not questions:
            continue
        question = questions[0].replace(IMAGE_MARK, "").strip()
        (picture,) = open_images(row)
        name = f"images/example{len(widgets) + 1}.png"
        save_picture(picture, stage / name)
        inputs = ask(processor, picture, question).to(model.device)
        generated = model.generate(**inputs, **GREEDY, max_new_tokens=64)
        answer = processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        widgets.append(Widget(name, question, answer.strip()))
    if not widgets:
        raise ValueError(f"{data} has no row with one picture and a question for an example.")
    return widgets


def save_picture(picture: Image.Image, path: Path) -> None:
    """Save only the pixels: no EXIF, text or colour profile, all of which can name places and people."""
    Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(path)


def write_manifest(folder: Path, repo_id: str, revision: str, facts: Facts) -> None:
    """Write what the folder is made of, and hash and size of every file in it: for weights, the hashes of what was
    checked, so that a corrupt copy is found.

    The commit is that of the last stage; it counts as clean only if no stage is known to be unclean.
    """
    environments = [stage.environment for stage in facts.stages if stage.environment is not None]
    clean = [environment.commit_is_clean for environment in environments] or [None]
    manifest = {
        "repo_id": repo_id,
        "revision": revision,
        "text_model": facts.text_model,
        "vision_model": facts.vision_model,
        "steps": facts.steps,
        "commit": environments[-1].commit if environments else None,
        "commit_is_clean": False if False in clean else clean[-1],
        "files": {
            path.relative_to(folder).as_posix(): {
                "sha256": facts.weights.sha256.get(path.name) or sha256(path),
                "size": path.stat().st_size,
            }
            for path in staged_files(folder)
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
