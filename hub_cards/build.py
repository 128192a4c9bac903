"""Build a release folder from a trained run: the model, its class files, its card, and the files that serve the model.

The class files are the Python files that a release needs to load its model.
"""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hub_cards.card import PROSE_FORM, Widget, read_prose, read_widget, render_card
from hub_cards.check import find_model_faults
from hub_cards.contents import (
    APACHE_TEXT,
    CARD_FILE,
    COPIED_FILES,
    OVERVIEW_PLOT,
    PIXELS_FILE,
    SERVING_FILES,
    SETTINGS_FILES,
    SPACE_FOLDER,
    WEIGHTS_INDEX,
    read_json,
)
from hub_cards.facts import Facts, collect_facts, is_hub_id
from hub_cards.licences import APACHE, Licence, choose_licence
from hub_cards.model_folder import ModelFolder
from hub_cards.plain import copy_with_release_names, index_with_release_names
from hub_cards.release import Release, read_release
from hub_cards.weights import Weights
from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from normllava.conversations.rows import IMAGE_MARK, row_images, row_turns
from normllava.diagnostics.answers import answer_prompts, make_prompt
from normllava.errors import UserError
from normllava.files import fingerprint, fresh_folder, let_others_read, weights_fingerprint


logger = logging.getLogger(__name__)

# The fields of `BuildOptions` that only a build uses. They are refused for a release folder that exists already.
BUILD_ONLY_OPTIONS = ("prose", "widget_data", "text_model", "vision_model", "license", "base_licence_file")

