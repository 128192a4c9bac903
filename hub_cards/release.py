"""Push a stage folder to the Hub in one commit with a tag, and verify it by loading it as a stranger."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from safetensors.torch import load_file

from hub_cards.build import MANIFEST, sha256
from hub_cards.check import check


# The Hub makes it, and keeps by it which files are large.
KEPT = {".gitattributes"}


class ReleaseError(RuntimeError):
    """A push or a verification that did not succeed; the message says what is on the Hub now."""


@dataclass(frozen=True)
class Plan:
    """What a push would change.

    Attributes:
        head: The commit that the repository is at; `None` if there is no repository yet.
        add, change, delete, keep: Paths.
    """

    head: str | None
    add: list[str]
    change: list[str]
    delete: list[str]
    keep: list[str]

    def describe(self) -> str:
        """A line for each path, and a sum."""
        lines = [f"{sign} {path}" for sign, paths in zip("+~-=", self._groups(), strict=True) for path in paths]
        counts = ", ".join(f"{len(paths)} {verb}" for paths, verb in zip(self._groups(), VERBS, strict=True))
        return "\n".join([*lines, counts])

    def _groups(self) -> tuple[list[str], ...]:
        return self.add, self.change, self.delete, self.keep


VERBS = ("to add", "to change", "to delete", "as they are")


def read_manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a stage folder that has no findings.

    Raises:
        ReleaseError: if it has some.
    """
    findings = check(stage)
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ReleaseError(f"{stage} is not to be published:\n{listed}")
    return json.loads((stage / MANIFEST).read_text(encoding="utf-8"))


def plan_push(stage: Path, api: HfApi, repo_id: str, tag: str) -> Plan:
    """Compare the stage folder with what is on the Hub.

    Raises:
        ReleaseError: if the tag is there already.
    """
    local = {path.relative_to(stage).as_posix(): path for path in sorted(stage.rglob("*")) if path.is_file()}
    try:
        head = api.repo_info(repo_id).sha
    except RepositoryNotFoundError:
        return Plan(None, list(local), [], [], [])
    if tag in {ref.name for ref in api.list_repo_refs(repo_id).tags}:
        raise ReleaseError(
            f"{repo_id} has a tag {tag} already, which stays what it is. Build with another --revision."
        )
    remote = {
        entry.path: entry for entry in api.list_repo_tree(repo_id, recursive=True) if isinstance(entry, RepoFile)
    }
    same = [path for path in local if path in remote and is_same(local[path], remote[path])]
    return Plan(
        head,
        add=[path for path in local if path not in remote],
        change=[path for path in local if path in remote and path not in same],
        delete=sorted(remote.keys() - local.keys() - KEPT),
        keep=same,
    )


