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
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from safetensors.torch import load_file

from hub_cards.check import check
from hub_cards.manifest import MANIFEST, sha256


# The Hub makes it, and keeps by it which files are large.
KEPT = {".gitattributes"}
# Variables by which the Hub's client and transformers find a token, a cache or a mode; the fresh process sees but two.
HIDDEN = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTORCH_TRANSFORMERS_")
PASSED_ON = {"HF_ENDPOINT", "HF_HUB_DISABLE_XET"}
# What stops a question to the Hub: errors of the client's HTTP library, which are no OSError, and of the machine.
NETWORK_ERRORS = (HTTPError, OSError)


class ReleaseError(RuntimeError):
    """A push or a verification that did not succeed; the message says what is on the Hub now."""


@dataclass(frozen=True)
class Plan:
    """What a push would change.

    Attributes:
        head: The commit that the repository is at; `None` if there is no repository yet.
        visibility: `"new"`, `"private"` or `"public"`.
        add, change, delete, keep: Paths.
    """

    head: str | None
    visibility: str
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


def plan_push(stage: Path, manifest: dict[str, Any], api: HfApi, public: bool) -> Plan:
    """Compare the stage folder with what is on the Hub.

    Args:
        stage: Stage folder.
        manifest: What [`read_manifest`] returned for it.
        api: Client to ask with.
        public: Whether the repository is to be public.

    Raises:
        ReleaseError: if the tag is there already, the repository is public and is not to be, or can't be asked about.
    """
    repo_id, tag = manifest["repo_id"], manifest["revision"]
    local = {path.relative_to(stage).as_posix(): path for path in sorted(stage.rglob("*")) if path.is_file()}
    try:
        info = api.repo_info(repo_id)
        tags = {ref.name for ref in api.list_repo_refs(repo_id).tags}
        entries = [entry for entry in api.list_repo_tree(repo_id, recursive=True) if isinstance(entry, RepoFile)]
    except RepositoryNotFoundError:
        return Plan(None, "new", list(local), [], [], [])
    except NETWORK_ERRORS as error:
        raise ReleaseError(f"{repo_id} can't be compared with what is on the Hub ({reason(error)}).") from error
    if tag in tags:
        raise ReleaseError(
            f"{repo_id} has a tag {tag} already, which stays what it is. Build with another --revision."
        )
    if not info.private and not public:
        raise ReleaseError(
            f"{repo_id} is public, so what is pushed is seen by all at once: push with --public, or make the "
            "repository private first."
        )
    remote = {entry.path: entry for entry in entries}
    same = [
        path
        for path in local
        if path in remote and is_same(local[path], manifest["files"].get(path, {}).get("sha256"), remote[path])
    ]
    return Plan(
        info.sha,
        "private" if info.private else "public",
        add=[path for path in local if path not in remote],
        change=[path for path in local if path in remote and path not in same],
        delete=sorted(remote.keys() - local.keys() - KEPT),
        keep=same,
    )


def is_same(path: Path, digest: str | None, entry: RepoFile) -> bool:
    """Whether a file is what the Hub has: by sha256 of large files, by git's hash of others."""
    if entry.lfs is not None:
        return entry.lfs.sha256 == (digest or sha256(path))
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == entry.blob_id


def push(stage: Path, manifest: dict[str, Any], plan: Plan, api: HfApi, public: bool) -> str:
    """Publish a stage folder: one commit that also deletes what is stale, on the head that was seen, then a tag.

    What was uploaded before an interruption is not uploaded again. A repository is made private, and made public, if
    it is to be, only once commit and tag are there.

    Args:
        stage: Stage folder.
        manifest: What [`read_manifest`] returned for it.
        plan: What [`plan_push`] returned for these.
        api: Client with a token that may write.
        public: Make the repository public.

    Returns:
        The commit.

    Raises:
        ReleaseError: if it did not succeed.
    """
    repo_id, tag = manifest["repo_id"], manifest["revision"]
    try:
        if plan.head is None:
            api.create_repo(repo_id, private=True, exist_ok=True)
            plan = plan_push(stage, manifest, api, public)
            if plan.head is None:
                raise ReleaseError(f"{repo_id} was made and can't be seen: may the token in HF_TOKEN read it?")
        commit = plan.head
        if plan.add or plan.change or plan.delete:
            operations = [CommitOperationAdd(path, str(stage / path)) for path in plan.add + plan.change]
            deletions = [CommitOperationDelete(path, is_folder=False) for path in plan.delete]
            commit = api.create_commit(
                repo_id, [*operations, *deletions], commit_message=f"Release {tag}", parent_commit=plan.head
            ).oid
        api.create_tag(repo_id, tag=tag, revision=commit)
        if public and plan.visibility != "public":
            api.update_repo_settings(repo_id, private=False)
    except ReleaseError:
        raise
    except Exception as error:  # the client lets errors of its HTTP library through, of many types
        raise ReleaseError(f"{explain(error)} {state_of(api, repo_id, tag)}") from error
    return commit


def reason(error: Exception) -> str:
    """An error's type and the first line of its message, if it has one."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def explain(error: Exception) -> str:
    """What went wrong, and what helps."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 412:
        return "Somebody else committed in the meantime, so nothing was. Look at what they did, and push again."
    if status in (401, 403):
        return "The token in HF_TOKEN may not write here."
    return f"The push stopped ({reason(error)}). Push again: it goes on from there."


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
    """What a fresh download showed.

    Attributes:
        files: How many there are.
        largest_difference: Of logits and hidden states to those of the stage folder; `None` where these were not
            compared.
        snippet: What the card's snippet printed; `None` if it did not run to its end.
        problems: Empty if all is as it was staged.
    """

    files: int
    largest_difference: float | None
    snippet: str | None
    problems: list[str]


