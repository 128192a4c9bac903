"""Push and verify with the real client, against a server on the loopback, in fair weather and foul."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load, save

from hub_cards import check, fresh_load, release
from hub_cards.__main__ import main
from hub_cards.manifest import MANIFEST, sha256
from hub_cards.release import ReleaseError, compare_results, plan_push, push, read_manifest, verify
from hub_server import HubServer, Repository


REPO = "me/Tiny-NormLlava"
ROOT = Path(__file__).parents[2]


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point the client at a server, in this process and in those that it starts."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        use(monkeypatch, server.url)
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


def tree(stage: Path) -> dict[str, bytes]:
    return {path.relative_to(stage).as_posix(): path.read_bytes() for path in stage.rglob("*") if path.is_file()}


def publish(stage: Path, api: HfApi, public: bool = False) -> str:
    manifest = read_manifest(stage)
    return push(stage, manifest, plan_push(stage, manifest, api, public), api, public)


def place(hub: HubServer, files: dict[str, bytes], private: bool = False) -> Repository:
    """Put files on the server without the client, tagged v1.0."""
    made = hub.repositories[REPO] = Repository(private)
    made.tags["v1.0"] = made.commit({".gitattributes": b"", **files})
    return made


def published(hub: HubServer, revision: str) -> dict[str, bytes]:
    repository = hub.repositories[REPO]
    found = repository.commits[repository.resolve(revision) or ""]
    return {path: content for path, content in found.items() if path != ".gitattributes"}


def command(hub: HubServer, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"HF_TOKEN": token} if token else {}
    return subprocess.run(
        [sys.executable, "-m", "hub_cards", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The same in this process."""
    monkeypatch.setattr(sys, "argv", ["hub_cards", *arguments])
    main()


def test_one_commit_and_a_tag(staged: Path, hub: HubServer, api: HfApi) -> None:
    commit = publish(staged, api)
    repository = hub.repositories[REPO]
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
    repository = hub.repositories[REPO]
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
    monkeypatch.setattr(release, "sha256", count)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(next_release(staged, tmp_path / "second")))
    assert "v1.1" in hub.repositories[REPO].tags
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
        repository = hub.repositories.get(REPO)
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
    assert len(hub.repositories[REPO].commits) == 1


def test_a_public_repository_takes_only_what_is_to_be_public(staged: Path, hub: HubServer, api: HfApi) -> None:
    repository = place(hub, {"README.md": b"before"})
    repository.tags.clear()
    with pytest.raises(ReleaseError, match=f"{REPO} is public, so .*: push with --public, or make"):
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
    assert f"{REPO}, new, at nothing yet" in caplog.text
    assert "+ model.safetensors" in caplog.text
    assert "A private repository of this name would not be visible without HF_TOKEN." in caplog.text
    with pytest.raises(SystemExit, match="HF_TOKEN is not set"):
        run(monkeypatch, "push", str(staged))
    caplog.clear()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(staged), "--dry_run", "--private")
    assert f"{REPO}, private, at {repository.main}" in caplog.text
    assert "~ README.md" in caplog.text
    assert "Dry run: nothing was changed." in caplog.text
    assert (len(repository.commits), hub.uploads) == (1, [])
    assert "would not be visible" not in caplog.text
    with pytest.raises(SystemExit):
        run(monkeypatch, "push", str(staged), "--private", "--public")


