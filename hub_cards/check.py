"""Every reason not to publish a stage folder, found in one pass."""

import ast
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from hub_cards.build import JSON_FILES, OTHER_FILES, PLOTS
from hub_cards.facts import HUB_ID
from hub_cards.licences import APACHE, BY_IDENTIFIER, UnknownLicenceError, known_licence, strictest
from hub_cards.manifest import MANIFEST, sha256, staged_files


SECTIONS = (
    "How to load it", "What the norm changes", "Uses", "Training", "Evaluation", "Bias, risks and limits",
    "Environmental impact", "Licence and attribution", "Citation",
)  # fmt: skip
METADATA = {"license", "pipeline_tag", "library_name", "tags"}
TAGS = {"custom_code", "conversational"}
PLACEHOLDERS = re.compile(
    r"\bTODO\b|\bFIXME\b|\bTBD\b|lorem ipsum|\[?more information needed\]?|\{\{|\{%|<your[ _-]", re.IGNORECASE
)
SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"),
    "an OpenAI or Anthropic key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "an AWS key": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "a Weights & Biases key": re.compile(r"wandb[\w.]*key\W{1,4}[0-9a-f]{40}", re.IGNORECASE),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
LOCAL_PATHS = re.compile(
    r"file:/+[\w.~-]+"
    r"|(?<![\w./<~}])/[\w.@+-]+(?:/[\w.@+-]+)+"  # of two segments or more, after host: too
    r"|(?<![\w./~])~[\w-]*/[\w.-]+"
    r"|(?<!\w)[A-Za-z]:\\{1,2}[\w.-]+"
)
PICKLE_NAMES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
TEXT_NAMES = (".md", ".json", ".jsonl", ".py", ".txt", ".jinja", ".yaml", ".yml", "")
OURS = {"training", "diagnostics", "hub_cards", "modeling_normllava", "examples", "benchmarks"}
CLASS_FILES = ("configuration_normllava.py", "modeling_normllava.py")
ALLOWED = {
    *JSON_FILES, *OTHER_FILES, *CLASS_FILES, "README.md", "LICENSE", "LICENSE-APACHE", "NOTICE", "handler.py",
    "requirements.txt", MANIFEST, *(f"diagnostics/{name}" for name in PLOTS),
}  # fmt: skip
ALLOWED_PATTERNS = (r"model(-\d{5}-of-\d{5})?\.safetensors", r"images/example\d+\.png")


@dataclass(frozen=True)
class Finding:
    """One reason not to publish.

    Attributes:
        file: Path inside the stage folder.
        reason: What is wrong.
        fix: What to do about it.
    """

    file: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}. {self.fix}"


def check(folder: Path) -> list[Finding]:
    """All findings about a stage folder, by file.

    A search that fails, on a file that was edited into another shape, is a finding too.
    """
    if not folder.is_dir():
        return [Finding(str(folder), "no such folder", "Make one with python -m hub_cards build.")]
    findings: set[Finding] = set()
    for find in CHECKS:
        try:
            findings.update(find(folder))
        except Exception as error:  # whatever somebody wrote into a file
            reason = f"{find.__name__} stopped ({type(error).__name__}: {error})"
            findings.add(Finding(".", reason, "Build the stage folder anew."))
    return sorted(findings, key=lambda finding: (finding.file, finding.reason))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError:
        return None


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def find_unlisted_files(folder: Path) -> Iterator[Finding]:
    """What is not on the list of what a repository holds, and links, which point out of it."""
    for path in sorted(folder.rglob("*")):
        name = _name(path, folder)
        if path.is_symlink():
            yield Finding(name, "is a symlink", "Put the file itself there, or delete it.")
        elif "custom_generate" in path.relative_to(folder).parts:
            yield Finding(name, "generate() would run code from custom_generate/", "Delete the folder.")
        elif path.is_file() and name not in ALLOWED and not any(re.fullmatch(p, name) for p in ALLOWED_PATTERNS):
            yield Finding(name, "is not on the list of what is published", "Delete it; build stages what is needed.")


def find_missing_files(folder: Path) -> Iterator[Finding]:
    """What a repository can't do without."""
    needed = ("README.md", "config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json", MANIFEST,
              "handler.py", "requirements.txt", *CLASS_FILES)  # fmt: skip
    for name in needed:
        if not (folder / name).is_file():
            yield Finding(name, "is missing", "Build the stage folder anew.")
    for name in JSON_FILES:
        if (folder / name).is_file() and _json(folder / name) is None:
            yield Finding(name, "is not JSON", "Build the stage folder anew.")


