"""Verify a release by loading it as any user would."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file

from conversations.files import sha256
from hub_cards.client import HUB_ERRORS, explain
from hub_cards.manifest import MANIFEST


# Made by the Hub, to record which files are large.
KEPT = {".gitattributes"}
# Variables that give the Hub's client and transformers a token, a cache or a mode; the fresh process gets only two.
HIDDEN = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTORCH_TRANSFORMERS_")
PASSED_ON = {"HF_ENDPOINT", "HF_HUB_DISABLE_XET"}


class ReleaseError(RuntimeError):
    """A failed push or verification; the message says what is on the Hub now."""


@dataclass(frozen=True)
class Verdict:
    """What a fresh download showed.

    Attributes:
        files: Number of files.
        largest_difference: Between logits and hidden states and those of the stage folder; `None` if they were not
            compared.
        snippet: Output of the card's snippet; `None` if it failed.
        problems: Empty if everything matches.
    """

    files: int
    largest_difference: float | None
    snippet: str | None
    problems: list[str]


def verify(repo_id: str, revision: str, stage: Path | None, token: str | None) -> Verdict:
    """Download into an empty cache in a fresh process, and compare with the stage folder.

    Files are compared by the manifest's sha256; logits, the base model's hidden states and greedy tokens with those of
    the folder; the card's own snippet is run. Without a folder, files are compared with the manifest in the
    repository, and logits are not compared. The token is passed on only if the repository can't be read without one.

    Raises:
        ReleaseError: if there is nothing to download, or the stage folder itself is incomplete.
    """
    if stage is not None and not (stage / MANIFEST).exists():
        raise ReleaseError(f"{stage} holds no {MANIFEST}: give the stage folder that was pushed.")
    used_token = None if is_public(repo_id) else token
    find_revision(repo_id, revision, used_token)
    with tempfile.TemporaryDirectory() as scratch:
        downloaded, local = Path(scratch) / "downloaded", Path(scratch) / "local"
        failure = load_fresh(repo_id, revision, downloaded, used_token)
        if failure is not None:
            find_revision(repo_id, revision, used_token)  # a lost token or network is not a fault of the files
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
    """Whether the repository's files can be read without a token; those of a gated one can't.

    Raises:
        ReleaseError: if the Hub could not be asked, so that no token is sent after an error.
    """
    try:
        return not HfApi(token=False).repo_info(repo_id).gated
    except RepositoryNotFoundError:
        return False
    except HUB_ERRORS as error:
        raise ReleaseError(f"The Hub could not be asked whether {repo_id} is public ({explain(error)}).") from error


def find_revision(repo_id: str, revision: str, token: str | None) -> None:
    """Raises `ReleaseError` if there is no such revision to read."""
    try:
        HfApi(token=token or False).repo_info(repo_id, revision=revision)
    except RevisionNotFoundError as error:
        raise ReleaseError(f"{repo_id} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        needed = "HF_TOKEN, which is not set" if token is None else "another token than the one in HF_TOKEN"
        raise ReleaseError(f"{repo_id} does not exist, or is private and needs {needed}.") from error
    except HUB_ERRORS as error:
        raise ReleaseError(f"{repo_id} at {revision} could not be asked about ({explain(error)}).") from error


def compare_files(hashes: dict[str, str], manifest_file: Path) -> list[str]:
    """Differences between downloaded files, by hash, and a manifest; the manifest itself is compared too."""
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        files[MANIFEST] = sha256(manifest_file)
    except FileNotFoundError:
        return [f"{MANIFEST}: is missing, so no file could be compared"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: can't be read, so no file could be compared ({explain(error)})"]
    problems = [
        f"{name}: {'is missing' if name not in hashes else 'has another sha256'}"
        for name, digest in files.items()
        if hashes.get(name) != digest
    ]
    return problems + [f"{name}: was not staged" for name in sorted(hashes.keys() - files.keys() - KEPT)]


def compare_results(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> tuple[float | None, list[str]]:
    """The largest difference between two folders' results, `None` if shapes differ, and a list of what differs."""
    differences, problems = [], []
    for name in ("logits", "last_hidden_state"):
        if theirs[name].shape != ours[name].shape:
            problems.append(f"{name}: of shape {list(theirs[name].shape)}, not {list(ours[name].shape)}")
            continue
        differences.append((theirs[name] - ours[name]).abs().max())
        if not torch.equal(theirs[name], ours[name]):  # NaN is equal to nothing
            problems.append(f"{name}: differ by up to {differences[-1].item():.3g}")
    if not torch.equal(theirs["tokens"], ours["tokens"]):
        problems.append("greedy tokens differ")
    return torch.stack(differences).max().item() if differences else None, problems


def load_fresh(source: str, revision: str | None, output: Path, token: str | None) -> str | None:
    """Run `fresh_load.py` in a process with an empty cache and without this repository's modules.

    Returns:
        The error, `None` on success. Results up to the error are in `output`.
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
