"""Push and verify with the real client, against a server on the loopback, in fair weather and foul."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hub_cards.build import MANIFEST, sha256
from hub_cards.release import ReleaseError, plan_push, push
from hub_server import HubServer


REPO = "me/Tiny-NormLlava"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
    with HubServer() as server:
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


def tree(stage: Path) -> dict[str, bytes]:
    return {path.relative_to(stage).as_posix(): path.read_bytes() for path in stage.rglob("*") if path.is_file()}


def published(hub: HubServer, revision: str) -> dict[str, bytes]:
    repository = hub.repositories[REPO]
    found = repository.commits[repository.resolve(revision) or ""]
    return {path: content for path, content in found.items() if path != ".gitattributes"}


def command(hub: HubServer, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"HF_TOKEN": token} if token else {}
    return subprocess.run(
        [sys.executable, "-m", "hub_cards", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def test_one_commit_and_a_tag(staged: Path, hub: HubServer, api: HfApi) -> None:
    commit = push(staged, api, public=False)
    repository = hub.repositories[REPO]
    assert published(hub, "v1.0") == published(hub, "main") == tree(staged)
    assert repository.main == repository.tags["v1.0"] == commit
    assert len(repository.commits) == 2  # the empty one, and ours
    assert repository.private
    with pytest.raises(ReleaseError, match=r"has a tag v1.0 already, which stays what it is"):
        push(staged, api, public=False)
    assert len(repository.commits) == 2


def next_release(staged: Path, folder: Path) -> Path:
    """The stage folder with another tag, and a file changed."""
    shutil.copytree(staged, folder)
    card = folder / "README.md"
    card.write_text(card.read_text().replace("v1.0", "v1.1"))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["revision"] = "v1.1"

    manifest["files"]["README.md"]["sha256"] = sha256(card)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_a_second_release_deletes_what_is_stale_and_uploads_only_what_changed(
    staged: Path, tmp_path: Path, hub: HubServer, api: HfApi
) -> None:
    push(staged, api, public=False)
    repository = hub.repositories[REPO]
    repository.commit({**repository.commits[repository.main], "model-00001-of-00002.safetensors": b"stale"})
    uploads = len(hub.uploads)
    second = next_release(staged, tmp_path / "second")
    plan = plan_push(second, api, REPO, "v1.1")
    assert (plan.add, plan.delete) == ([], ["model-00001-of-00002.safetensors"])
    assert set(plan.change) == {"README.md", MANIFEST}
    assert "1 to delete" in plan.describe()
    push(second, api, public=True)
    assert published(hub, "v1.1") == tree(second)
    assert published(hub, "v1.0") == tree(staged)
    assert len(hub.uploads) == uploads
    assert not repository.private


# Fault, how often it strikes, whether the first push succeeds all the same, and what the message says otherwise.
FAULTS = {
    "500 PUT": (1, True, ""),
    "500 POST": (1, False, "Push again"),
    "dropped upload": (1, True, ""),
    "dropped upload for good": (20, False, "Push again"),
    "failed commit": (1, False, "Push again"),
    "dropped after commit": (1, False, "Push again"),
    "failed tag": (1, False, "without the tag v1.0"),
    "conflict": (1, False, "Somebody else committed in the meantime"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_or_half_published(fault: str, staged: Path, hub: HubServer, api: HfApi) -> None:
    times, succeeds, message = FAULTS[fault]
    hub.faults[fault.removesuffix(" for good")] = times
    if succeeds:
        push(staged, api, public=False)
    else:
        with pytest.raises(ReleaseError, match=message):
            push(staged, api, public=True)
        repository = hub.repositories.get(REPO)
        if repository is not None:
            assert repository.private  # not shown before it is whole
            assert repository.tags == {}
            seen = {path for path in repository.commits[repository.main] if path != ".gitattributes"}
            assert seen in (set(), {"theirs.txt"}, set(tree(staged)))
        hub.faults.clear()
        done = len(hub.uploads)
        push(staged, api, public=False)
        assert len(hub.uploads) == len(set(hub.uploads)) >= done  # no file is uploaded twice
    assert published(hub, "v1.0") == tree(staged)


def test_findings_and_a_wrong_token_stop_a_push(staged: Path, tmp_path: Path, hub: HubServer) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(staged, broken)
    (broken / "training_args.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ReleaseError, match="has the name of a pickle"):
        push(broken, HfApi(endpoint=hub.url, token=hub.token), public=False)
    with pytest.raises(ReleaseError, match="HF_TOKEN may not write"):
        push(staged, HfApi(endpoint=hub.url, token="hf_wrong"), public=False)
    assert hub.repositories == {}


def test_the_commands_from_dry_run_to_verdict(staged: Path, hub: HubServer) -> None:
    dry = command(hub, "push", str(staged), "--dry_run")
    assert dry.returncode == 0, dry.stderr
    assert "+ model.safetensors" in dry.stderr
    assert "Dry run: nothing was changed." in dry.stderr
    assert hub.repositories == {}
    refused = command(hub, "push", str(staged))
    assert "HF_TOKEN is not set" in refused.stderr

    pushed = command(hub, "push", str(staged), "--public", token=hub.token)
    assert pushed.returncode == 0, pushed.stderr
    assert hub.token not in pushed.stdout + pushed.stderr
    assert not any(hub.token.encode() in content for content in published(hub, "v1.0").values())

    hub.requests.clear()
    verified = command(hub, "verify", REPO, "--revision", "v1.0", "--stage", str(staged), token=hub.token)
    assert verified.returncode == 0, verified.stderr
    assert f"Verified: {REPO} at v1.0 is what was staged." in verified.stderr
    assert "largest difference 0" in verified.stderr
    # It is public, so it is loaded without a token.
    assert not any(authorization for _, _, authorization in hub.requests)

    hub.faults["flipped byte"] = 1
    flipped = command(hub, "verify", REPO, "--revision", "v1.0", "--stage", str(staged))
    assert flipped.returncode != 0
    assert "model.safetensors: has another sha256" in flipped.stderr
    assert "NOT verified" in flipped.stderr