def find_pickles(folder: Path) -> Iterator[Finding]:
    """Pickles, by name and by content: loading one runs what it says."""
    fix = "Delete it; weights go into safetensors."
    for path in staged_files(folder):
        name = _name(path, folder)
        if path.suffix in PICKLE_NAMES:
            yield Finding(name, "has the name of a pickle", fix)
        # Weights have a search of their own; the length at their head can look like a pickle's first bytes.
        elif path.suffix != ".safetensors" and is_pickle(path):
            yield Finding(name, "is a pickle, whatever its name", fix)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or an archive of torch's with one inside."""
    with path.open("rb") as file:
        head = file.read(2)
        if head[:1] == b"\x80" and len(head) == 2 and head[1] <= 5:
            return True
    if head == b"PK":
        try:
            return any(name.endswith(".pkl") for name in zipfile.ZipFile(path).namelist())
        except zipfile.BadZipFile:
            return False
    if (path.suffix in TEXT_NAMES and path.suffix) or path.stat().st_size > 2**20 or head[:1] not in b"(]}c":
        return False
    try:
        return any(code.name == "STOP" for code, _, _ in pickletools.genops(io.BytesIO(path.read_bytes())))
    except Exception:  # what is no pickle fails in many ways
        return False


def find_secrets(folder: Path) -> Iterator[Finding]:
    """Tokens and keys, and paths of the machine that made the folder."""
    for path in staged_files(folder):
        if path.suffix not in TEXT_NAMES:
            continue
        text = _text(path)
        name = _name(path, folder)
        for kind, pattern in SECRETS.items():
            if pattern.search(text):
                yield Finding(name, f"holds {kind}", "Revoke it now, then take it out.")
        # A vocabulary and a licence hold paths of nobody.
        exempt = path.name == "tokenizer.json" or path.name.startswith("LICENSE")
        found = None if exempt else LOCAL_PATHS.search(text)
        if found:
            yield Finding(name, f"holds a path of a machine, {found.group()}", "Take it out, or put a Hub id there.")


def find_broken_weights(folder: Path) -> Iterator[Finding]:
    """Weight files that are torn, missing, stale or twice there, against the index."""
    rebuild = "Build the stage folder anew from a complete run."
    present: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                present[path.name] = set(file.keys())
        except (SafetensorError, OSError) as error:
            present[path.name] = set()
            yield Finding(path.name, f"can't be read ({error})", rebuild)
    if not present:
        yield Finding("model.safetensors", "there are no weights", rebuild)
    index_file = folder / "model.safetensors.index.json"
    if not index_file.exists():
        for name in present.keys() - {"model.safetensors"}:
            yield Finding(name, "is a shard without an index", rebuild)
        return
    index = _json(index_file)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        yield Finding(index_file.name, "has no weight_map", rebuild)
        return
    for name in sorted(set(weight_map.values()) - present.keys()):
        yield Finding(name, "is in the index and not in the folder", rebuild)
    for name in sorted(present.keys() - set(weight_map.values())):
        yield Finding(name, "is not in the index: a stale shard", "Delete it.")
    seen: dict[str, str] = {}
    for name in sorted(set(weight_map.values()) & present.keys()):
        expected = {tensor for tensor, shard in weight_map.items() if shard == name}
        if expected - present[name]:
            yield Finding(name, f"lacks {sorted(expected - present[name])[0]}, which the index puts there", rebuild)
        for tensor in sorted(present[name]):
            if tensor in seen:
                yield Finding(name, f"holds {tensor}, as {seen[tensor]} does", rebuild)
                break
            seen[tensor] = name


def find_broken_code(folder: Path) -> Iterator[Finding]:
    """Class files that don't parse, lack what `auto_map` names, or import what a stranger does not have."""
    trees: dict[str, ast.Module] = {}
    for path in sorted(folder.glob("*.py")):
        try:
            trees[path.stem] = ast.parse(_text(path))
        except (SyntaxError, ValueError) as error:
            yield Finding(path.name, f"is not Python ({error})", "Build the stage folder anew.")
    for stem, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                module = (node.module or "").split(".")[0]
                if node.level > 1 or module not in trees:
                    yield Finding(f"{stem}.py", f"imports .{module}, which is not here", "Put the file beside it.")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                if name.split(".")[0] in OURS:
                    yield Finding(f"{stem}.py", f"imports {name} of this repository", "Class files stand alone.")
    config = _json(folder / "config.json")
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    if not isinstance(auto_map, dict) or not auto_map:
        yield Finding("config.json", "has no auto_map, so nobody can load the model", "Save it with its class files.")
        return
    for name, value in auto_map.items():
        module, _, class_name = str(value).rpartition(".")
        if "--" in module:
            yield Finding("config.json", f"auto_map {name} points to another repository, {value}", "Name a file here.")
        elif module not in trees:
            yield Finding("config.json", f"auto_map {name} names {module}.py, which is not here", "Add the file.")
        elif class_name not in {node.name for node in trees[module].body if isinstance(node, ast.ClassDef)}:
            yield Finding("config.json", f"auto_map {name}: {module}.py has no class {class_name}", "Name one it has.")


