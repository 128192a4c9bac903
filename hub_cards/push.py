"""Push a stage folder to the Hub in one commit with a tag."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from hub_cards.check import check
from hub_cards.manifest import MANIFEST, sha256
from hub_cards.verify import KEPT, NETWORK_ERRORS, ReleaseError, reason


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
