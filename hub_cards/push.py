"""Push a stage folder to the Hub: one commit, a tag, the visibility. Repeating a push resumes it where it stopped."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from hub_cards.check import check
from hub_cards.client import HUB_ERRORS, explain, forget_interrupt, interrupts_at_requests, status_of
from hub_cards.manifest import MANIFEST
from hub_cards.verify import KEPT, ReleaseError


# Bytes up to which a file is held in memory, so that what is hashed is what is sent. The Hub accepts larger files only
# through LFS, where the hash is that of the upload.
IN_MEMORY = 10 * 2**20
IS_PUBLIC = (
    "{} is public, so a push would be visible at once; nothing was pushed. Push with --public, or make the repository "
    "private first."
)
VERBS = ("to add", "to change", "to delete", "as they are")


@dataclass(frozen=True)
class State:
    """What is on the Hub.

    Attributes:
        repo_id: Name of the repository.
        tag: Name of the release's tag.
        head: Commit that the repository is at; `None` if the token can see no repository.
        visibility: `"new"`, `"private"` or `"public"`.
        tagged: Commit that has the tag; `None` without one.
    """

    repo_id: str
    tag: str
    head: str | None = None
    visibility: str = "new"
    tagged: str | None = None

    def __str__(self) -> str:
        if self.head is None:
            return f"{self.repo_id} is new: this token can see no such repository"
        tag = f"{'without' if self.tagged is None else 'with'} the tag {self.tag}"
        elsewhere = f" on {self.tagged}" if self.tagged not in (None, self.head) else ""
        return f"{self.repo_id} is {self.visibility}, at {self.head}, {tag}{elsewhere}"


@dataclass(frozen=True)
class Plan:
    """What a push would change.

    Attributes:
        state: What is on the Hub.
        add, change, delete, keep: Paths.
    """

    state: State
    add: list[str]
    change: list[str]
    delete: list[str]
    keep: list[str]

    def describe(self) -> str:
        """The state, a line for each path, and the counts."""
        groups = (self.add, self.change, self.delete, self.keep)
        lines = [f"{sign} {path}" for sign, paths in zip("+~-=", groups, strict=True) for path in paths]
        counts = ", ".join(f"{len(paths)} {verb}" for paths, verb in zip(groups, VERBS, strict=True))
        return "\n".join([str(self.state), *lines, counts])


def read_manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a stage folder without findings, with its own hash added to those of the files.

    Raises:
        ReleaseError: if there are findings.
    """
    findings = check(stage)
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ReleaseError(f"{stage} can't be published:\n{listed}")
    content = (stage / MANIFEST).read_bytes()
    manifest = json.loads(content)
    manifest["files"][MANIFEST] = {"sha256": hashlib.sha256(content).hexdigest()}
    return manifest


def ask_state(api: HfApi, repo_id: str, tag: str) -> State:
    """What is on the Hub now. Raises `ReleaseError` if the tag is a branch's name, else one of `HUB_ERRORS`."""
    try:
        info, refs = api.repo_info(repo_id), api.list_repo_refs(repo_id)
    except RepositoryNotFoundError:
        return State(repo_id, tag)
    if tag in {ref.name for ref in refs.branches}:
        raise ReleaseError(f"{tag} is a branch of {repo_id} and can't be a tag. Build with another --revision.")
    tagged = {ref.name: ref.target_commit for ref in refs.tags}.get(tag)
    return State(repo_id, tag, info.sha, "private" if info.private else "public", tagged)


def plan_push(stage: Path, manifest: dict[str, Any], api: HfApi, public: bool) -> Plan:
    """Compare the stage folder with the Hub: with the tag if it exists, otherwise with the head.

    Args:
        stage: Stage folder.
        manifest: What [`read_manifest`] returned for it.
        api: Client to ask with.
        public: Whether the repository is to be public.

    Raises:
        ReleaseError: if the tag is on other files, the repository is unexpectedly public, or the Hub can't be asked.
        KeyboardInterrupt: with what is on the Hub.
    """
    repo_id, tag, files = manifest["repo_id"], manifest["revision"], manifest["files"]
    remote: dict[str, RepoFile] = {}
    try:
        state = ask_state(api, repo_id, tag)
        if state.head is not None:
            entries = api.list_repo_tree(repo_id, recursive=True, revision=tag if state.tagged else state.head)
            remote = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        same = {path for path in files.keys() & remote if is_same(stage / path, files[path]["sha256"], remote[path])}
    except (KeyboardInterrupt, *HUB_ERRORS) as error:
        raise stopped(error, api, repo_id, tag) from error
    plan = Plan(
        state,
        add=sorted(files.keys() - remote.keys()),
        change=sorted((files.keys() & remote.keys()) - same),
        delete=sorted(remote.keys() - files.keys() - KEPT),
        keep=sorted(same),
    )
    differing = plan.add + plan.change + plan.delete
    if state.tagged is not None and differing:
        raise ReleaseError(
            f"{repo_id} already has a tag {tag}, which is not moved, and {differing[0]} differs from it. Build with "
            "another --revision."
        )
    if state.visibility == "public" and not public and state.tagged is None:
        raise ReleaseError(IS_PUBLIC.format(repo_id))
    return plan