def is_same(path: Path, entry: RepoFile) -> bool:
    """Whether a file is what the Hub has: by sha256 of large files, by git's hash of others."""
    if entry.lfs is not None:
        return entry.lfs.sha256 == sha256(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == entry.blob_id


def push(stage: Path, api: HfApi, public: bool, plan: Plan | None = None) -> str:
    """Publish a stage folder: one commit that also deletes what is stale, on the head that was seen, then a tag.

    What was uploaded before an interruption is not uploaded again. A repository is made private, and made public, if
    it is to be, only once commit and tag are there.

    Returns:
        The commit.

    Raises:
        ReleaseError: if it did not succeed.
    """
    manifest = read_manifest(stage)
    repo_id, tag = manifest["repo_id"], manifest["revision"]
    plan = plan or plan_push(stage, api, repo_id, tag)
    try:
        head = plan.head
        if head is None:
            api.create_repo(repo_id, private=True, exist_ok=True)
            plan = plan_push(stage, api, repo_id, tag)
            head = plan.head
        commit = str(head)
        if plan.add or plan.change or plan.delete:
            operations = [CommitOperationAdd(path, str(stage / path)) for path in plan.add + plan.change]
            deletions = [CommitOperationDelete(path, is_folder=False) for path in plan.delete]
            commit = api.create_commit(
                repo_id, [*operations, *deletions], commit_message=f"Release {tag}", parent_commit=head
            ).oid
        api.create_tag(repo_id, tag=tag, revision=commit)
        if public:
            api.update_repo_settings(repo_id, private=False)
    except Exception as error:  # the client lets errors of its HTTP library through, of many types
        raise ReleaseError(f"{explain(error)} {state_of(api, repo_id, tag)}") from error
    return commit


def explain(error: Exception) -> str:
    """What went wrong, and what helps."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 412:
        return "Somebody else committed in the meantime, so nothing was. Look at what they did, and push again."
    if status in (401, 403):
        return "The token in HF_TOKEN may not write here."
    return (
        f"The push stopped ({type(error).__name__}: {str(error).splitlines()[0]}). Push again: it goes on from there."
    )


def state_of(api: HfApi, repo_id: str, tag: str) -> str:
    """What is on the Hub now, as far as it can be asked."""
    try:
        head = api.repo_info(repo_id).sha
        tagged = tag in {ref.name for ref in api.list_repo_refs(repo_id).tags}
    except Exception:  # as above
        return "What is on the Hub could not be asked."
    return f"On the Hub, {repo_id} is at {head}, {'with' if tagged else 'without'} the tag {tag}."


@dataclass(frozen=True)
class Verdict:
    """What a fresh download showed; `problems` is empty if all is as it was staged."""

    files: int
    largest_difference: float
    snippet: str
    problems: list[str]


def verify(repo_id: str, revision: str, stage: Path, token: str | None) -> Verdict:
    """Download into an empty cache in a fresh process, and compare with the stage folder.

    Files by the manifest's sha256; logits, the base model's hidden states and greedy tokens with those of the folder;
    the card's own snippet is run. The token is passed on only if the repository can't be read without one.

    Raises:
        ReleaseError: if it can't be loaded at all.
    """
    manifest = json.loads((stage / MANIFEST).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        downloaded, local = folder / "downloaded", folder / "local"
        load_fresh(repo_id, revision, downloaded, None if is_public(repo_id) else token)
        load_fresh(str(stage.resolve()), None, local, None)
        hashes = json.loads((downloaded / "hashes.json").read_text(encoding="utf-8"))
        problems = [
            f"{name}: {'is missing' if name not in hashes else 'has another sha256'}"
            for name, entry in manifest["files"].items()
            if hashes.get(name) != entry["sha256"]
        ]
        problems += [
            f"{name}: was not staged" for name in hashes.keys() - manifest["files"].keys() - KEPT - {MANIFEST}
        ]
        theirs, ours = (load_file(path / "results.safetensors") for path in (downloaded, local))
        difference = max((theirs[name] - ours[name]).abs().max().item() for name in ("logits", "last_hidden_state"))
        if difference > 0:
            problems.append(f"logits differ by up to {difference:.3g}")
        if not torch.equal(theirs["tokens"], ours["tokens"]):
            problems.append("greedy tokens differ")
        return Verdict(len(hashes), difference, (downloaded / "snippet.txt").read_text(encoding="utf-8"), problems)


def is_public(repo_id: str) -> bool:
    """Whether the repository can be read without a token."""
    try:
        HfApi(token=False).repo_info(repo_id)
    except HfHubHTTPError:
        return False
    return True


def load_fresh(source: str, revision: str | None, output: Path, token: str | None) -> None:
    """Run `fresh_load.py` in a process with an empty cache and without this repository's modules."""
    command = [sys.executable, "-I", str(Path(__file__).with_name("fresh_load.py")), source, "--output", str(output)]
    command += ["--revision", revision] if revision is not None else []
    hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with tempfile.TemporaryDirectory() as home:
        environment |= {"HF_HOME": home} | ({"HF_TOKEN": token} if token is not None else {})
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    if done.returncode != 0:
        raise ReleaseError(f"{source} can't be loaded: {done.stderr.strip().splitlines()[-1]}")
