"""`push` and `verify` with the Hub's real client, against a server on the loopback address in place of the Hub."""

import compileall
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hub_cards import model_folder, verify
from hub_cards.check import find_faults
from hub_cards.push import plan_push, push_release
from hub_cards.verify import verify_release
from hub_cards.weights import Weights
from hub_server import REPO_ID, TOKEN, HubServer, place_files, read_published, read_tree, run_command
from normllava.errors import UserError
from plants import change_weights


@pytest.fixture
def logged_in(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a valid token into a file, as `hf auth login` does."""
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))


def test_the_folder_of_a_dry_run_is_pushed_and_verified(
    trained_run: Path, prose: Path, hub: HubServer, logged_in: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "release"
    push = ["push", trained_run, "--repo_id", REPO_ID, "--output_dir", folder]
    build_options = ["--license", "apache-2.0", "--prose", prose]
    run_command(*push, *build_options, "--dry_run")
    assert f"{REPO_ID} is new, without the tag v1.0\n+ LICENSE\n" in caplog.text
    assert hub.created_repository is None

    # The user edits the card after the dry run, and the edited card is pushed.
    with (folder / "README.md").open("a") as card:
        card.write("\nSaid by hand.\n")
    run_command(*push)
    assert hub.repository.private
    assert len(hub.repository.commits) == 2  # one for the creation of the repository, one for the push
    assert read_published(hub) == read_tree(folder)
    assert b"Said by hand." in read_published(hub)["README.md"]

    # A second push, now with --public, changes the visibility and nothing else.
    hub.requests.clear()
    run_command(*push, "--public")
    changes = [request.path for request in hub.requests if request.method != "GET"]
    assert changes == [f"/api/models/{REPO_ID}/settings"]
    assert not hub.repository.private
    assert len(hub.repository.commits) == 2

    # The published files are verified.
    hub.requests.clear()
    caplog.clear()
    run_command("verify", REPO_ID, "--revision", "v1.0", "--stage", folder)
    assert f"Verified: {REPO_ID} at v1.0" in caplog.text
    assert "The card's snippet printed: " in caplog.text

    # The repository is public, so its files are downloaded without a token.
    downloads = [request for request in hub.requests if "/resolve/" in request.path]
    assert downloads
    assert all(request.authorization == "" for request in downloads)


def test_a_fresh_push_reads_the_weights_once(
    trained_run: Path, prose: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hashed and searched for values that aren't finite in one pass. A large model's take minutes."""
    read_folders = []
    read_weights = model_folder.read_weights

    def read_and_note(folder: Path) -> Weights:
        read_folders.append(folder)
        return read_weights(folder)

    monkeypatch.setattr(model_folder, "read_weights", read_and_note)
    folder = tmp_path / "release"
    options = ["--repo_id", REPO_ID, "--output_dir", folder, "--dry_run"]
    run_command("push", trained_run, *options, "--license", "apache-2.0", "--prose", prose)
    assert read_folders == [trained_run]

    # A folder that was there may have been edited, so its own weights are read.
    run_command("push", trained_run, *options)
    assert read_folders == [trained_run, folder]


def test_options_of_the_build_are_refused_for_a_folder_that_exists_already(
    trained_run: Path, release: Path, prose: Path, hub: HubServer
) -> None:
    dry_run = ["push", trained_run, "--repo_id", REPO_ID, "--output_dir", release, "--dry_run"]
    message = re.escape(
        f"no effect on {release}, which is there already. Delete {release} to build it anew, or leave the options out"
    )
    with pytest.raises(SystemExit, match=f"^error: --prose, --license: {message}"):
        run_command(*dry_run, "--license", "mit", "--prose", prose)

    run_command(*dry_run)  # raises no error


def test_without_a_token_a_push_is_refused_but_a_dry_run_builds(
    trained_run: Path, prose: Path, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "release"
    build_options = ["--license", "apache-2.0", "--prose", prose]
    push = ["push", trained_run, "--repo_id", REPO_ID, "--output_dir", folder, *build_options]
    with pytest.raises(SystemExit, match="There is no token: hf auth login"):
        run_command(*push)
    assert not folder.exists()

    run_command(*push, "--dry_run")
    assert (folder / "README.md").exists()
    assert "no token, so the Hub was not asked" in caplog.text
    assert hub.requests == []


def test_a_folder_for_another_tag_is_refused(
    trained_run: Path, release: Path, logged_in: None, hub: HubServer
) -> None:
    with pytest.raises(SystemExit, match=f"was built for {REPO_ID}, v1.0. Delete it, or choose another --output_dir"):
        run_command("push", trained_run, "--repo_id", REPO_ID, "--revision", "v1.1", "--output_dir", release)

    assert hub.requests == []


def test_a_release_folder_in_place_of_the_run_is_refused(
    release: Path, tmp_path: Path, logged_in: None, hub: HubServer
) -> None:
    with pytest.raises(SystemExit, match="is a release: give the run that it was built from"):
        run_command("push", release, "--repo_id", REPO_ID, "--output_dir", tmp_path / "new")

    assert hub.requests == []


def test_a_checkpoint_is_refused(trained_run: Path, tmp_path: Path, logged_in: None, hub: HubServer) -> None:
    """The release of a plain Llava's checkpoint would have names that vLLM doesn't know."""
    checkpoint = shutil.copytree(trained_run, tmp_path / "checkpoint-8")
    with pytest.raises(SystemExit, match=r"is a checkpoint, .* load model and processor by from_pretrained"):
        run_command("push", checkpoint, "--repo_id", REPO_ID, "--output_dir", tmp_path / "new")

    assert hub.requests == []


def test_a_folder_of_other_weights_is_refused(
    trained_run: Path, release: Path, tmp_path: Path, logged_in: None, hub: HubServer
) -> None:
    retrained = shutil.copytree(trained_run, tmp_path / "retrained")
    change_weights(lambda weights: weights["lm_head.weight"].zero_())(retrained)
    with pytest.raises(SystemExit, match=r"was built from other weights than .*retrained holds now"):
        run_command("push", retrained, "--repo_id", REPO_ID, "--output_dir", release)

    assert hub.requests == []


def test_a_folder_of_an_earlier_version_is_refused(
    trained_run: Path, release: Path, tmp_path: Path, logged_in: None, hub: HubServer
) -> None:
    # Earlier versions built folders without release.json.
    old_release = shutil.copytree(release, tmp_path / "old")
    (old_release / "release.json").unlink()
    with pytest.raises(SystemExit, match=r"old holds no release.json, so it is no release. Delete it"):
        run_command("push", trained_run, "--repo_id", REPO_ID, "--output_dir", old_release)
    with pytest.raises(SystemExit, match=r"old holds no release.json"):
        run_command("verify", REPO_ID, "--revision", "v1.0", "--stage", old_release)
    assert hub.requests == []


def test_a_folder_with_a_file_that_is_not_on_the_list_is_not_pushed(
    trained_run: Path, release: Path, hub: HubServer, logged_in: None, tmp_path: Path
) -> None:
    folder = shutil.copytree(release, tmp_path / "release")
    (folder / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(SystemExit, match=r"can't be published:\n  optimizer.pt: is not on the list"):
        run_command("push", trained_run, "--repo_id", REPO_ID, "--output_dir", folder)
    assert hub.requests == []


def test_what_python_writes_when_the_handler_is_tried_is_not_pushed(
    release: Path, hub: HubServer, tmp_path: Path
) -> None:
    folder = shutil.copytree(release, tmp_path / "release", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_file(folder / "handler.py", quiet=1)
    assert list(folder.rglob("*.pyc")) != []
    assert find_faults(folder) == []

    plan = plan_push(folder, HfApi())
    assert plan.visibility == "new"
    assert plan.added == sorted(read_tree(folder))

    place_files(hub, {"README.md": b"before"})
    hub.repository.tags.clear()
    plan = plan_push(folder, HfApi())
    assert sorted([*plan.added, *plan.changed]) == sorted(read_tree(folder))


def test_a_token_that_the_hub_refuses_ends_in_one_error(
    trained_run: Path, release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    push = ["push", trained_run, "--repo_id", REPO_ID, "--output_dir", release]
    # The client's message has several lines, and `[\s\S]` matches across them.
    with pytest.raises(SystemExit, match=r"The push stopped. Push again to go on.*: .*401[\s\S]*Invalid credentials"):
        run_command(*push)
    with pytest.raises(SystemExit, match=r"The Hub can't be asked.*: .*401[\s\S]*Invalid credentials"):
        run_command(*push, "--dry_run")


@pytest.mark.parametrize("failing_path", ["/commit/", "/tag/", "/settings"])
def test_a_push_that_stopped_is_finished_by_another(
    failing_path: str, release: Path, hub: HubServer, api: HfApi
) -> None:
    # The client gives up after status 403, and asks again after status 500. At `/objects/batch`, the client asks where
    # to upload large files.
    hub.failures = {failing_path: 403, "/objects/batch": 500}
    with pytest.raises(OSError, match="403"):
        push_release(release, api, public=True)
    assert hub.repository.private

    push_release(release, api, public=True)
    assert not hub.failures  # both requests failed once
    assert read_published(hub) == read_tree(release)
    assert not hub.repository.private
    assert len(hub.repository.commits) == 2  # one for the creation of the repository, one for both pushes

    # No large file is uploaded twice.
    uploads = hub.list_uploads()
    assert uploads
    assert len(uploads) == len(set(uploads))


def test_a_push_deletes_old_files_in_its_one_commit(release: Path, hub: HubServer, api: HfApi) -> None:
    earlier_files = {"README.md": b"before", "old.bin": b"x", "LICENSE": read_tree(release)["LICENSE"]}
    repository = place_files(hub, earlier_files, private=True)
    repository.tags.clear()  # so the push sets the tag

    plan = plan_push(release, api)
    assert plan.changed == ["README.md"]
    assert plan.deleted == ["old.bin"]
    assert plan.unchanged == ["LICENSE"]

    push_release(release, api)
    assert read_published(hub) == read_tree(release)
    assert len(repository.commits) == 2  # the earlier files, and the push


def test_a_tag_is_not_moved(release: Path, hub: HubServer, api: HfApi) -> None:
    """The tag is on a commit with another card. That the newest commit has the release's files doesn't matter."""
    repository = place_files(hub, read_tree(release) | {"README.md": b"other"})
    repository.add_commit(read_tree(release))
    with pytest.raises(UserError, match=r"already has a tag v1.0, which is not moved, and README.md differs"):
        push_release(release, api)
    assert len(repository.commits) == 2  # no third commit
    assert hub.list_uploads() == []


def test_a_public_repository_is_changed_only_if_the_push_is_public(release: Path, hub: HubServer, api: HfApi) -> None:
    repository = place_files(hub, read_tree(release))
    repository.tags.clear()  # so the push would set the tag
    with pytest.raises(UserError, match=f"{REPO_ID} is public: push with --public"):
        push_release(release, api)
    assert len(repository.commits) == 1  # no second commit
    assert hub.list_uploads() == []


def test_the_hubs_reason_for_refusing_a_card_is_shown(release: Path, hub: HubServer, api: HfApi) -> None:
    hub.card_error = '"license" must be one of apache-2.0, mit'
    with pytest.raises(UserError, match=r"The Hub refuses the card .*README.md: [\s\S]*must be one of apache-2.0"):
        push_release(release, api)
    assert hub.repository.tags == {}


def test_verify_finds_what_differs(release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_tree(release)
    del files["LICENSE"]
    files["theirs.txt"] = b"x"
    # `verify` runs all snippets of the card, also this second snippet, which fails.
    files["README.md"] += b"\n```python\nprint(1 / 0)\n```\n"
    place_files(hub, files, private=True)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert verify_release(REPO_ID, "v1.0", release).problems == [
        "README.md: differs from the release folder's",
        "LICENSE: is missing",
        "theirs.txt: is not in the release folder",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]


def test_a_private_release_is_not_verified_without_a_token(release: Path, hub: HubServer) -> None:
    place_files(hub, read_tree(release), private=True)
    with pytest.raises(UserError, match="does not exist, or is private or gated and needs a token"):
        verify_release(REPO_ID, "v1.0")


def test_verify_reports_a_snippet_that_fails_without_a_message(release: Path, hub: HubServer) -> None:
    """A process that the system kills, for lack of memory for example, may write no error."""
    files = read_tree(release)
    files["README.md"] = b"```python\nimport os\n\nos._exit(3)\n```\n"
    place_files(hub, files)
    assert verify_release(REPO_ID, "v1.0").problems == ["the card's snippet fails: exit status 3"]


def test_verify_says_in_one_line_that_a_release_can_not_be_downloaded(release: Path, hub: HubServer) -> None:
    place_files(hub, read_tree(release))
    with pytest.raises(SystemExit, match=r"^error: The release can't be downloaded: .*404"):
        run_command("verify", REPO_ID, "--revision", "v2.0")
    with pytest.raises(SystemExit, match=r"^error: The release can't be downloaded: .*me/a/b"):
        run_command("verify", "me/a/b", "--revision", "v1.0")


def test_an_error_after_the_download_is_not_said_to_be_of_the_download(
    release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("sizes of tensors must match")

    place_files(hub, read_tree(release))
    monkeypatch.setattr(verify, "run_snippets", fail)
    with pytest.raises(RuntimeError, match="sizes of tensors must match"):
        run_command("verify", REPO_ID, "--revision", "v1.0")


def test_verify_says_that_files_for_llama_cpp_were_not_compared(
    release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The converter isn't needed for it, and so isn't asked for."""
    place_files(hub, read_tree(release) | {"mmproj-Mine-f32.gguf": b"x", "Mine-f32.gguf": b"x"})
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    run_command("verify", REPO_ID, "--revision", "v1.0")
    assert f"Verified: {REPO_ID} at v1.0\nllama.cpp files were not compared: pip install" in caplog.text


def test_verify_refuses_a_folder_of_another_release(release: Path, hub: HubServer) -> None:
    with pytest.raises(SystemExit, match=f"was built for {REPO_ID}, v1.0, not {REPO_ID}, v2.0"):
        run_command("verify", REPO_ID, "--revision", "v2.0", "--stage", release)