# The largest number of examples on the card, which the Hub calls widgets, and of tokens in their answers.
MAX_WIDGETS = 3
MAX_WIDGET_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of `push` that say what to build.

    Attributes:
        repo_id: The repository on the Hub, owner/name.
        revision: The tag that the card pins.
        prose: YAML file with the card's prose; by default `card.yaml` beside the run's recipe, or in the run.
        widget_data: Rows whose first pictures become examples on the card, with the model's answers.
        text_model: Hub id of the language model, if it was loaded from a folder.
        vision_model: Hub id of the vision encoder, if it was loaded from a folder.
        license: Identifier of the model's licence, where the licence of a part is not known. The field's name has
            the spelling of the Hub's metadata.
        base_licence_file: File with the text of the model's licence, if the licence isn't Apache's.
    """

    repo_id: str
    revision: str = "v1.0"
    prose: Path | None = None
    widget_data: Path | None = None
    text_model: str | None = None
    vision_model: str | None = None
    license: str | None = None
    base_licence_file: Path | None = None


def build_or_take(run: Path, folder: Path, options: BuildOptions) -> Weights | None:
    """Build the release folder of a run, or take the folder as it is if it exists already.

    Users look at the folder after a dry run and may edit it. The push that follows takes the folder that they saw.

    Returns:
        What [`build_release`] returns; `None` if the folder was taken as it is.

    Raises:
        UserError: if an existing folder was built for another repository or tag, or from other weights, or if an
            option needs a new build of that folder. For a missing folder, as [`build_release`] does.
    """
    exists = folder.exists() and any(folder.iterdir())  # an empty folder counts as missing
    if not exists:
        weights = build_release(run, folder, options)
        logger.info("Built %s.", folder)
        return weights

    release = read_release(folder)
    if (release.repo_id, release.revision) != (options.repo_id, options.revision):
        raise UserError(
            f"{folder} was built for {release.repo_id}, {release.revision}. Delete it, or choose another --output_dir."
        )
    if release.weights != weights_fingerprint(run):
        raise UserError(f"{folder} was built from other weights than {run} holds now. Delete it to build it again.")

    given_options = [f"--{name}" for name in BUILD_ONLY_OPTIONS if getattr(options, name) is not None]
    if given_options:
        raise UserError(
            f"{', '.join(given_options)}: no effect on {folder}, which is there already. "
            f"Delete {folder} to build it anew, or leave the options out."
        )
    logger.info("Taking %s as it is; to build it again, delete it first.", folder)
    return None


def build_release(run: Path, folder: Path, options: BuildOptions) -> Weights:
    """Build a release folder, and beside it the folder of a Space on which users can ask the model.

    The release folder has another name until it is complete.

    Args:
        run: Output folder of the last stage of training.
        folder: The release folder to make. It must be missing or empty.
        options: What to build.

    Returns:
        What the run's weight files hold. The release has the same tensors, for a plain Llava under other names.

    Raises:
        UserError: if the name of the repository or the tag is not valid, if a file of the run is missing or can't be
            used, if the licence is not clear or its text is missing, if the model has faults, or if no row of
            `options.widget_data` can become an example. The message lists all faults of the model.
    """
    # The run and the options are checked before anything is written.
    check_names(run, options)
    facts = collect_facts(run, options.text_model, options.vision_model)
    if facts.composed is None and facts.parent is None and options.license is None:
        raise UserError(
            f"{run} doesn't record what the model was made from: `compose.py` writes that beside the model. Name the "
            "model's licence: --license <its identifier>."
        )
    licence = choose_licence(facts.text_model, facts.vision_model, options.license, facts.parent)
    check_licensed_name(licence, options.repo_id)
    licence_text = read_licence_text(licence, options.base_licence_file)

    prose_file = options.prose
    if prose_file is None:
        prose_file = find_prose(run)
    prose = read_prose(prose_file, facts)
    logger.info("The card's prose: %s", prose_file)

    model = facts.model
    faults = find_model_faults(model)
    if faults:
        raise UserError("\n  ".join([f"The model in {run} can't be published:", *faults]))

    # `fresh_folder` deletes what an interrupted build left.
    partial_folder = fresh_folder(folder.with_name(f"{folder.name}.partial"))
    copy_checkpoint(model, partial_folder)
    line_counts: dict[str, int] = {}  # stays empty for a plain Llava, which transformers' own class runs
    if not model.is_plain_llava:
        line_counts = copy_class_files(model, partial_folder)
    write_licence(partial_folder, licence, licence_text)
    for path in SERVING_FILES:
        shutil.copy(path, partial_folder)
    if facts.diagnostics is not None:
        plot = run / "diagnostics" / "figures" / "overview.png"
        copy_picture(plot, partial_folder / OVERVIEW_PLOT)

    release = Release(
        repo_id=options.repo_id,
        revision=options.revision,
        weights=fingerprint(model.weights.file_hashes),
    )
    release.write(partial_folder)

    widgets = []
    if options.widget_data is not None:
        widgets = make_widgets(partial_folder, options.widget_data)
    card = render_card(facts, licence, prose, release, widgets, line_counts)
    (partial_folder / CARD_FILE).write_text(card, encoding="utf-8")

    let_others_read(partial_folder)

    build_space(folder.with_name(f"{folder.name}-space"), partial_folder, widgets)
    partial_folder.rename(folder)  # may replace an empty folder
    missing = describe_missing(run, facts)
    if missing:
        logger.info("\n  ".join([f"Not on the card. To add it, delete {folder} and build again:", *missing]))
    return model.weights


def describe_missing(run: Path, facts: Facts) -> list[str]:
    """What the card says nothing of, each with what would record it."""
    missing = []
    if facts.diagnostics is None:
        missing.append(f"norms: normllava diagnose --model {run} --data ... --output_dir {run / 'diagnostics'}")
    if not facts.evaluations:
        missing.append(f"benchmarks: normllava evaluate {run}")
    is_of_unknown_parts = facts.text_model is None or facts.vision_model is None
    if facts.parent is None and is_of_unknown_parts:
        missing.append("origin of the parts: --text_model and --vision_model name them on the Hub")
    return missing


def check_names(run: Path, options: BuildOptions) -> None:
    """Check what is published under which names.

    Raises:
        UserError: if `run` is a release folder or a checkpoint, or the name of the repository or the tag is not valid.
    """
    # Every release folder has this file, and no run has it.
    if (run / "handler.py").exists():
        raise UserError(f"{run} is a release: give the run that it was built from, and its folder as --output_dir.")
    # Trainer reads checkpoints by the weights' names in the model, which vLLM and converters don't know.
    if run.resolve().name.startswith("checkpoint-"):
        raise UserError(
            f"{run} is a checkpoint, whose weights don't have the names of a release. To publish it, load model and "
            "processor by from_pretrained, save both in a new folder, and copy run.json and trainer_state.json there."
        )
    if not is_hub_id(options.repo_id):
        raise UserError(f"--repo_id {options.repo_id!r} is not owner/name.")

    tag = options.revision
    is_default_branch = tag in ("main", "master")
    is_commit = re.fullmatch(r"[0-9a-f]{7,64}", tag) is not None  # a commit's hash, whole or shortened
    has_valid_characters = re.fullmatch(r"\w[\w.+-]*", tag) is not None
    if is_default_branch or is_commit or not has_valid_characters:
        raise UserError(f"--revision {tag!r} is not a tag that pins code. Give one such as v1.0.")


def find_prose(run: Path) -> Path:
    """The file with the card's prose: `card.yaml` beside the recipe that a run was started with, or in the run.

    Raises:
        UserError: if there is no such file. Then one is written, for the user to fill in.
    """
    record_file = run / "run.json"
    recipe_file = read_json(record_file).get("recipe") if record_file.exists() else None
    folders = [run]
    if recipe_file is not None and Path(recipe_file).parent.is_dir():
        folders.insert(0, Path(recipe_file).parent)
    for folder in folders:
        if (folder / "card.yaml").exists():
            return folder / "card.yaml"

    prose_file = folders[0] / "card.yaml"
    prose_file.write_text(PROSE_FORM, encoding="utf-8")
    raise UserError(
        f"The card needs a sentence: {prose_file} was written for it. Say in its first field what the model is for, "
        "change the others as you like, and push again."
    )


def check_licensed_name(licence: Licence, repo_id: str) -> None:
    """Raises `UserError` if the licence asks for another name of the repository."""
    _, name = repo_id.split("/")
    if not name.startswith(licence.name_prefix):
        raise UserError(f"The {licence.title} asks for another name than {name}: {licence.name_prefix}-{name}.")


def read_licence_text(licence: Licence, base_licence_file: Path | None) -> str:
    """The text for the release's file `LICENSE`.

    Raises:
        UserError: if the licence is not Apache's and its text is not given.
    """
    if licence is APACHE:
        return APACHE_TEXT.read_text(encoding="utf-8")
    if base_licence_file is None:
        raise UserError(f"A copy of the licence ({licence.title}) is needed: give its text as --base_licence_file.")
    return base_licence_file.read_text(encoding="utf-8")


def copy_checkpoint(model: ModelFolder, folder: Path) -> None:
    """Copy the weights, the tokenizer and the settings. The settings lose the names of this machine's folders.

    The weights of a plain Llava get the names of the first Llava checkpoints.
    """
    run = model.path
    vision_type = model.settings["vision_config"]["model_type"]
    weight_files = list(model.weights.file_hashes)  # the hashes are by the files' names
    for name in weight_files:
        if model.is_plain_llava:
            copy_with_release_names(run / name, folder, vision_type)
        else:
            shutil.copy(run / name, folder)

    for name in COPIED_FILES:
        if (run / name).exists():
            shutil.copy(run / name, folder)

    for name in SETTINGS_FILES:
        if not (run / name).exists():
            continue
        settings = without_local_names(read_json(run / name))
        if model.is_plain_llava and name == WEIGHTS_INDEX:
            settings = index_with_release_names(settings, vision_type)
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def without_local_names(value: Any) -> Any:
    """A copy of a JSON value without the names of this machine's folders.

    At any depth, a field whose key ends with `name_or_path` is left out, unless its value is a Hub id.
    """
    if isinstance(value, list):
        return [without_local_names(entry) for entry in value]
    if not isinstance(value, dict):
        return value

    kept_fields = {}
    for key, entry in value.items():
        is_name = key.endswith("name_or_path")
        if is_name and not is_hub_id(str(entry)):  # an entry may be null
            continue
        kept_fields[key] = without_local_names(entry)
    return kept_fields


def copy_class_files(model: ModelFolder, folder: Path) -> dict[str, int]:
    """Copy this version's class files into the release folder, and count their lines.

    The class files in the run's folder are not copied: they may be another version's, with which the model was not
    checked.

    Returns:
        The number of lines of each class file, by the file's name.
    """
    line_counts = {}
    for class_file in model.class_files:
        shutil.copy(class_file, folder)
        text = class_file.read_text(encoding="utf-8")
        line_counts[class_file.name] = len(text.splitlines())

        run_file = model.path / class_file.name
        if run_file.exists() and run_file.read_text(encoding="utf-8") != text:
            logger.info("%s is another version's. The release gets this version's.", run_file)
    return line_counts


def write_licence(folder: Path, licence: Licence, text: str) -> None:
    """Write the licence's text into `LICENSE`, and other files that the licences of the model and the code ask for."""
    (folder / "LICENSE").write_text(text, encoding="utf-8")
    if licence.notice is not None:
        (folder / "NOTICE").write_text(licence.notice, encoding="utf-8")
    if licence is not APACHE:
        # The Python files are under Apache's licence, whose section 4a asks for a copy of the licence.
        shutil.copy(APACHE_TEXT, folder)


