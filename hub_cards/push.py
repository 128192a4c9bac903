"""Push a release folder to the Hub: one commit, a tag, the visibility. Repeating a push finishes one that stopped."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from common.errors import UserError
from hub_cards.contents import CARD
from hub_cards.release import read_release


# Made by the Hub, to record which files are large.
HUB_FILES = {".gitattributes"}


@dataclass(frozen=True)
class Plan:
    """What a push changes in a repository.

    Attributes:
        repo_id: Its name.
        tag: The tag to set.
        visibility: "private", "public", or "new" where none can be seen.
        head: Commit that the push builds on; `None` in a new repository.
        is_tagged: Whether the tag is there already, on the same files.
        added: Paths that are not there yet.
        changed: Paths whose content is another.
        deleted: Paths that the release doesn't have.
        unchanged: Paths that are there already.
    """

    repo_id: str
    tag: str
    visibility: str
    head: str | None
    is_tagged: bool
    added: list[str]
    changed: list[str]
    deleted: list[str]
    unchanged: list[str]

    def __str__(self) -> str:
        tagged = "with" if self.is_tagged else "without"
        lines = [f"{self.repo_id} is {self.visibility}, {tagged} the tag {self.tag}"]
        for sign, paths in (("+", self.added), ("~", self.changed), ("-", self.deleted), ("=", self.unchanged)):
            lines += [f"{sign} {path}" for path in paths]
        return "\n".join(lines)


def push_release(folder: Path, api: HfApi, public: bool = False) -> Plan:
    """Publish a release folder: one commit, which also deletes stale files, on the head that was seen, then a tag.

    A repository is created private, and made public, if asked for, only after commit and tag. Where a push stopped,
    the next one goes on.

    Args:
        folder: A release folder without faults, see [`~hub_cards.check.require_no_faults`].
        api: The Hub's client.
        public: Whether to make the repository public, or to change one that is.

    Returns:
        What was changed.

    Raises:
        UserError: as [`plan_push`], or if the repository is public unasked.
    """
    plan = plan_push(folder, api)
    if plan.visibility == "public" and not public and not plan.is_tagged:
        raise UserError(f"{plan.repo_id} is public: push with --public, or make it private in its settings.")

    if plan.visibility == "new":
        api.create_repo(plan.repo_id, private=True)
    if not plan.is_tagged:
        commit = commit_files(folder, api, plan)
        api.create_tag(plan.repo_id, tag=plan.tag, revision=commit)
    if public and plan.visibility != "public":
        api.update_repo_settings(plan.repo_id, private=False)
    return plan


def plan_push(folder: Path, api: HfApi) -> Plan:
    """Compare a release folder with the Hub: with the tag if it is there, otherwise with the head.

    Raises:
        UserError: if the tag's name is a branch's, or the tag is on other files.
    """
    release = read_release(folder)
    repo_id = release.repo_id
    tag = release.revision
    local = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        info = api.repo_info(repo_id)
    except RepositoryNotFoundError:
        return Plan(
            repo_id=repo_id,
            tag=tag,
            visibility="new",
            head=None,
            is_tagged=False,
            added=local,
            changed=[],
            deleted=[],
            unchanged=[],
        )

    refs = api.list_repo_refs(repo_id)
    if tag in {branch.name for branch in refs.branches}:
        raise UserError(f"{tag} is a branch of {repo_id} and can't be a tag. Push with another --revision.")
    is_tagged = tag in {ref.name for ref in refs.tags}

    compared = api.verify_repo_checksums(repo_id, local_dir=folder, revision=tag if is_tagged else info.sha)
    added = list(compared.extra_paths)
    changed = [entry["path"] for entry in compared.mismatches]
    deleted = sorted(set(compared.missing_paths) - HUB_FILES)
    different = [*added, *changed, *deleted]
    if is_tagged and different:
        raise UserError(
            f"{repo_id} already has a tag {tag}, which is not moved, and {different[0]} differs from it. Push with "
            "another --revision."
        )
    return Plan(
        repo_id=repo_id,
        tag=tag,
        visibility="private" if info.private else "public",
        head=info.sha,
        is_tagged=is_tagged,
        added=added,
        changed=changed,
        deleted=deleted,
        unchanged=[path for path in local if path not in different],
    )


def commit_files(folder: Path, api: HfApi, plan: Plan) -> str | None:
    """Make the commit that a plan asks for, if it changes anything. Returns the head after it.

    Raises:
        UserError: if the Hub refuses the card.
    """
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for path in [*plan.added, *plan.changed]:
        operations.append(CommitOperationAdd(path, folder / path))
    for path in plan.deleted:
        operations.append(CommitOperationDelete(path, is_folder=False))
    if not operations:
        return plan.head

    message = f"Release {plan.tag}"
    try:
        commit = api.create_commit(plan.repo_id, operations, commit_message=message, parent_commit=plan.head)
    except ValueError as error:  # how the client reports metadata that the Hub doesn't take
        raise UserError(f"The Hub refuses the card {folder / CARD}: {error}") from error
    return commit.oid