def split_card(folder: Path) -> tuple[Any, str]:
    """The card's metadata and text; metadata is `None` where it can't be read."""
    match = re.match(r"---\n(.*?)\n---\n(.*)", _text(folder / "README.md"), re.DOTALL)
    if match is None:
        return None, _text(folder / "README.md")
    try:
        return yaml.safe_load(match[1]), match[2]
    except yaml.YAMLError:
        return None, match[2]


def find_card_faults(folder: Path) -> Iterator[Finding]:
    """Sections that are missing, empty or hold a placeholder, and pictures that are not there."""
    _, text = split_card(folder)
    bodies = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for title in SECTIONS:
        if title not in bodies:
            yield Finding("README.md", f"has no section '{title}'", "Build the card anew.")
        elif not bodies[title].strip():
            yield Finding("README.md", f"section '{title}' is empty", "Write it in the recipe's prose.")
    found = PLACEHOLDERS.search(text)
    if found:
        yield Finding("README.md", f"holds a placeholder, {found.group()!r}", "Write what belongs there.")
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        if not target.startswith("https://") and not (folder / target).is_file():
            yield Finding("README.md", f"shows {target}, which is not here", "Add the picture, or take it out.")


def find_metadata_faults(folder: Path) -> Iterator[Finding]:
    """Metadata that the Hub refuses, or does nothing with."""
    metadata, _ = split_card(folder)
    if not isinstance(metadata, dict):
        yield Finding("README.md", "has no readable YAML block at its top", "Build the card anew.")
        return
    for name in sorted(METADATA - metadata.keys()):
        yield Finding("README.md", f"metadata has no {name}", "Build the card anew.")
    for name, value in (("pipeline_tag", "image-text-to-text"), ("library_name", "transformers")):
        if metadata.get(name, value) != value:
            yield Finding("README.md", f"metadata {name} is {metadata[name]!r}", f"Set it to {value}.")
    tags = metadata.get("tags") or []
    for tag in sorted(TAGS - set(tags if isinstance(tags, list) else [])):
        yield Finding("README.md", f"metadata has no tag {tag}", "Add it: the Hub's snippets depend on it.")
    for name in ("base_model", "datasets"):
        values = metadata.get(name) or []
        for value in values if isinstance(values, list) else [values]:
            if not HUB_ID.fullmatch(str(value)):
                yield Finding("README.md", f"metadata {name} {value!r} is no Hub id", "Write owner/name.")
    for number, widget in enumerate(metadata.get("widget") or []):
        parts = [part for message in widget.get("messages", []) for part in message.get("content", [])]
        pictures = [part.get("url", "") for part in parts if part.get("type") == "image"]
        if not (widget.get("output") or {}).get("text"):
            yield Finding("README.md", f"widget {number} has no output", "Build it anew: the model answers it.")
        for picture in pictures:
            if not (folder / picture).is_file():
                yield Finding("README.md", f"widget {number} shows {picture}, which is not here", "Add the picture.")


def read_manifest_fields(folder: Path) -> dict[str, Any]:
    """The manifest, empty where it can't be read."""
    manifest = _json(folder / MANIFEST)
    return manifest if isinstance(manifest, dict) else {}


def find_licence_faults(folder: Path) -> Iterator[Finding]:
    """What the licence of the parts asks for and is not there."""
    metadata, text = split_card(folder)
    metadata = metadata if isinstance(metadata, dict) else {}
    manifest = read_manifest_fields(folder)
    identifier = str(metadata.get("license"))
    named = metadata.get("base_model") or []
    bases = {str(base) for base in (named if isinstance(named, list) else [named])}
    parts = [manifest.get("text_model"), manifest.get("vision_model")]
    recorded = {part for part in parts if part is not None}
    if bases != recorded:
        reason = f"metadata base_model names {', '.join(sorted(bases)) or 'none'}, the manifest "
        yield Finding("README.md", reason + (", ".join(sorted(recorded)) or "none"), "Build the card anew.")
    licences = []
    for base in sorted(bases | recorded):
        try:
            licences.append(known_licence(base))
        except UnknownLicenceError as error:
            yield Finding("README.md", str(error).rstrip("."), "Name what it is made from.")
            return
    if None in parts and identifier in BY_IDENTIFIER:
        licences.append(BY_IDENTIFIER[identifier])
    licence = strictest(licences)
    if identifier != licence.identifier:
        yield Finding("README.md", f"metadata license is {identifier}", f"Its parts ask for {licence.identifier}.")
    for name in licence.files:
        if not _text(folder / name).strip():
            yield Finding(name, f"is missing or empty, and the {licence.title} asks for it", "Build the folder anew.")
    if licence.attribution and licence.attribution not in text:
        yield Finding("README.md", f"does not say '{licence.attribution}'", f"The {licence.title} asks for it.")
    name = str(manifest.get("repo_id", "/")).split("/")[-1]
    if licence.name_prefix and not name.startswith(licence.name_prefix):
        yield Finding(MANIFEST, f"the name {name!r} does not begin with {licence.name_prefix}", "Choose another name.")
    if licence is not APACHE and "Apache License" in _text(folder / "LICENSE")[:200]:
        yield Finding("LICENSE", "is Apache's", f"Put the {licence.title} there.")