def is_same(path: Path, digest: str, entry: RepoFile) -> bool:
    """Whether the Hub has the checked file: by sha256 for large files, by git's hash for others."""
    if entry.lfs is not None:
        return entry.lfs.sha256 == digest
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return git == entry.blob_id and hashlib.sha256(content).hexdigest() == digest


def push(stage: Path, manifest: dict[str, Any], plan: Plan, api: HfApi, public: bool) -> State:
    """Publish a stage folder: one commit, which also deletes stale files, on the head that was seen, then a tag.

    Nothing is created or uploaded twice. A repository is created private, and made public, if asked, only after commit
    and tag.

    Args:
        stage: Stage folder.
        manifest: What [`read_manifest`] returned for it.
        plan: What [`plan_push`] returned for these.
        api: Client with a token that has write access.
        public: Make the repository public.

    Returns:
        What is on the Hub.

    Raises:
        ReleaseError: if it did not succeed.
        KeyboardInterrupt: with what is on the Hub.
    """
    state = plan.state
    try:
        with interrupts_at_requests():
            if state.head is None:
                api.create_repo(state.repo_id, private=True, exist_ok=True)
                plan = plan_push(stage, manifest, api, public)
                state = plan.state
                if state.head is None:
                    raise ReleaseError(
                        f"{state.repo_id} was created but can't be seen: may the token in HF_TOKEN read it?"
                    )
            if plan.add or plan.change or plan.delete:
                state = replace(state, head=commit(stage, manifest["files"], plan, api, public))
            if state.tagged is None:
                api.create_tag(state.repo_id, tag=state.tag, revision=state.head)
                state = replace(state, tagged=state.head)
            if public and state.visibility != "public":
                api.update_repo_settings(state.repo_id, private=False)
                state = replace(state, visibility="public")
    except ReleaseError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # the client raises errors of many types
        raise stopped(error, api, state.repo_id, state.tag, state) from error
    return state


def commit(stage: Path, files: dict[str, dict[str, str]], plan: Plan, api: HfApi, public: bool) -> str:
    """Upload and commit the checked files, and return the commit.

    Raises:
        ReleaseError: if a file was changed after the check, or the repository has unexpectedly become public.
    """
    repo_id, additions = plan.state.repo_id, []

    def stop_if_public() -> None:
        if not public and not api.repo_info(repo_id).private:
            raise ReleaseError(IS_PUBLIC.format(repo_id))

    for path in plan.add + plan.change:
        is_small = (stage / path).stat().st_size <= IN_MEMORY
        additions.append(CommitOperationAdd(path, (stage / path).read_bytes() if is_small else stage / path))
    stop_if_public()
    api.preupload_lfs_files(repo_id, additions)
    for addition in additions:  # large files were hashed during the upload, which saves a read
        if addition.upload_info.sha256.hex() != files[addition.path_in_repo]["sha256"]:
            raise ReleaseError(f"{addition.path_in_repo} was changed after it was checked: nothing was committed.")
    operations = additions + [CommitOperationDelete(path, is_folder=False) for path in plan.delete]
    stop_if_public()  # as late as possible: a commit can require its parent, but not the visibility
    message = f"Release {plan.state.tag}"
    return api.create_commit(repo_id, operations, commit_message=message, parent_commit=plan.state.head).oid


def stopped(
    error: BaseException, api: HfApi, repo_id: str, tag: str, last: State | None = None
) -> ReleaseError | KeyboardInterrupt:
    """The error to raise for a stopped push: one line, with the state of the Hub, or its last known state."""
    forget_interrupt()
    try:
        now = ask_state(api, repo_id, tag)
    except (Exception, KeyboardInterrupt):  # as in push, and a second interrupt must not wait
        now = None
    seen = "The state of the Hub is unknown." if now is None else f"On the Hub, {now}."
    if last is not None and last.head is not None and (now is None or now.head is None):
        seen = f"On the Hub, when last seen, {last}."  # a token that is no longer valid sees nothing
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"Interrupted. {seen} Push again to continue from there.")
    if status_of(error) == 412:
        return ReleaseError(
            f"Somebody else committed in the meantime, so nothing was committed. {seen} Check it, and push again."
        )
    return ReleaseError(f"The push stopped ({explain(error)}). {seen} Push again to continue from there.")
