"""Verify a published release as a user would use it: download it into an empty cache, and run the card's snippets."""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from hub_cards.contents import CARD_FILE, is_bytecode
from hub_cards.hub_errors import hub_errors
from hub_cards.llama_cpp import find_problems
from hub_cards.push import HUB_FILES
from hub_cards.release import read_release
from normllava.errors import UserError


# A Python block of the card. The group is the block's code.
SNIPPET_PATTERN = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# Prefixes of environment variables that set up the Hub's client and transformers, such as a token or a cache. The
# snippets run without these variables.
HIDDEN_PREFIXES = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTORCH_TRANSFORMERS_")
# Two of these variables are passed on: where the Hub is, and how to download from it.
PASSED_ON_VARIABLES = ("HF_ENDPOINT", "HF_HUB_DISABLE_XET")


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    Attributes:
        num_files: Number of downloaded files that were compared with the Hub's hashes.
        printed: What the card's snippets printed.
        problems: What is wrong with the release; empty if nothing is.
        left_out: What was not verified, and why; empty if all was.
    """

    num_files: int
    printed: str
    problems: list[str]
    left_out: list[str]


def verify_release(repo_id: str, revision: str, folder: Path | None = None) -> Verdict:
    """Download a release into an empty cache, compare the files' hashes with the Hub's, and run the card's snippets.

    Args:
        repo_id: The repository, owner/name.
        revision: The release's tag.
        folder: The release folder that was pushed, to compare it with the repository; `None` for no such comparison.

    Raises:
        UserError: if the release can't be downloaded, if the card has no snippet, or if the folder was built for
            another repository or tag.
    """
    if folder is not None:
        require_same_release(folder, repo_id, revision)

    with tempfile.TemporaryDirectory() as home:
        # The snippets run with `home` as HF_HOME. There, the Hub's client looks for downloads in the folder `hub`.
        cache = Path(home) / "hub"
        with hub_errors("The release can't be downloaded"):
            snapshot, token = download_release(repo_id, revision, cache)

            api = HfApi(token=token)
            comparison = api.verify_repo_checksums(repo_id, revision=revision, cache_dir=cache)
            problems = [f"{entry['path']}: was downloaded with another hash" for entry in comparison.mismatches]

            if folder is not None:
                problems += compare_with_folder(repo_id, revision, folder, api)

        completed = run_snippets(snapshot / CARD_FILE, Path(home), token)
        if completed.returncode != 0:
            problems.append(f"the card's snippet fails: {describe_failure(completed)}")

        left_out = []
        if any(snapshot.glob("*.gguf")):
            if find_spec("xllamacpp") is None:
                left_out.append('llama.cpp files were not compared: pip install "normllava[gguf]" brings llama.cpp.')
            else:
                problems += find_problems(snapshot)
        return Verdict(
            num_files=comparison.checked_count,
            printed=completed.stdout.strip(),
            problems=problems,
            left_out=left_out,
        )


def require_same_release(folder: Path, repo_id: str, revision: str) -> None:
    """Raises `UserError` if a release folder was built for another repository or tag."""
    release = read_release(folder)
    if (release.repo_id, release.revision) != (repo_id, revision):
        raise UserError(f"{folder} was built for {release.repo_id}, {release.revision}, not {repo_id}, {revision}.")


def download_release(repo_id: str, revision: str, cache: Path) -> tuple[Path, str | bool]:
    """Download a repository, without a token if that is possible.

    Returns:
        The folder of the download, and the token that the download needed. `False` in place of a token tells the Hub's
        client to send none.

    Raises:
        UserError: if the repository can't be read without a token, and there is no token. Other errors of the Hub's
            client are raised as they are.
    """
    try:
        snapshot = snapshot_download(repo_id, revision=revision, cache_dir=cache, token=False)
        return Path(snapshot), False
    except (GatedRepoError, RepositoryNotFoundError) as error:
        token = get_token()
        if token is None:
            raise UserError(
                f"{repo_id} does not exist, or is private or gated and needs a token: hf auth login."
            ) from error

    snapshot = snapshot_download(repo_id, revision=revision, cache_dir=cache, token=token)
    return Path(snapshot), token


def compare_with_folder(repo_id: str, revision: str, folder: Path, api: HfApi) -> list[str]:
    """How the repository differs from the release folder: a message for each file that differs."""
    # The client calls files "extra" if they are only in the folder, and "missing" if they are only on the Hub.
    comparison = api.verify_repo_checksums(repo_id, revision=revision, local_dir=folder)
    only_on_hub = sorted(set(comparison.missing_paths) - HUB_FILES)

    problems = [f"{entry['path']}: differs from the release folder's" for entry in comparison.mismatches]
    problems += [f"{path}: is missing" for path in comparison.extra_paths if not is_bytecode(Path(path))]
    problems += [f"{path}: is not in the release folder" for path in only_on_hub]
    return problems


def run_snippets(card: Path, home: Path, token: str | bool) -> subprocess.CompletedProcess[str]:
    """Run a card's snippets, one after the other, in a new process.

    Args:
        card: The file of the card.
        home: The folder in which the process runs, and the process's HF_HOME.
        token: The token that the process gets; `False` for none.

    Raises:
        UserError: if the card has no snippet.
    """
    snippets = SNIPPET_PATTERN.findall(card.read_text(encoding="utf-8"))
    if not snippets:
        raise UserError(f"{CARD_FILE} of the repository has no Python snippet to run.")

    environment = {}
    for name, value in os.environ.items():
        if name in PASSED_ON_VARIABLES or not name.startswith(HIDDEN_PREFIXES):
            environment[name] = value
    environment["HF_HOME"] = str(home)
    if token:
        environment["HF_TOKEN"] = str(token)

    # -I leaves out the working folder and PYTHONPATH, so that a copy of this project's source code isn't imported
    # instead of the release's own files. If the project is installed, its code is still found.
    command = [sys.executable, "-I", "-c", "\n".join(snippets)]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)


def describe_failure(completed: subprocess.CompletedProcess[str]) -> str:
    """The last line of a failed process's stderr, or the exit status if stderr is empty."""
    lines = completed.stderr.strip().splitlines()
    if not lines:
        return f"exit status {completed.returncode}"
    return lines[-1]