def make_widgets(folder: Path, data: Path) -> list[Widget]:
    """Make the card's examples from the first rows of the data: a picture, a question and the model's greedy answer.

    The pictures are saved into the release folder. A row is skipped if it has no question, or not exactly one picture.

    Raises:
        UserError: if all rows are skipped.
    """
    # `hub_cards.facts` imports `modeling_normllava`, which registers the model's classes with transformers. So these
    # calls don't need the folder's own class files.
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    widgets: list[Widget] = []
    for row in load_rows(str(data)):
        question = read_question(row)
        has_one_picture = len(row_images(row)) == 1
        if not question or not has_one_picture:
            continue

        (picture,) = open_images(row)
        number = len(widgets) + 1
        picture_name = f"images/example{number}.png"
        save_picture(picture, folder / picture_name)

        prompt = make_prompt(question, picture)
        (answer,) = answer_prompts(
            model, processor, [prompt], title=f"Example {number}", max_new_tokens=MAX_WIDGET_TOKENS
        )
        widgets.append(make_widget(picture_name, question, answer))
        if len(widgets) == MAX_WIDGETS:
            break

    if not widgets:
        raise UserError(f"{data} has no row with one picture and a question for an example.")
    return widgets


def read_question(row: dict[str, Any]) -> str:
    """The text of a row's first user turn, without the mark `<image>`; empty if the row has no user turn."""
    turns = row_turns(row)
    if turns is None:  # the row has no turns at all
        return ""
    for turn in turns:
        if turn.get("from") == "human":
            return turn["value"].replace(IMAGE_MARK, "").strip()
    return ""