def find_snippet_faults(folder: Path) -> Iterator[Finding]:
    """Snippets of the card that don't parse, or load something else than this revision of this repository."""
    _, text = split_card(folder)
    manifest = read_manifest_fields(folder)
    repo_id, revision = manifest.get("repo_id"), manifest.get("revision")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not snippets:
        yield Finding("README.md", "shows no snippet that loads the model", "Build the card anew.")
    for number, snippet in enumerate(snippets):
        try:
            tree = ast.parse(snippet)
        except SyntaxError as error:
            yield Finding("README.md", f"snippet {number} is not Python ({error})", "Mend it.")
            continue
        constants = assigned_constants(tree)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and loads_code(node)]
        for call in calls:
            given = next((keyword.value for keyword in call.keywords if keyword.arg == "revision"), None)
            if given is None:
                yield Finding("README.md", f"snippet {number} loads without a revision", "Pin it: code is run.")
            elif constant_values(given, constants) != {revision}:
                reason = f"snippet {number} loads at a revision, {ast.unparse(given)}, that is not {revision}"
                yield Finding("README.md", reason, "Build the card anew.")
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        if calls and repo_id not in strings:
            yield Finding("README.md", f"snippet {number} does not name {repo_id}", "Build the card anew.")


def loads_code(call: ast.Call) -> bool:
    """Whether a call may load a repository's code."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    return name in ("from_pretrained", "pipeline") or "trust_remote_code" in {entry.arg for entry in call.keywords}


def assigned_constants(tree: ast.Module) -> dict[str, set[Any]]:
    """What a snippet assigns to each name, one by one or as a tuple; `None` stands for what is no constant."""
    values: dict[str, set[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        constant = value.value if isinstance(value, ast.Constant) else None
                        values.setdefault(name.id, set()).add(constant)
    return values


def constant_values(node: ast.expr, constants: dict[str, set[Any]]) -> set[Any]:
    """What an argument can be: a constant, or what was assigned to its name."""
    if isinstance(node, ast.Constant):
        return {node.value}
    return constants.get(node.id, set()) if isinstance(node, ast.Name) else set()


def find_manifest_faults(folder: Path) -> Iterator[Finding]:
    """Files that are not what the manifest says, and a commit that nobody can look up."""
    manifest = _json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        if (folder / MANIFEST).exists():
            yield Finding(MANIFEST, "can't be read", "Build the stage folder anew.")
        return
    for field in ("repo_id", "revision"):
        if not isinstance(manifest.get(field), str) or not manifest[field]:
            yield Finding(MANIFEST, f"has no {field}", "Build the stage folder anew.")
    files = manifest["files"]
    present = {_name(path, folder): path for path in staged_files(folder) if not path.is_symlink()}
    for name in sorted(files.keys() - present.keys()):
        yield Finding(name, "is in the manifest and not in the folder", "Build the stage folder anew.")
    for name in sorted(present.keys() - files.keys()):
        yield Finding(name, "is not in the manifest", "Delete it, or build the stage folder anew.")
    for name in sorted(files.keys() & present.keys()):
        if files[name].get("sha256") != sha256(present[name]):
            yield Finding(name, "is not what the manifest says: it was changed", "Build the stage folder anew.")
    if manifest.get("commit_is_clean") is False:
        yield Finding(MANIFEST, "the run was made with uncommitted changes", "Commit, and train from a clean tree.")


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    find_unlisted_files, find_missing_files, find_pickles, find_secrets, find_broken_weights, find_broken_code,
    find_card_faults, find_metadata_faults, find_licence_faults, find_snippet_faults, find_manifest_faults,
)  # fmt: skip
