"""Verify a release by loading it as any user would: from an empty cache, by the card's own snippet."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from hub_cards.contents import CARD
from hub_cards.push import KEPT, ReleaseError


SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Variables that give the Hub's client and transformers a token, a cache or a mode; the snippet gets only two.
HIDDEN = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTORCH_TRANSFORMERS_")
PASSED_ON = {"HF_ENDPOINT", "HF_HUB_DISABLE_XET"}


def verify(repo_id: str, revision: str, stage: Path | None) -> tuple[int, str, list[str]]:
    """Download into an empty cache, compare all files and the pushed folder with the Hub's hashes, run the snippets.

    A token is used only if the repository can't be read without one. Returns how many files were compared, what the
    snippets printed, and all problems. Raises `ReleaseError` if nothing can be downloaded.
    """
    with tempfile.TemporaryDirectory() as home:
        cache = Path(home) / "hub"
        token: str | bool = False
        try:
            folder = snapshot_download(repo_id, revision=revision, cache_dir=cache, token=False)
        except (GatedRepoError, RepositoryNotFoundError) as error:
            token = get_token() or False
            if not token:
                raise ReleaseError(
                    f"{repo_id} does not exist, or is private or gated and needs a token: hf auth login."
                ) from error
            folder = snapshot_download(repo_id, revision=revision, cache_dir=cache, token=token)
        api = HfApi(token=token)
        seen = api.verify_repo_checksums(repo_id, revision=revision, cache_dir=cache)
        problems = [f"{entry['path']}: was downloaded with another hash" for entry in seen.mismatches]
        if stage is not None:
            pushed = api.verify_repo_checksums(repo_id, revision=revision, local_dir=stage)
            problems += [f"{entry['path']}: differs from the stage folder's" for entry in pushed.mismatches]
            problems += [f"{path}: is missing" for path in pushed.extra_paths]
            problems += [f"{path}: was not staged" for path in sorted(set(pushed.missing_paths) - KEPT)]
        snippets = SNIPPET.findall((Path(folder) / CARD).read_text(encoding="utf-8"))
        environment = {k: v for k, v in os.environ.items() if k in PASSED_ON or not k.startswith(HIDDEN)}
        environment |= {"HF_HOME": home} | ({"HF_TOKEN": str(token)} if token else {})
        # -I: without this repository's modules.
        command = [sys.executable, "-I", "-c", "\n".join(snippets)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
        if not snippets or done.returncode:
            last = (done.stderr.strip().splitlines() or ["there is none"])[-1]
            problems.append(f"the card's snippet fails: {last}")
        return seen.checked_count, done.stdout.strip(), problems