def verify(repo_id: str, revision: str, stage: Path | None, token: str | None) -> Verdict:
    """Download into an empty cache in a fresh process, and compare with the stage folder.

    Files by the manifest's sha256; logits, the base model's hidden states and greedy tokens with those of the folder;
    the card's own snippet is run. Without a folder, files are compared with the manifest in the repository, and logits
    with nothing. The token is passed on only if the repository can't be read without one.

    Raises:
        ReleaseError: if there is nothing to download, or the stage folder itself is not whole.
    """
    if stage is not None and not (stage / MANIFEST).exists():
        raise ReleaseError(f"{stage} holds no {MANIFEST}: give the stage folder that was pushed.")
    used_token = None if is_public(repo_id) else token
    find_revision(repo_id, revision, used_token)
    with tempfile.TemporaryDirectory() as scratch:
        downloaded, local = Path(scratch) / "downloaded", Path(scratch) / "local"
        failure = load_fresh(repo_id, revision, downloaded, used_token)
        if not (downloaded / "hashes.json").exists():
            raise ReleaseError(f"{repo_id} at {revision} can't be downloaded: {failure}")
        hashes = json.loads((downloaded / "hashes.json").read_text(encoding="utf-8"))
        problems = compare_files(hashes, (downloaded if stage is None else stage) / MANIFEST)
        results, snippet, difference = downloaded / "results.safetensors", downloaded / "snippet.txt", None
        if not results.exists():
            problems.append(f"the model can't be loaded: {failure}")
        elif stage is not None:
            local_failure = load_fresh(str(stage.resolve()), None, local, None)
            if local_failure is not None:
                raise ReleaseError(f"{stage} can't be loaded: {local_failure}")
            ours = load_file(local / results.name)
            difference, differences = compare_results(load_file(results), ours)
            problems += differences
        if results.exists() and not snippet.exists():
            problems.append(f"the card's snippet fails: {failure}")
        printed = snippet.read_text(encoding="utf-8") if snippet.exists() else None
        return Verdict(len(hashes), difference, printed, problems)


def is_public(repo_id: str) -> bool:
    """Whether the repository can be read without a token.

    Raises:
        ReleaseError: if it could not be asked, so that no token is sent after an error.
    """
    try:
        HfApi(token=False).repo_info(repo_id)
    except RepositoryNotFoundError:
        return False
    except NETWORK_ERRORS as error:
        raise ReleaseError(f"The Hub could not be asked whether {repo_id} is public ({reason(error)}).") from error
    return True


def find_revision(repo_id: str, revision: str, token: str | None) -> None:
    """Raises `ReleaseError` if there is no such revision to read."""
    try:
        HfApi(token=token or False).repo_info(repo_id, revision=revision)
    except RevisionNotFoundError as error:
        raise ReleaseError(f"{repo_id} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        needed = "HF_TOKEN, which is not set" if token is None else "another token than the one in HF_TOKEN"
        raise ReleaseError(f"{repo_id} is not there, or is private and needs {needed}.") from error
    except NETWORK_ERRORS as error:
        raise ReleaseError(f"{repo_id} at {revision} could not be asked about ({reason(error)}).") from error


def compare_files(hashes: dict[str, str], manifest_file: Path) -> list[str]:
    """What differs between downloaded files, by their hashes, and a manifest, that itself among them."""
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        files[MANIFEST] = sha256(manifest_file)
    except FileNotFoundError:
        return [f"{MANIFEST}: is missing, so no file could be compared"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: can't be read, so no file could be compared ({reason(error)})"]
    problems = [
        f"{name}: {'is missing' if name not in hashes else 'has another sha256'}"
        for name, digest in files.items()
        if hashes.get(name) != digest
    ]
    return problems + [f"{name}: was not staged" for name in sorted(hashes.keys() - files.keys() - KEPT)]


def compare_results(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> tuple[float | None, list[str]]:
    """The largest difference between what two folders compute, `None` where shapes differ, and what is not equal."""
    differences, problems = [], []
    for name in ("logits", "last_hidden_state"):
        if theirs[name].shape != ours[name].shape:
            problems.append(f"{name}: of shape {list(theirs[name].shape)}, not {list(ours[name].shape)}")
            continue
        differences.append((theirs[name] - ours[name]).abs().max())
        if not torch.equal(theirs[name], ours[name]):  # which a NaN is to nothing
            problems.append(f"{name}: differ by up to {differences[-1].item():.3g}")
    if not torch.equal(theirs["tokens"], ours["tokens"]):
        problems.append("greedy tokens differ")
    return torch.stack(differences).max().item() if differences else None, problems


def load_fresh(source: str, revision: str | None, output: Path, token: str | None) -> str | None:
    """Run `fresh_load.py` in a process with an empty cache and without this repository's modules.

    Returns:
        What went wrong, `None` if nothing did. What was done before that is in `output`.
    """
    command = [sys.executable, "-I", str(Path(__file__).with_name("fresh_load.py")), source, "--output", str(output)]
    command += ["--revision", revision] if revision is not None else []
    environment = {
        name: value for name, value in os.environ.items() if name in PASSED_ON or not name.startswith(HIDDEN)
    }
    with tempfile.TemporaryDirectory() as home:
        environment |= {"HF_HOME": home} | ({"HF_TOKEN": token} if token is not None else {})
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
