"""Push and verify with the real client, against a server on the loopback."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from common.errors import UserError
from hub_cards.push import plan_push, push_release
from hub_cards.verify import verify_release
from hub_server import NAME, TOKEN, HubServer, place_files, published, read_tree, run_command
from plants import change_weights


@pytest.fixture
def token(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token, as `hf auth login` leaves it."""
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))


def test_what_was_looked_at_is_pushed_and_verified(
    trained: Path, prose: Path, hub: HubServer, token: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "release"
    push = ["push", trained, "--repo_id", NAME, "--license", "apache-2.0", "--prose", prose, "--output_dir", folder]
    run_command(*push, "--dry_run")
    assert f"{NAME} is new, without the tag v1.0\n+ LICENSE\n" in caplog.text
    assert hub.made is None

    with (folder / "README.md").open("a") as card:
        card.write("\nSaid by hand.\n")
    run_command(*push)
    assert hub.repository.private
    assert len(hub.repository.commits) == 2  # the Hub's own, and one
    assert published(hub) == read_tree(folder)
    assert b"Said by hand." in published(hub)["README.md"]

    hub.requests.clear()
    run_command(*push, "--public")
    assert [path for method, path, _ in hub.requests if method != "GET"] == [f"/api/models/{NAME}/settings"]
    assert not hub.repository.private
    assert len(hub.repository.commits) == 2

    hub.requests.clear()
    caplog.clear()
    run_command("verify", NAME, "--revision", "v1.0", "--stage", folder)
    assert f"Verified: {NAME} at v1.0" in caplog.text
    assert "The card's snippet printed: " in caplog.text
    assert not any(authorization for _, path, authorization in hub.requests if "/resolve/" in path)  # it is public


def test_without_a_token_a_dry_run_still_builds(
    trained: Path, prose: Path, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "release"
    push = ["push", trained, "--repo_id", NAME, "--license", "apache-2.0", "--prose", prose, "--output_dir", folder]
    with pytest.raises(SystemExit, match="There is no token: hf auth login"):
        run_command(*push)
    assert not folder.exists()

    run_command(*push, "--dry_run")
    assert (folder / "README.md").exists()
    assert "no token, so the Hub was not asked" in caplog.text
    assert hub.requests == []


def test_a_folder_that_is_not_this_release_is_refused(
    trained: Path, release: Path, tmp_path: Path, token: None, hub: HubServer
) -> None:
    with pytest.raises(SystemExit, match=f"was built for {NAME}, v1.0. Delete it, or choose another --output_dir"):
        run_command("push", trained, "--repo_id", NAME, "--revision", "v1.1", "--output_dir", release)

    with pytest.raises(SystemExit, match="is a release: give the run that it was built from"):
        run_command("push", release, "--repo_id", NAME, "--output_dir", tmp_path / "new")

    retrained = shutil.copytree(trained, tmp_path / "retrained")
    change_weights(lambda weights: weights["lm_head.weight"].zero_())(retrained)
    with pytest.raises(SystemExit, match=r"was built from other weights than .*retrained holds now"):
        run_command("push", retrained, "--repo_id", NAME, "--output_dir", release)

    before = shutil.copytree(release, tmp_path / "before")
    (before / "release.json").unlink()  # as earlier versions left it
    with pytest.raises(SystemExit, match=r"before holds no release.json: .* an earlier version built it. Delete it"):
        run_command("push", trained, "--repo_id", NAME, "--output_dir", before)
    with pytest.raises(SystemExit, match=r"before holds no release.json"):
        run_command("verify", NAME, "--revision", "v1.0", "--stage", before)
    assert hub.requests == []


@pytest.mark.parametrize("former", ["build", "check"])
def test_former_commands_name_the_new_one(former: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: {former} is part of push now: .* push <run> .* --dry_run"):
        run_command(former, "runs/digits/stage2")


def test_nothing_is_pushed_that_is_not_on_the_list(
    trained: Path, release: Path, hub: HubServer, token: None, tmp_path: Path
) -> None:
    folder = shutil.copytree(release, tmp_path / "release")
    (folder / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(SystemExit, match=r"can't be published:\n  optimizer.pt: is not on the list"):
        run_command("push", trained, "--repo_id", NAME, "--output_dir", folder)
    assert hub.requests == []


def test_a_token_that_the_hub_refuses(
    trained: Path, release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    push = ["push", trained, "--repo_id", NAME, "--output_dir", release]
    with pytest.raises(SystemExit, match=r"The push stopped; push again to go on.*: .*401[\s\S]*Invalid credentials"):
        run_command(*push)
    with pytest.raises(SystemExit, match=r"The Hub can't be asked.*: .*401[\s\S]*Invalid credentials"):
        run_command(*push, "--dry_run")


@pytest.mark.parametrize("request_that_fails", ["/commit/", "/tag/", "/settings"])
def test_a_push_that_stopped_is_finished_by_another(
    request_that_fails: str, release: Path, hub: HubServer, api: HfApi
) -> None:
    hub.failures = {request_that_fails: 403, "/objects/batch": 500}
    with pytest.raises(OSError, match="403"):  # the 500 is asked again at once
        push_release(release, api, public=True)
    assert hub.repository.private

    push_release(release, api, public=True)
    assert not hub.failures
    assert published(hub) == read_tree(release)
    assert not hub.repository.private
    assert len(hub.repository.commits) == 2
    assert len(hub.uploads()) == len(set(hub.uploads())) > 0


def test_stale_files_go_in_the_same_commit(release: Path, hub: HubServer, api: HfApi) -> None:
    repository = place_files(
        hub, {"README.md": b"before", "old.bin": b"x", "LICENSE": read_tree(release)["LICENSE"]}, private=True
    )
    repository.tags.clear()
    plan = plan_push(release, api)
    assert plan.changed == ["README.md"]
    assert plan.deleted == ["old.bin"]
    assert plan.unchanged == ["LICENSE"]

    push_release(release, api)
    assert published(hub) == read_tree(release)
    assert len(repository.commits) == 2


def test_a_tag_is_not_moved_and_a_public_repository_not_changed_unasked(
    release: Path, hub: HubServer, api: HfApi
) -> None:
    repository = place_files(hub, read_tree(release) | {"README.md": b"other"})
    repository.commit(read_tree(release))  # the head is the same, and is not what counts
    with pytest.raises(UserError, match=r"already has a tag v1.0, which is not moved, and README.md differs"):
        push_release(release, api)

    repository.tags.clear()
    with pytest.raises(UserError, match=f"{NAME} is public: push with --public"):
        push_release(release, api)
    assert len(repository.commits) == 2
    assert hub.uploads() == []


def test_metadata_that_the_hub_refuses_is_told(release: Path, hub: HubServer, api: HfApi) -> None:
    hub.card_error = '"license" must be one of apache-2.0, mit'
    with pytest.raises(UserError, match=r"The Hub refuses the card .*README.md: [\s\S]*must be one of apache-2.0"):
        push_release(release, api)
    assert hub.repository.tags == {}


def test_verify_finds_what_differs(release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_tree(release) | {"theirs.txt": b"x"}
    del files["LICENSE"]
    files["README.md"] += b"\n```python\nprint(1 / 0)\n```\n"  # each snippet is run
    place_files(hub, files, private=True)
    with pytest.raises(UserError, match="does not exist, or is private or gated and needs a token"):
        verify_release(NAME, "v1.0")

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert verify_release(NAME, "v1.0", release).problems == [
        "README.md: differs from the release folder's",
        "LICENSE: is missing",
        "theirs.txt: is not in the release folder",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]


def test_verify_says_in_one_line_what_is_not_there(release: Path, hub: HubServer) -> None:
    place_files(hub, read_tree(release))
    with pytest.raises(SystemExit, match=r"^error: The release can't be downloaded: .*404"):
        run_command("verify", NAME, "--revision", "v2.0")
    with pytest.raises(SystemExit, match=r"^error: The release can't be downloaded: .*me/a/b"):
        run_command("verify", "me/a/b", "--revision", "v1.0")
    with pytest.raises(SystemExit, match=f"was built for {NAME}, v1.0, not {NAME}, v2.0"):
        run_command("verify", NAME, "--revision", "v2.0", "--stage", release)
