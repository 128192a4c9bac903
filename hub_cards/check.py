"""Every reason not to publish a stage folder, found in one pass."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from conversations.files import sha256
from hub_cards.build import OTHER_FILES, PLOTS, SERVING_FILES, check_name, check_revision
from hub_cards.card import KEY_ADAPTERS
from hub_cards.check_model import CLASS_FILES, JSON_FILES, KEY_ADAPTER_FILE, find_model_faults
from hub_cards.client import explain
from hub_cards.facts import read_json
from hub_cards.findings import REBUILD, Finding
from hub_cards.leaks import find_machines, find_secrets, plain_text
from hub_cards.licences import APACHE, licence_of
from hub_cards.manifest import MANIFEST, staged_files
from hub_cards.weights import Weights, read_weights


PLACEHOLDERS = re.compile(r"\b(?:TODO|FIXME|TBD)\b|(?i:lorem ipsum|\[?more information needed\]?|\{\{|\{%|<your[ _-])")
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Text that loads code: a call with an argument, a flag of a command.
LOADS = re.compile(r"\b(?:from_pretrained|pipeline|hub\.load)\(\s*[^\s).]|--trust[-_]remote[-_]code")
# Text that starts vLLM: its command, its modules, its image.
VLLM = re.compile(r"\bvllm +serve\b|\b(?:import|from) +vllm\b|\bvllm\.entrypoints\b|\bvllm/vllm-", re.IGNORECASE)
CARD = "README.md"
ALLOWED = {
    *JSON_FILES, *OTHER_FILES, *(path.name for path in (*CLASS_FILES, KEY_ADAPTER_FILE, *SERVING_FILES)), CARD,
    "LICENSE", "LICENSE-APACHE", "NOTICE", MANIFEST, *(f"diagnostics/{name}" for name in PLOTS),
}  # fmt: skip
ALLOWED_PATTERNS = (r"model(-\d{5}-of-\d{5})?\.safetensors", r"images/example\d+\.png")


@dataclass(frozen=True)
class Stage:
    """A stage folder, read once.

    Attributes:
        folder: The folder.
        weights: What its weight files hold; `None` if they can't be read.
        error: Why not.
    """

    folder: Path
    weights: Weights | None
    error: str | None

    @cached_property
    def files(self) -> dict[str, Path]:
        """All files by name except the manifest; no links, which point out of the folder."""
        paths = [path for path in staged_files(self.folder) if not path.is_symlink()]
        return {path.relative_to(self.folder).as_posix(): path for path in paths}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty if it can't be read."""
        manifest = self._read_object(MANIFEST)
        return manifest if isinstance(manifest.get("files"), dict) else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config; empty if it can't be read."""
        return self._read_object("config.json")

    def _read_object(self, name: str) -> dict[str, Any]:
        try:
            value = read_json(self.folder / name)
        except (ValueError, OSError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def metadata(self) -> dict[str, Any] | None:
        """The card's YAML block; `None` if it can't be read."""
        match = re.match(r"---\n(.*?)\n---\n", self.card, re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError:
            return None
        return metadata if isinstance(metadata, dict) else None

    @cached_property
    def card(self) -> str:
        """The whole card."""
        return self.text(CARD)

    def text(self, name: str) -> str:
        """A file's text; empty if there is none."""
        path = self.folder / name
        is_there = path.is_file() and not path.is_symlink()
        return path.read_text(encoding="utf-8", errors="replace") if is_there else ""


def check(folder: Path) -> list[Finding]:
    """All findings about a stage folder, by file.

    A check that fails, on a file with an unexpected form, is a finding too.
    """
    if not folder.is_dir():
        return [Finding(str(folder), "no such folder", "Make one with python -m hub_cards build.")]
    try:
        stage = Stage(folder, read_weights(folder), None)
    except ValueError as error:
        stage = Stage(folder, None, str(error).rstrip("."))
    findings: set[Finding] = set()
    for find in CHECKS:
        try:
            findings.update(find(stage))
        except Exception as error:  # files may hold anything
            findings.add(Finding(".", f"{find.__name__} stopped ({explain(error)})", REBUILD))
    return sorted(findings)


def find_unlisted_files(stage: Stage) -> Iterator[Finding]:
    """Files that are not on the list of what is published, and links, which point out of the folder."""
    for path in sorted(stage.folder.rglob("*")):
        name = path.relative_to(stage.folder).as_posix()
        if path.is_symlink():
            yield Finding(name, "is a symlink", "Put the file itself there, or delete it.")
        elif path.is_file() and name not in ALLOWED and not any(re.fullmatch(p, name) for p in ALLOWED_PATTERNS):
            yield Finding(name, "is not on the list of published files", "Delete it; build stages all that is needed.")


def find_faults_of_the_model(stage: Stage) -> Iterator[Finding]:
    """Faults of weights, code, settings and processor."""
    if stage.weights is None:
        yield Finding(".", str(stage.error), REBUILD)
    else:
        yield from find_model_faults(stage.folder, stage.weights, int(stage.manifest.get("steps", 0)))
    for path in SERVING_FILES:
        if stage.text(path.name) != path.read_text(encoding="utf-8"):
            yield Finding(path.name, "differs from this version's file", REBUILD)


def find_leaks(stage: Stage) -> Iterator[Finding]:
    """Secrets, and names of the machine that made the folder, in texts and weight files; metadata of pictures."""
    names = [name for name in (*stage.files, MANIFEST) if not name.endswith((".safetensors", ".png"))]
    texts = {name: stage.text(name) for name in names}
    for name, text in (texts | (stage.weights.headers if stage.weights else {})).items():
        says = plain_text(text)
        for kind in find_secrets(says):
            yield Finding(name, f"holds a secret: {kind}", "Revoke it now, then remove it.")
        # Paths in a vocabulary or a licence are nobody's.
        for machine in () if name == "tokenizer.json" or name.startswith("LICENSE") else find_machines(says):
            yield Finding(name, f"holds {machine}", "Remove it, or replace it with a Hub id.")
    for name, path in stage.files.items():
        if name.endswith(".png"):
            with Image.open(path, formats=["PNG"]) as picture:
                picture.load()
                if picture.info:
                    yield Finding(name, f"holds metadata: {', '.join(map(str, picture.info))}", REBUILD)


def find_card_faults(stage: Stage) -> Iterator[Finding]:
    """A card that is missing, holds a placeholder, or shows a missing picture."""
    if stage.metadata is None:
        yield Finding(CARD, "has no readable YAML block at the top", REBUILD)
    found = PLACEHOLDERS.search(stage.card)
    if found:
        yield Finding(CARD, f"holds a placeholder, {found.group()!r}", "Fill it in.")
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", stage.card):
        if not target.startswith("https://") and target not in stage.files:
            yield Finding(CARD, f"shows {target}, which is missing", "Add the picture, or remove it from the card.")


def find_licence_faults(stage: Stage) -> Iterator[Finding]:
    """Missing requirements of the parts' licence."""
    metadata, manifest = stage.metadata or {}, stage.manifest
    given, named = str(metadata.get("license")), metadata.get("base_model") or []
    parts = [manifest.get("text_model"), manifest.get("vision_model")]
    bases = [part for part in dict.fromkeys(parts) if part is not None]
    if sorted(named if isinstance(named, list) else [str(named)]) != sorted(bases):
        yield Finding(CARD, f"metadata base_model is {named}, the manifest's {bases}", REBUILD)
    try:
        licence = licence_of(parts[0], parts[1], given if None in parts else None)
        check_name(str(manifest.get("repo_id", "/")), licence)
    except ValueError as error:
        yield Finding(MANIFEST, str(error).rstrip("."), REBUILD)
        return
    if given != licence.identifier:
        yield Finding(CARD, f"metadata license is {given}", f"Its parts require {licence.identifier}.")
    for name in licence.files:
        if not stage.text(name).strip():
            yield Finding(name, f"is missing or empty, but the {licence.title} requires it", REBUILD)
    if licence.attribution and licence.attribution not in stage.card:
        yield Finding(CARD, f"does not say '{licence.attribution}'", f"The {licence.title} requires it.")
    if licence is not APACHE and "Apache License" in stage.text("LICENSE")[:200]:
        yield Finding("LICENSE", "is Apache's licence", f"Use the {licence.title}'s text.")


def find_snippet_faults(stage: Stage) -> Iterator[Finding]:
    """Snippets of the card that don't parse, or load anything but this revision of this repository."""
    named = f"{stage.manifest.get('repo_id')!r}, {stage.manifest.get('revision')!r}"
    pin = ast.unparse(ast.parse(f"repository, revision = {named}"))
    snippets = SNIPPET.findall(stage.card)
    command = f"{stage.manifest.get('repo_id')} --revision {stage.manifest.get('revision')} "
    for line in SNIPPET.sub("", stage.card).splitlines():
        if LOADS.search(line) and command not in f"{line} ":
            fix = f"Put it into a ```python block; a command has to name {command.strip()}."
            yield Finding(CARD, f"loads code outside of checked snippets: {line.strip()}", fix)
    if not any("from_pretrained" in snippet for snippet in snippets):
        yield Finding(CARD, "shows no snippet that loads the model", REBUILD)
    for number, snippet in enumerate(snippets):
        try:
            nodes = [*ast.walk(ast.parse(snippet))]
        except SyntaxError as error:
            yield Finding(CARD, f"snippet {number} is not valid Python ({error})", "Fix it.")
            continue
        calls = [node for node in nodes if isinstance(node, ast.Call) and loads_code(node)]
        for call in calls:
            given = {entry.arg: ast.unparse(entry.value) for entry in call.keywords}
            loaded = ast.unparse(call.args[0]) if call.args else given.get("model")
            is_pinned = (loaded, given.get("revision")) == ("repository", "revision")
            if not is_pinned or given.keys() & {"code_revision", None}:  # None: of **
                reason = f"snippet {number}: {ast.unparse(call.func)} does not load `repository` at `revision`"
                yield Finding(CARD, reason, "Pin it: it runs the repository's code.")
        pins = [ast.unparse(node) for node in nodes if isinstance(node, ast.Assign)].count(pin)
        names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        if calls and (pins, names.count("repository"), names.count("revision")) != (1, 1, 1):
            yield Finding(CARD, f"snippet {number} must contain `{pin}` exactly once", REBUILD)


def loads_code(call: ast.Call) -> bool:
    """Whether a call may load a repository's code."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    options = {entry.arg for entry in call.keywords}
    return name in ("from_pretrained", "pipeline") or "trust_remote_code" in options or "hub.load" in ast.unparse(call)


def find_serving_faults(stage: Stage) -> Iterator[Finding]:
    """For a model with key adapters: a card that doesn't say what can run it, or uses vLLM, which can't."""
    rank = stage.config.get("key_adapter_rank")
    if not rank:
        return
    said = KEY_ADAPTERS.format(rank=rank)
    if said not in stage.card:
        yield Finding(CARD, f"does not say '{said}'", REBUILD)
    for line in filter(VLLM.search, stage.card.splitlines()):
        yield Finding(CARD, f"runs vLLM, which can't run key adapters: {line.strip()}", "Use transformers instead.")


def find_manifest_faults(stage: Stage) -> Iterator[Finding]:
    """Files that don't match the manifest, and a commit that nobody can look up."""
    manifest, files = stage.manifest, stage.manifest.get("files", {})
    if not manifest:
        yield Finding(MANIFEST, "is missing, or can't be read", REBUILD)
        return
    if not isinstance(manifest.get("repo_id"), str) or not manifest["repo_id"]:
        yield Finding(MANIFEST, "has no repo_id", REBUILD)
    try:
        check_revision(str(manifest.get("revision") or ""))
    except ValueError as error:
        yield Finding(MANIFEST, str(error).rstrip("."), REBUILD)
    for name in sorted(files.keys() - stage.files.keys()):
        yield Finding(name, "is in the manifest but not in the folder", REBUILD)
    for name in sorted(stage.files.keys() - files.keys()):
        yield Finding(name, "is not in the manifest", "Delete it, or rebuild the stage folder.")
    hashes = stage.weights.sha256 if stage.weights else {}
    for name in sorted(files.keys() & stage.files.keys()):
        if files[name].get("sha256") != (hashes.get(name) or sha256(stage.files[name])):
            yield Finding(name, "does not match the manifest: it was changed", REBUILD)
    if manifest.get("commit_is_clean") is False:
        yield Finding(MANIFEST, "the run was made with uncommitted changes", "Commit, and train from a clean tree.")


CHECKS: tuple[Callable[[Stage], Iterator[Finding]], ...] = (
    find_unlisted_files, find_faults_of_the_model, find_leaks, find_card_faults, find_licence_faults,
    find_snippet_faults, find_serving_faults, find_manifest_faults,
)  # fmt: skip
