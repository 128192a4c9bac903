"""Verify with the real client, against a server on the loopback, in fair weather and foul."""

import json
import os
import re
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load, save

from conversations.files import sha256
from hub_cards import fresh_load
from hub_cards.manifest import MANIFEST
from hub_cards.verify import ReleaseError, compare_results, verify
from hub_server import NAME, HubServer, place, published, run, start, tree, use


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
            run(monkeypatch, name, *([NAME] if name == "verify" else []), *options, str(staged))
    assert len(str(stopped.value).splitlines()) == 1


def test_the_commands_from_push_to_verdict(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = start(hub, "push", str(staged), "--public", token=hub.token)
    output = "".join(pushed.communicate())
    assert pushed.returncode == 0, output
    assert hub.token not in output
    assert not any(hub.token.encode() in content for content in published(hub, "v1.0").values())

    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "verify", NAME, "--revision", "v1.0", "--stage", str(staged))
    assert f"Verified: {NAME} at v1.0 matches the stage folder." in caplog.text
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


@pytest.mark.slow
def test_another_model_behind_its_own_manifest_is_found(staged: Path, tmp_path: Path, hub: HubServer) -> None:
    files = tree(staged)
    tensors = load(files["model.safetensors"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    place(hub, renew_manifest(files | {"model.safetensors": save(tensors, {"format": "pt"})}, tmp_path))
    verdict = verify(NAME, "v1.0", staged, None)
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
    files["README.md"] += b"\n```python\nprint(1 / 0)\n```\n"  # each snippet is run
    repository = place(hub, files, private=True)
    with pytest.raises(ReleaseError, match="does not exist, or is private and needs HF_TOKEN, which is not set"):
        verify(NAME, "v1.0", None, None)
    with pytest.raises(ReleaseError, match="needs another token than the one in HF_TOKEN"):
        verify(NAME, "v1.0", None, hub.other_token)
    with pytest.raises(ReleaseError, match=r"could not be asked about .*HF_TOKEN is invalid or expired"):
        verify(NAME, "v1.0", None, "hf_wrong")
    with pytest.raises(ReleaseError, match=r"has no revision v2\.0"):
        verify(NAME, "v2.0", None, hub.token)
    # Filled caches are passed over.
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    snapshot_download(NAME, revision="v1.0", cache_dir=tmp_path / "cache", token=hub.token)
    hub.requests.clear()
    verdict = verify(NAME, "v1.0", None, hub.token)
    assert ("GET", f"/{NAME}/resolve/{repository.main}/model.safetensors") in {path[:2] for path in hub.requests}
    assert verdict.problems == [
        "README.md: has another sha256",
        "the card's snippet fails: ZeroDivisionError: division by zero",
    ]
    assert (verdict.largest_difference, verdict.snippet) == (None, None)


@pytest.mark.slow
def test_without_a_stage_folder_the_manifest_is_what_counts(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place(hub, tree(staged))
    refused = ("GET /api/models", "GET /tree", "GET /model.safetensors", "HEAD /config.json", "HEAD /tokenizer.json")
    for asked in refused:  # in this process, in the fresh one's download, and where it loads
        hub.faults[f"429 {asked}"] = 2
    # The first question that only the fresh process asks: its client would not wait by itself.
    hub.hooks["GET /revision/v1.0"] = lambda: hub.faults.update({"429 GET /revision/v1.0": 1})
    run(monkeypatch, "verify", NAME, "--revision", "v1.0")
    assert not hub.faults.total()
    assert "logits and hidden states: not compared with a local model" in caplog.text
    assert "Verified: me/Tiny-NormLlava at v1.0 matches its manifest." in caplog.text


@pytest.mark.slow
def test_a_flipped_byte_and_a_lost_manifest(staged: Path, hub: HubServer) -> None:
    place(hub, {path: content for path, content in tree(staged).items() if path != MANIFEST})
    hub.faults["flipped byte"] = 1
    problems = verify(NAME, "v1.0", staged, None).problems
    assert {"model.safetensors: has another sha256", f"{MANIFEST}: is missing"} <= set(problems)


def test_weights_that_can_not_be_loaded_are_a_problem_beside_the_others(staged: Path, hub: HubServer) -> None:
    place(hub, {**tree(staged), "model.safetensors": b"torn"})
    verdict = verify(NAME, "v1.0", staged, None)
    assert verdict.problems[0] == "model.safetensors: has another sha256"
    assert verdict.problems[1].startswith("the model can't be loaded: ")
    assert len(verdict.problems) == 2


def test_no_token_is_sent_after_an_error(staged: Path, hub: HubServer) -> None:
    place(hub, tree(staged), private=True)
    hub.faults["500 GET /api/models"] = 20
    with pytest.raises(ReleaseError, match=f"could not be asked whether {NAME} is public"):
        verify(NAME, "v1.0", staged, hub.token)
    assert hub.requests
    assert not any(authorization for _, _, authorization in hub.requests)


def test_a_gated_repository_is_read_with_the_token(staged: Path, hub: HubServer) -> None:
    """Anybody may look it up, but only who was let in may read its files."""
    place(hub, tree(staged)).gated = True
    assert verify(NAME, "v1.0", staged, hub.token).problems == []
    with pytest.raises(ReleaseError, match=r"can't be downloaded: GatedRepoError: request access on"):
        verify(NAME, "v1.0", staged, None)


def test_an_answer_that_is_no_json_is_named(staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    place(hub, tree(staged))
    hub.faults["html GET /api/models"] = 1
    with pytest.raises(SystemExit, match=f"GET /api/models/{NAME}: the Hub's answer is not JSON: <html>Log in to the"):
        run(monkeypatch, "verify", NAME, "--revision", "v1.0")


def test_a_token_that_expires_meanwhile_is_no_problem_of_the_files(staged: Path, hub: HubServer) -> None:
    place(hub, tree(staged), private=True)
    token = hub.token
    hub.hooks["GET /model.safetensors"] = lambda: setattr(hub, "token", "hf_renewed")
    with pytest.raises(ReleaseError, match=r"could not be asked about .*HF_TOKEN is invalid or expired"):
        verify(NAME, "v1.0", None, token)


def test_ctrl_c_ends_in_a_line(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place(hub, tree(staged))
    hub.hooks["GET /model.safetensors"] = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "verify", NAME, "--revision", "v1.0")
    assert stopped.value.code == 130
    assert caplog.messages == ["Interrupted."]


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
