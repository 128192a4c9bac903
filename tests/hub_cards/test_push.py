"""Push and verify with the real client, against a server on the loopback."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hub_cards import push as pushing
from hub_cards.push import ReleaseError, plan_push, push
from hub_cards.verify import verify
from hub_server import NAME, TOKEN, HubServer, place, published, read_tree, run


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check, which takes seconds."""
    monkeypatch.setattr(pushing, "check", lambda stage: [])


def test_the_commands_from_dry_run_to_verdict(
    staged: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="There is no token: hf auth login"):
        run(monkeypatch, "push", str(staged))
    (tmp_path / "token").write_text(TOKEN)  # as `hf auth login` leaves it
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    run(monkeypatch, "push", str(staged), "--dry_run")
    assert f"{NAME} is new, without the tag v1.0\n+ LICENSE\n" in caplog.text
    assert hub.made is None
    run(monkeypatch, "push", str(staged))
    assert (hub.repository.private, len(hub.repository.commits)) == (True, 2)  # the Hub's own, and one
    assert published(hub) == read_tree(staged)
    hub.requests.clear()
    run(monkeypatch, "push", str(staged), "--public")
    assert [path for method, path, _ in hub.requests if method != "GET"] == [f"/api/models/{NAME}/settings"]
    assert (hub.repository.private, len(hub.repository.commits)) == (False, 2)
    hub.requests.clear()
    caplog.clear()
    run(monkeypatch, "verify", NAME, "--revision", "v1.0", "--stage", str(staged))
    assert f"Verified: {NAME} at v1.0" in caplog.text
    assert "the card's snippet printed: " in caplog.text
    assert not any(authorization for _, path, authorization in hub.requests if "/resolve/" in path)  # it is public


def test_a_token_that_the_hub_refuses(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    for option, said in ([], "The push stopped; push again to go on"), (["--dry_run"], "The Hub can't be asked"):
        with pytest.raises(SystemExit, match=rf"{said}.*: .*401[\s\S]*Invalid credentials"):
            run(monkeypatch, "push", str(staged), *option)


@pytest.mark.parametrize("request_that_fails", ["/commit/", "/tag/", "/settings"])
def test_a_push_that_stopped_is_finished_by_another(
    request_that_fails: str, staged: Path, hub: HubServer, api: HfApi, unchecked: None
) -> None:
    hub.failures = {request_that_fails: 403, "/objects/batch": 500}
    with pytest.raises(OSError, match="403"):  # the 500 is asked again at once
        push(staged, api, public=True)
    assert hub.repository.private
    push(staged, api, public=True)
    assert not hub.failures
    assert published(hub) == read_tree(staged)
    assert (hub.repository.private, len(hub.repository.commits)) == (False, 2)
    assert len(hub.uploads()) == len(set(hub.uploads())) > 0


def test_stale_files_go_in_the_same_commit(staged: Path, hub: HubServer, api: HfApi, unchecked: None) -> None:
    there = {"README.md": b"before", "old.bin": b"x", "LICENSE": read_tree(staged)["LICENSE"]}
    repository = place(hub, there, private=True)
    repository.tags.clear()
    plan = plan_push(staged, api)
    assert (plan.files["~"], plan.files["-"], plan.files["="]) == (["README.md"], ["old.bin"], ["LICENSE"])
    push(staged, api)
    assert published(hub) == read_tree(staged)
    assert len(repository.commits) == 2


def test_what_is_refused(staged: Path, hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    stage = shutil.copytree(staged, tmp_path / "stage")
    (stage / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(ReleaseError, match=r"can't be published:\n  optimizer.pt: is not on the list"):
        push(stage, api)
    repository = place(hub, read_tree(staged) | {"README.md": b"other"})
    repository.commit(read_tree(staged))  # the head is the same, and is not what counts
    with pytest.raises(ReleaseError, match=r"already has a tag v1.0, which is not moved, and README.md differs"):
        push(staged, api)
    repository.tags.clear()
    with pytest.raises(ReleaseError, match=f"{NAME} is public: push with --public"):
        push(staged, api)
    assert (len(repository.commits), hub.uploads()) == (2, [])


def test_verify_finds_what_differs(staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_tree(staged) | {"theirs.txt": b"x"}
    del files["LICENSE"]
    files["README.md"] += b"\n```python\nprint(1 / 0)\n```\n"  # each snippet is run
    place(hub, files, private=True)
    with pytest.raises(ReleaseError, match="does not exist, or is private or gated and needs a token"):
        verify(NAME, "v1.0", None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    _, _, problems = verify(NAME, "v1.0", staged)
    assert problems == [
        "README.md: differs from the stage folder's",
        "LICENSE: is missing",
        "theirs.txt: was not staged",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]
