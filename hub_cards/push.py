"""Push a stage folder to the Hub: one commit, a tag, the visibility. Repeating a push finishes one that stopped."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from common.errors import UserError
from hub_cards.check import check, read_pin


KEPT = {".gitattributes"}  # made by the Hub, to record which files are large


class ReleaseError(UserError):
    """A push that was refused or stopped, or a release that can't be verified; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """What a push would change in a repository that is `"private"`, `"public"` or, if none can be seen, `"new"`: paths
    to add (+), change (~) and delete (-), and those that are there (=)."""

    repo_id: str
    tag: str
    visibility: str
    head: str | None
    is_tagged: bool
    files: dict[str, list[str]]

    def __str__(self) -> str:
        heading = f"{self.repo_id} is {self.visibility}, {'with' if self.is_tagged else 'without'} the tag {self.tag}"
        return "\n".join([heading, *(f"{sign} {path}" for sign, paths in self.files.items() for path in paths)])


def plan_push(stage: Path, api: HfApi) -> Plan:
    """Compare a stage folder with the Hub: with the tag if it exists, otherwise with the head. Raises `ReleaseError`
    if the folder has findings, the tag's name is a branch's, or the tag is on other files."""
    if findings := check(stage):
        raise ReleaseError("\n  ".join([f"{stage} can't be published:", *findings]))
    repo_id, tag = read_pin(stage)
    local = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
    try:
        info, refs = api.repo_info(repo_id), api.list_repo_refs(repo_id)
    except RepositoryNotFoundError:
        return Plan(repo_id, tag, "new", None, False, {"+": local})
    if tag in {ref.name for ref in refs.branches}:
        raise ReleaseError(f"{tag} is a branch of {repo_id} and can't be a tag. Build with another --revision.")
    is_tagged = tag in {ref.name for ref in refs.tags}
    seen = api.verify_repo_checksums(repo_id, local_dir=stage, revision=tag if is_tagged else info.sha)
    changed, stale = [entry["path"] for entry in seen.mismatches], [*{*seen.missing_paths} - KEPT]
    if is_tagged and (differing := [*seen.extra_paths, *changed, *stale]):
        differs = f"already has a tag {tag}, which is not moved, and {differing[0]} differs from it"
        raise ReleaseError(f"{repo_id} {differs}. Build with another --revision.")
    same = [path for path in local if path not in {*seen.extra_paths, *changed}]
    files = {"+": seen.extra_paths, "~": changed, "-": sorted(stale), "=": same}
    return Plan(repo_id, tag, "private" if info.private else "public", info.sha, is_tagged, files)


def push(stage: Path, api: HfApi, public: bool = False) -> Plan:
    """Publish a stage folder: one commit, which also deletes stale files, on the head that was seen, then a tag.

    A repository is created private, and made public, if asked for, only after commit and tag. Where a push stopped,
    the next one goes on. Raises `ReleaseError` as [`plan_push`], or if the repository is public unasked.
    """
    plan = plan_push(stage, api)
    if plan.visibility == "public" and not (public or plan.is_tagged):
        raise ReleaseError(f"{plan.repo_id} is public: push with --public, or make it private in its settings.")
    if plan.visibility == "new":
        api.create_repo(plan.repo_id, private=True)
    if not plan.is_tagged:
        head = plan.head
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(path, stage / path) for sign in "+~" for path in plan.files.get(sign, [])),
            *(CommitOperationDelete(path, is_folder=False) for path in plan.files.get("-", [])),
        ]
        if operations:
            message = f"Release {plan.tag}"
            head = api.create_commit(plan.repo_id, operations, commit_message=message, parent_commit=head).oid
        api.create_tag(plan.repo_id, tag=plan.tag, revision=head)
    if public and plan.visibility != "public":
        api.update_repo_settings(plan.repo_id, private=False)
    return plan