@pytest.mark.parametrize("arguments", [("push", "--dry_run"), ("push",), ("verify", "--revision", "v1.0", "--stage")])
def test_no_network_is_said_in_a_line(
    arguments: tuple[str, ...], staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:  # bound and not listening
        closed.bind(("127.0.0.1", 0))
        use(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_loopback")
        name, *options = arguments
        with pytest.raises(SystemExit, match="ConnectError") as stopped:
            run(monkeypatch, name, *([REPO] if name == "verify" else []), *options, str(staged))
    assert len(str(stopped.value).splitlines()) == 1


def test_the_commands_from_push_to_verdict(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = command(hub, "push", str(staged), "--public", token=hub.token)
    assert pushed.returncode == 0, pushed.stderr
    assert hub.token not in pushed.stdout + pushed.stderr
    assert not any(hub.token.encode() in content for content in published(hub, "v1.0").values())

    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "verify", REPO, "--revision", "v1.0", "--stage", str(staged))
    assert f"Verified: {REPO} at v1.0 is what was staged." in caplog.text
    assert "largest difference 0" in caplog.text
    # It is public, so it is loaded without a token.
    assert not any(authorization for _, _, authorization in hub.requests)


def renew_manifest(files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """Put changed files into their manifest."""
    manifest = json.loads(files[MANIFEST])
    for name in manifest["files"]:
        (folder / "file").write_bytes(files[name])
        manifest["files"][name]["sha256"] = sha256(folder / "file")
    return files | {MANIFEST: json.dumps(manifest).encode()}


def test_another_model_behind_its_own_manifest_is_found(staged: Path, tmp_path: Path, hub: HubServer) -> None:
    files = tree(staged)
    tensors = load(files["model.safetensors"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    place(hub, renew_manifest(files | {"model.safetensors": save(tensors, {"format": "pt"})}, tmp_path))
    verdict = verify(REPO, "v1.0", staged, None)
    problems = "\n".join(verdict.problems)
    assert f"{MANIFEST}: has another sha256" in problems
    assert "model.safetensors: has another sha256" in problems
    assert re.search(r"^logits: differ by up to [\d.e-]+$", problems, re.MULTILINE)
    assert "last_hidden_state" not in problems  # which the head does not change
    assert "greedy tokens differ" in problems
    assert verdict.largest_difference


def test_a_private_repository_and_a_snippet_that_raises(
    staged: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tree(staged)
    files["README.md"] = files["README.md"].replace(b"generated = model", b"print(1 / 0)\ngenerated = model")
    repository = place(hub, files, private=True)
    with pytest.raises(ReleaseError, match="is not there, or is private and needs HF_TOKEN, which is not set"):
        verify(REPO, "v1.0", None, None)
    with pytest.raises(ReleaseError, match="needs another token than the one in HF_TOKEN"):
        verify(REPO, "v1.0", None, "hf_wrong")
    with pytest.raises(ReleaseError, match=r"has no revision v2\.0"):
        verify(REPO, "v2.0", None, hub.token)
    # Filled caches are passed over.
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    snapshot_download(REPO, revision="v1.0", cache_dir=tmp_path / "cache", token=hub.token)
    hub.requests.clear()
    verdict = verify(REPO, "v1.0", None, hub.token)
    assert ("GET", f"/{REPO}/resolve/{repository.main}/model.safetensors") in {path[:2] for path in hub.requests}
    assert verdict.problems == [
        "README.md: has another sha256",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]
    assert (verdict.largest_difference, verdict.snippet) == (None, None)


def test_without_a_stage_folder_the_manifest_is_what_counts(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place(hub, tree(staged))
    run(monkeypatch, "verify", REPO, "--revision", "v1.0")
    assert "logits and hidden states: not compared with a local model" in caplog.text
    assert "Verified: me/Tiny-NormLlava at v1.0 is what its manifest says." in caplog.text


def test_a_flipped_byte_and_a_lost_manifest(staged: Path, hub: HubServer) -> None:
    place(hub, {path: content for path, content in tree(staged).items() if path != MANIFEST})
    hub.faults["flipped byte"] = 1
    problems = verify(REPO, "v1.0", staged, None).problems
    assert {"model.safetensors: has another sha256", f"{MANIFEST}: is missing"} <= set(problems)


def test_weights_that_can_not_be_loaded_are_a_problem_beside_the_others(staged: Path, hub: HubServer) -> None:
    place(hub, {**tree(staged), "model.safetensors": b"torn"})
    verdict = verify(REPO, "v1.0", staged, None)
    assert verdict.problems[0] == "model.safetensors: has another sha256"
    assert verdict.problems[1].startswith("the model can't be loaded: ")
    assert len(verdict.problems) == 2


def test_no_token_is_sent_after_an_error(staged: Path, hub: HubServer) -> None:
    place(hub, tree(staged), private=True)
    hub.faults["500 GET /api/models"] = 20
    with pytest.raises(ReleaseError, match=f"could not be asked whether {REPO} is public"):
        verify(REPO, "v1.0", staged, hub.token)
    assert hub.requests
    assert not any(authorization for _, _, authorization in hub.requests)


def test_only_one_model_is_in_memory_at_a_time(staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[torch.nn.Module]] = []

    def watch(load: Callable[..., Any]) -> Callable[..., Any]:
        def loading(*args: Any, **kwargs: Any) -> Any:
            assert all(model() is None for model in loaded)
            model = load(*args, **kwargs)
            loaded.append(weakref.ref(model))
            return model

        return loading

    for name in ("AutoModelForImageTextToText", "AutoModel"):
        auto = getattr(fresh_load, name)
        monkeypatch.setattr(auto, "from_pretrained", watch(auto.from_pretrained))
    monkeypatch.setattr(sys, "argv", ["fresh_load", str(staged), "--output", str(tmp_path / "out")])
    fresh_load.main()
    assert [model() for model in loaded] == [None, None]


def results(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": torch.ones(1, 3, 4), "last_hidden_state": torch.ones(1, 3, 2), "tokens": torch.ones(3)} | changes


def test_what_can_not_be_subtracted_is_a_difference() -> None:
    assert compare_results(results(), results()) == (0.0, [])
    difference, problems = compare_results(results(logits=torch.full((1, 3, 4), torch.nan)), results())
    assert problems == ["logits: differ by up to nan"]
    assert difference != difference
    _, problems = compare_results(results(logits=torch.ones(1, 2, 4), tokens=torch.ones(2)), results())
    assert problems == ["logits: of shape [1, 2, 4], not [1, 3, 4]", "greedy tokens differ"]
