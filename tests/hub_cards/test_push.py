"""Push and verify with the real client, against a server on the loopback, in fair weather and foul."""

import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hub_cards import push as pushing
from hub_cards.push import ReleaseError, plan_push, push
from hub_cards.verify import verify
from hub_server import NAME, HubServer, place, published, run, tree, use


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check, which takes seconds, where a push is repeated many times."""
    monkeypatch.setattr(pushing, "check", lambda stage: [])


def test_the_commands_from_dry_run_to_verdict(
    staged: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="There is no token: hf auth login"):
        run(monkeypatch, "push", str(staged))
    (tmp_path / "token").write_text(hub.token)  # as `hf auth login` leaves it
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    run(monkeypatch, "push", str(staged), "--dry_run")
    assert f"{NAME} is new, without the tag v1.0\n+ LICENSE\n" in caplog.text
    assert not hub.repositories
    run(monkeypatch, "push", str(staged))
    repository = hub.repositories[NAME]
    assert (repository.private, len(repository.commits)) == (True, 2)  # the Hub's own, and one
    assert published(hub, "v1.0") == tree(staged)
    hub.requests.clear()
    run(monkeypatch, "push", str(staged), "--public")
    assert [path for method, path, _ in hub.requests if method != "GET"] == [f"/api/models/{NAME}/settings"]
    assert (repository.private, len(repository.commits)) == (False, 2)
    hub.requests.clear()
    caplog.clear()
    run(monkeypatch, "verify", NAME, "--revision", "v1.0", "--stage", str(staged))
    assert f"Verified: {NAME} at v1.0" in caplog.text
    assert "the card's snippet printed: " in caplog.text
    assert not any(authorization for _, _, authorization in hub.requests if "/resolve/" in _)  # it is public


def test_without_the_hub_a_push_says_so(staged: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    with socket.socket() as closed:  # bound and not listening
        closed.bind(("127.0.0.1", 0))
        use(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_loopback")
        with pytest.raises(SystemExit, match="The Hub can't be asked: "):
            run(monkeypatch, "push", str(staged), "--dry_run")
        with pytest.raises(SystemExit, match="The push stopped; push again to go on from there: "):
            run(monkeypatch, "push", str(staged))


@pytest.mark.parametrize("status", [403, 500])
def test_at_whatever_request_a_push_stops_the_same_push_goes_on(
    status: int, staged: Path, hub: HubServer, api: HfApi, unchecked: None
) -> None:
    HfApi(endpoint=hub.url, token=False).repo_exists(NAME)  # with a process's first question, the client asks its own
    for number in range(1, 100):
        hub.reset()
        hub.faults[f"{status} #{number}"] = 1
        stopped = False
        try:
            push(staged, api, public=True)
        except (OSError, RuntimeError):
            stopped = True
            assert NAME not in hub.repositories or hub.repositories[NAME].private
            push(staged, api, public=True)
        repository = hub.repositories[NAME]
        assert published(hub, "v1.0") == tree(staged)
        assert (repository.private, len(repository.commits)) == (False, 2)
        assert len(hub.uploads) == len(set(hub.uploads))
        if hub.faults.total():  # beyond the last request
            break
        assert stopped or status == 500
    assert number > 8


def test_stale_files_go_in_the_same_commit(staged: Path, hub: HubServer, api: HfApi, unchecked: None) -> None:
    there = {"README.md": b"before", "old.bin": b"x", "LICENSE": tree(staged)["LICENSE"]}
    repository = place(hub, there, private=True)
    repository.tags.clear()
    plan = plan_push(staged, api)
    assert (plan.files["~"], plan.files["-"], plan.files["="]) == (["README.md"], ["old.bin"], ["LICENSE"])
    push(staged, api)
    assert published(hub, "v1.0") == tree(staged)
    assert len(repository.commits) == 2


@pytest.mark.parametrize("changed", ["model.safetensors", "README.md", "theirs.txt"])
def test_a_tag_on_other_files_stays_what_it_is(
    changed: str, staged: Path, hub: HubServer, api: HfApi, unchecked: None
) -> None:
    repository = place(hub, tree(staged) | {changed: b"other"}, private=True)
    repository.commit(tree(staged))  # the head is the same, and is not what counts
    with pytest.raises(ReleaseError, match=f"already has a tag v1.0, which is not moved, and {changed} differs"):
        push(staged, api)
    assert (len(repository.commits), hub.uploads) == (2, [])


def test_what_is_refused(staged: Path, hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    stage = shutil.copytree(staged, tmp_path / "stage")
    (stage / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(ReleaseError, match=r"can't be published:\n  optimizer.pt: is not on the list"):
        push(stage, api)
    repository = place(hub, {"README.md": b"before"}, private=True)
    repository.branches["v1.0"] = repository.main
    with pytest.raises(ReleaseError, match=rf"v1.0 is a branch of {NAME}"):
        push(staged, api)
    repository.branches, repository.private = {}, False
    repository.tags.clear()
    with pytest.raises(ReleaseError, match=f"{NAME} is public: push with --public"):
        push(staged, api)
    assert (len(repository.commits), hub.uploads) == (1, [])


def test_what_others_committed_meanwhile_is_not_overwritten(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    place(hub, {"README.md": b"before"}, private=True).tags.clear()
    hub.faults["conflict"] = 1
    with pytest.raises(SystemExit, match=r"The push stopped; .*412"):
        run(monkeypatch, "push", str(staged))
    assert hub.repositories[NAME].commits[hub.repositories[NAME].main]["README.md"] == b"before"


def test_verify_finds_what_differs(
    staged: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tree(staged) | {"theirs.txt": b"x"}
    del files["LICENSE"]
    files["README.md"] += b"\n```python\nprint(1 / 0)\n```\n"  # each snippet is run
    place(hub, files, private=True)
    with pytest.raises(ReleaseError, match="does not exist, or is private or gated and needs a token"):
        verify(NAME, "v1.0", None)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    _, _, problems = verify(NAME, "v1.0", staged)
    assert problems == [
        "README.md: differs from the stage folder's",
        "LICENSE: is missing",
        "theirs.txt: was not staged",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]


def test_a_byte_that_flips_on_the_way_is_found(staged: Path, hub: HubServer) -> None:
    place(hub, tree(staged))
    hub.faults["flipped byte"] = 1
    _, _, problems = verify(NAME, "v1.0", None)
    assert problems == ["model.safetensors: was downloaded with another hash"]
