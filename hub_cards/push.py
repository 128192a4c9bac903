"""Push a release folder to the Hub: make one commit, set the tag, and set the visibility.

If a push stops, the next push does what is left.
"""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from hub_cards.contents import CARD_FILE, is_bytecode, list_release
from hub_cards.release import read_release
from normllava.errors import UserError


# Files that the Hub itself adds to a repository. `.gitattributes` says which files Git LFS stores.
HUB_FILES = {".gitattributes"}


@dataclass(frozen=True)
class Plan:
    """What a push changes in a repository.

    Attributes:
        repo_id: The repository, owner/name.
        tag: The tag to set.
        visibility: "private" or "public"; "new" if there is no repository that the token may read.
        head: Latest commit of the repository, which the push builds on; `None` in a new repository.
        is_tagged: Whether the repository has the tag already. If so, the tag is on the same files as the release.
        added: Paths that only the release has.
        changed: Paths whose content in the release differs from the repository's.
        deleted: Paths that only the repository has.
        unchanged: Paths with the same content in both.
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
        lines += [f"+ {path}" for path in self.added]
        lines += [f"~ {path}" for path in self.changed]
        lines += [f"- {path}" for path in self.deleted]
        lines += [f"= {path}" for path in self.unchanged]
        return "\n".join(lines)


def push_release(folder: Path, api: HfApi, public: bool = False) -> Plan:
    """Publish a release folder.

    One commit adds, changes and deletes files, and the tag is set on this commit. A new repository is created private.
    A repository is made public only after the commit and the tag.

    Args:
        folder: A release folder without faults, see [`~hub_cards.check.require_no_faults`].
        api: The Hub's client.
        public: Whether the repository shall be public. If false, a public repository stays public, but gets no commit.

    Returns:
        The plan that was carried out.

    Raises:
        UserError: as [`plan_push`] does, or if a public repository would change and `public` is false.
    """
    plan = plan_push(folder, api)
    is_public = plan.visibility == "public"
    needs_tag = not plan.is_tagged
    if needs_tag and is_public and not public:
        raise UserError(f"{plan.repo_id} is public: push with --public, or make it private in its settings.")

    if plan.visibility == "new":
        api.create_repo(plan.repo_id, private=True)
    if needs_tag:
        commit = commit_files(folder, api, plan)
        api.create_tag(plan.repo_id, tag=plan.tag, revision=commit)
    if public and not is_public:
        api.update_repo_settings(plan.repo_id, private=False)
    return plan


def plan_push(folder: Path, api: HfApi) -> Plan:
    """Plan a push by comparing the release folder with its repository on the Hub.

    The folder is compared with the tag's files if the repository has the tag already, otherwise with the latest
    commit's files.

    Raises:
        UserError: if a branch has the tag's name, or if the tag is on other files than the release's.
    """
    release = read_release(folder)
    repo_id = release.repo_id
    tag = release.revision
    files = [path for path in list_release(folder) if path.is_file()]
    release_paths = sorted(path.relative_to(folder).as_posix() for path in files)

    try:
        info = api.repo_info(repo_id)
    except RepositoryNotFoundError:
        return Plan(
            repo_id=repo_id,
            tag=tag,
            visibility="new",
            head=None,
            is_tagged=False,
            added=release_paths,
            changed=[],
            deleted=[],
            unchanged=[],
        )

    refs = api.list_repo_refs(repo_id)
    branch_names = [ref.name for ref in refs.branches]
    tag_names = [ref.name for ref in refs.tags]
    if tag in branch_names:
        raise UserError(f"{tag} is a branch of {repo_id} and can't be a tag. Push with another --revision.")
    is_tagged = tag in tag_names

    # The client calls files "extra" if they are only in the folder, and "missing" if they are only on the Hub.
    compared_revision = tag if is_tagged else info.sha
    comparison = api.verify_repo_checksums(repo_id, local_dir=folder, revision=compared_revision)
    added = [path for path in comparison.extra_paths if not is_bytecode(Path(path))]
    changed = [entry["path"] for entry in comparison.mismatches]
    deleted = sorted(set(comparison.missing_paths) - HUB_FILES)
    different_paths = [*added, *changed, *deleted]
    if is_tagged and different_paths:
        raise UserError(
            f"{repo_id} already has a tag {tag}, which is not moved, and {different_paths[0]} differs from it. Push "
            "with another --revision."
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
        unchanged=[path for path in release_paths if path not in different_paths],
    )


def commit_files(folder: Path, api: HfApi, plan: Plan) -> str | None:
    """Make the commit that a plan asks for. If nothing changes, no commit is made.

    Returns:
        The repository's latest commit afterwards.

    Raises:
        UserError: if the Hub refuses the card.
    """
    if not (plan.added or plan.changed or plan.deleted):
        return plan.head
    try:
        commit = api.upload_folder(
            repo_id=plan.repo_id,
            folder_path=folder,
            delete_patterns="*",  # files that only the repository has, but not `HUB_FILES`
            ignore_patterns="*__pycache__*",
            commit_message=f"Release {plan.tag}",
            parent_commit=plan.head,
        )
    except ValueError as error:  # the client's error if the Hub refuses the card's metadata
        raise UserError(f"The Hub refuses the card {folder / CARD_FILE}: {error}") from error
    return commit.oid