def make_widget(picture_name: str, question: str, answer: str) -> Widget:
    """An example in the form that the Hub reads from a card's metadata."""
    content = [
        {"type": "image_url", "image_url": {"url": picture_name}},
        {"type": "text", "text": question},
    ]
    return {"messages": [{"role": "user", "content": content}], "output": {"text": answer}}


def copy_picture(source: Path, target: Path) -> None:
    """Copy a picture file without its metadata."""
    with Image.open(source) as picture:
        save_picture(picture, target)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Save a picture without its metadata, which can name places and people."""
    path.parent.mkdir(exist_ok=True)
    without_metadata = Image.frombytes(picture.mode, picture.size, picture.tobytes())
    without_metadata.save(path)


def build_space(folder: Path, release_folder: Path, widgets: list[Widget]) -> None:
    """Write the Space's files into a folder. Other files in the folder stay as they are.

    Args:
        folder: The Space's folder.
        release_folder: The folder with the pictures of the widgets.
        widgets: The release's examples, which the Space offers too.
    """
    shutil.copytree(SPACE_FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(PIXELS_FILE, folder)

    examples = []
    (folder / "examples.json").unlink(missing_ok=True)  # an earlier build's
    for widget in widgets:
        picture, question = read_widget(widget)
        (folder / picture).parent.mkdir(exist_ok=True)
        shutil.copy(release_folder / picture, folder / picture)
        examples.append({"picture": picture, "question": question})
    if examples:
        text = json.dumps(examples, indent=2, ensure_ascii=False)
        (folder / "examples.json").write_text(text + "\n", encoding="utf-8")
