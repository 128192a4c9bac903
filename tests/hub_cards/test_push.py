"""Push with the real client, against a server on the loopback, in fair weather and foul."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hub_cards import check
from hub_cards import push as pushing
from hub_cards.manifest import MANIFEST, sha256
from hub_cards.push import plan_push, push, read_manifest
from hub_cards.verify import ReleaseError
from hub_server import NAME, HubServer, place, published, run, tree


def publish(stage: Path, api: HfApi, public: bool = False) -> str:
    manifest = read_manifest(stage)
    return push(stage, manifest, plan_push(stage, manifest, api, public), api, public)


def test_one_commit_and_a_tag(staged: Path, hub: HubServer, api: HfApi) -> None:
    commit = publish(staged, api)
    repository = hub.repositories[NAME]
    assert published(hub, "v1.0") == published(hub, "main") == tree(staged)
    assert repository.main == repository.tags["v1.0"] == commit
    assert len(repository.commits) == 2  # the empty one, and ours
    assert repository.private
    with pytest.raises(ReleaseError, match=r"has a tag v1.0 already, which stays what it is"):
        publish(staged, api)
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
    publish(staged, api)
    repository = hub.repositories[NAME]
    repository.commit({**repository.commits[repository.main], "model-00001-of-00002.safetensors": b"stale"})
    uploads = len(hub.uploads)
    second = next_release(staged, tmp_path / "second")
    plan = plan_push(second, read_manifest(second), api, public=True)
    assert plan.visibility == "private"
    assert (plan.add, plan.delete) == ([], ["model-00001-of-00002.safetensors"])
    assert set(plan.change) == {"README.md", MANIFEST}
    assert "1 to delete" in plan.describe()
    publish(second, api, public=True)
    assert published(hub, "v1.1") == tree(second)
    assert published(hub, "v1.0") == tree(staged)
    assert len(hub.uploads) == uploads
    assert not repository.private


def test_a_push_hashes_each_file_once(
    staged: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(hub, tree(staged), private=True)
    hashed: Counter[str] = Counter()

    def count(path: Path) -> str:
        hashed[path.name] += 1
        return sha256(path)

    monkeypatch.setattr(check, "sha256", count)
    monkeypatch.setattr(pushing, "sha256", count)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(next_release(staged, tmp_path / "second")))
    assert "v1.1" in hub.repositories[NAME].tags
    assert set(hashed.values()) == {1}


# Fault, how often it strikes, whether the first push succeeds all the same, and what the message says otherwise.
FAULTS = {
    "500 PUT": (1, True, ""),
    "500 POST /create": (1, False, "Push again"),
    "500 POST /preupload": (1, True, ""),
    "500 POST /preupload for good": (20, False, "Push again"),
    "500 POST /objects/batch": (1, True, ""),
    "500 POST /objects/batch for good": (20, False, "Push again"),
    "500 POST /commit": (1, False, "Push again"),
    "500 POST /tag": (1, False, "without the tag v1.0"),
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
    name = fault.removesuffix(" for good")
    hub.faults[name] = times
    if succeeds:
        publish(staged, api)
        assert hub.faults[name] == 0  # it struck
    else:
        with pytest.raises(ReleaseError, match=message):
            publish(staged, api, public=True)
        assert hub.faults[name] < times
        repository = hub.repositories.get(NAME)
        if repository is not None:
            assert repository.private  # not shown before it is whole
            assert repository.tags == {}
            seen = {path for path in repository.commits[repository.main] if path != ".gitattributes"}
            assert seen in (set(), {"theirs.txt"}, set(tree(staged)))
        hub.faults.clear()
        done = len(hub.uploads)
        publish(staged, api)
        assert len(hub.uploads) == len(set(hub.uploads)) >= done  # no file is uploaded twice
    assert published(hub, "v1.0") == tree(staged)


def test_findings_and_a_wrong_token_stop_a_push(staged: Path, tmp_path: Path, hub: HubServer) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(staged, broken)
    (broken / "training_args.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ReleaseError, match="has the name of a pickle"):
        publish(broken, HfApi(endpoint=hub.url, token=hub.token))
    with pytest.raises(ReleaseError, match="HF_TOKEN may not write"):
        publish(staged, HfApi(endpoint=hub.url, token="hf_wrong"))
    assert hub.repositories == {}


def test_a_repository_that_stays_unseen_is_not_committed_to(staged: Path, hub: HubServer, api: HfApi) -> None:
    hub.faults["not visible"] = 2  # before it is made, and after
    with pytest.raises(ReleaseError, match="was made and can't be seen"):
        publish(staged, api)
    assert len(hub.repositories[NAME].commits) == 1


def test_a_public_repository_takes_only_what_is_to_be_public(staged: Path, hub: HubServer, api: HfApi) -> None:
    repository = place(hub, {"README.md": b"before"})
    repository.tags.clear()
    with pytest.raises(ReleaseError, match=f"{NAME} is public, so .*: push with --public, or make"):
        publish(staged, api)
    assert hub.uploads == []
    assert len(repository.commits) == 1
    publish(staged, api, public=True)
    assert published(hub, "v1.0") == tree(staged)


def test_a_dry_run_says_what_it_can_not_see(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository = place(hub, {"README.md": b"before"}, private=True)
    repository.tags.clear()
    monkeypatch.setenv("HF_TOKEN", "")  # is none
    run(monkeypatch, "push", str(staged), "--dry_run")
    assert f"{NAME}, new, at nothing yet" in caplog.text
    assert "+ model.safetensors" in caplog.text
    assert "A private repository of this name would not be visible without HF_TOKEN." in caplog.text
    with pytest.raises(SystemExit, match="HF_TOKEN is not set"):
        run(monkeypatch, "push", str(staged))
    caplog.clear()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(staged), "--dry_run", "--private")
    assert f"{NAME}, private, at {repository.main}" in caplog.text
    assert "~ README.md" in caplog.text
    assert "Dry run: nothing was changed." in caplog.text
    assert (len(repository.commits), hub.uploads) == (1, [])
    assert "would not be visible" not in caplog.text
    with pytest.raises(SystemExit):
        run(monkeypatch, "push", str(staged), "--private", "--public")
