"""Every reason not to publish a folder, found in one pass: of its model, and of what a stage folder holds besides."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, AutoModelForImageTextToText

from common.errors import UserError
from hub_cards.contents import CARD, NEEDED, SETTINGS, class_files, is_listed
from hub_cards.facts import read_json
from hub_cards.weights import Weights, listed, read_weights
from modeling_normllava import NormLlavaConfig


REBUILD = "Build again from a complete run."
# In settings: fields that make transformers run code or read other files, and names of code in other repositories.
FOREIGN = re.compile(
    r'"(auto_map|custom_pipelines|_?attn_implementation|experts_implementation|transformers_weights|'
    r'configuration_files|fast_tokenizer_files|quantization_config)": (?!null)|"[\w.-]+/[\w.-]+--[\w.]+"'
)
TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
# Two or more segments, but not a URL's or a route like /v1/models; also ~/x, C:\x and \\share\x.
MACHINE_PATH = re.compile(
    r"(?<![\w./<~}:])/(?!v\d+/)[\w.@+-]+(?:/[\w.@+-]+)+|file:/+[\w.~-]+|(?<![\w./~])~(?!\d)[\w-]*/[\w.-]+"
    r"|(?<!\w)[A-Za-z]:\\{1,2}[\w.-]+|\\\\[\w.-]+\\[\w.$-]+"
)
# What the card's snippet loads: where a push goes, and under which tag.
PIN = re.compile(r'^repository, revision = "(.+)", "(.+)"$', re.MULTILINE)


def check(stage: Path) -> list[str]:
    """All findings about a stage folder, each with its file and what to do."""
    if not stage.is_dir():
        return [f"{stage}: no such folder. Make one with python -m hub_cards build."]
    if (stage / "run.json").exists():
        return [f"{stage}: is a run, nothing staged: python -m hub_cards build {stage} --repo_id <owner/name>"]
    findings = [finding for path in sorted(stage.rglob("*")) for finding in find_file_faults(path, stage)]
    try:
        read_pin(stage)
        return [*findings, *find_model_faults(stage, read_weights(stage))]
    except ValueError as error:
        return [*findings, str(error)]


def read_pin(stage: Path) -> tuple[str, str]:
    """The repository and the tag that the card's snippet loads. Raises `UserError` if there is no such snippet."""
    card = stage / CARD
    found = PIN.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    if found is None:
        raise UserError(f"{card}: no snippet that loads a repository at a revision. {REBUILD}")
    return found[1], found[2]


def find_file_faults(path: Path, stage: Path) -> Iterator[str]:
    """Why a file may not be published: not on the list, a link, or it holds a token or a path of a machine."""
    name = path.relative_to(stage).as_posix()
    if path.is_symlink():  # which points out of the folder
        yield f"{name}: is a symlink. Put the file itself there, or delete it."
    elif path.is_file() and not is_listed(name):
        yield f"{name}: is not on the list of published files. Delete it; build stages all that is needed."
    elif path.is_file() and path.suffix not in (".safetensors", ".png", ".py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if TOKEN.search(text):
            yield f"{name}: holds a Hugging Face token. Revoke it now, then remove it."
        # Paths in a vocabulary, a template or a licence are nobody's.
        is_own = name not in ("tokenizer.json", "chat_template.jinja") and not name.startswith("LICENSE")
        if is_own and (found := MACHINE_PATH.search(text)):
            yield f"{name}: holds a path of a machine, {found[0]}. Remove it, or replace it with a Hub id."


def find_model_faults(folder: Path, weights: Weights, steps: int = 0) -> Iterator[str]:
    """All faults of a model that claims `steps` of training. If its code is not this version's, nothing is loaded."""
    try:
        if faults := [*find_code_faults(folder)]:
            yield from faults
            return
        yield from weights.find_faults(steps)
        # On the meta device names and shapes are compared, and nothing is computed.
        _, info = AutoModelForImageTextToText.from_pretrained(
            folder, dtype="auto", device_map="meta", trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := [str(name) for name in info[kind]]:
                yield f"weights: {kind} for the model of config.json: {listed(names)}. {REBUILD}"
    except Exception as error:  # files may hold anything
        yield f"The model can't be loaded: {error}"


def find_code_faults(folder: Path) -> Iterator[str]:
    """Class files that are not this version's, and settings that would run other code."""
    if missing := [name for name in NEEDED if not (folder / name).is_file()]:
        yield f"{', '.join(missing)}: missing. {REBUILD}"
        return
    settings = {name: read_json(folder / name) for name in SETTINGS if (folder / name).is_file()}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(config, NormLlavaConfig):
        yield f"config.json: model_type is {config.model_type!r}, not a NormLlava's. {REBUILD}"
        return
    ours = type(config)()
    for path in class_files(ours):
        if not (folder / path.name).is_file() or (folder / path.name).read_bytes() != path.read_bytes():
            yield f"{path.name}: is not this version's file. Compare it with {path}, and use what it is from."
    if settings["config.json"].pop("auto_map", None) != ours.auto_map:
        yield f"config.json: its auto_map is not {json.dumps(ours.auto_map)}. Save the model again."
    for name, value in settings.items():
        if found := FOREIGN.search(json.dumps(value)):
            yield f"{name}: holds {found[0]}, which needs other code or files than the release's. Remove it."
