"""Push with the real client, against a server on the loopback, in fair weather and foul."""

import email.utils
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import pytest
from huggingface_hub import HfApi

from conversations.files import sha256
from hub_cards import check
from hub_cards import push as pushing
from hub_cards.client import MAX_WAIT, InterruptibleStream, interrupts_at_requests, seconds_to_wait
from hub_cards.manifest import MANIFEST
from hub_cards.push import State, plan_push, push, read_manifest
from hub_cards.verify import ReleaseError
from hub_cards.weights import Weights, read_weights
from hub_server import NAME, HubServer, place, published, run, start, tree


def publish(stage: Path, api: HfApi, public: bool = False) -> State:
    manifest = read_manifest(stage)
    return push(stage, manifest, plan_push(stage, manifest, api, public), api, public)


def test_one_commit_and_a_tag(staged: Path, hub: HubServer, api: HfApi) -> None:
    state = publish(staged, api)
    repository = hub.repositories[NAME]
    assert published(hub, "v1.0") == published(hub, "main") == tree(staged)
    assert repository.main == repository.tags["v1.0"] == state.head == state.tagged
    assert len(repository.commits) == 2  # the empty one, and ours
    assert repository.private


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
    assert plan.state.visibility == "private"
    assert (plan.add, plan.delete) == ([], ["model-00001-of-00002.safetensors"])
    assert set(plan.change) == {"README.md", MANIFEST}
    assert "1 to delete" in plan.describe()
    publish(second, api, public=True)
    assert published(hub, "v1.1") == tree(second)
    assert published(hub, "v1.0") == tree(staged)
    assert len(hub.uploads) == uploads
    assert not repository.private


def test_a_large_file_is_hashed_once_by_check_and_once_by_the_client(
    staged: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tree(staged)
    place(hub, {path: content for path, content in files.items() if path != "model.safetensors"}, private=True)
    hashed: Counter[str] = Counter()

    def count(path: Path) -> str:
        hashed[path.name] += 1
        return sha256(path)

    def count_file(file: BinaryIO) -> bytes:
        return bytes.fromhex(count(Path(file.name)))

    def count_weights(folder: Path) -> Weights:
        weights = read_weights(folder)
        hashed.update(weights.sha256.keys())
        return weights

    monkeypatch.setattr(check, "sha256", count)
    monkeypatch.setattr(check, "read_weights", count_weights)
    monkeypatch.setattr("huggingface_hub.lfs.sha_fileobj", count_file)
    monkeypatch.setattr(pushing, "IN_MEMORY", 10_000)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(next_release(staged, tmp_path / "second")))
    assert "v1.1" in hub.repositories[NAME].tags
    assert hashed.pop("model.safetensors") == 2
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
    with pytest.raises(ReleaseError, match=r"training_args\.bin: is not on the list"):
        publish(broken, HfApi(endpoint=hub.url, token=hub.token))
    with pytest.raises(ReleaseError, match="HF_TOKEN is invalid or expired"):
        publish(staged, HfApi(endpoint=hub.url, token="hf_wrong"))
    with pytest.raises(ReleaseError, match=rf"HF_TOKEN may not do this.*{NAME} is new: this token can see no"):
        publish(staged, HfApi(endpoint=hub.url, token=hub.other_token))
    assert hub.repositories == {}


def test_a_repository_that_stays_unseen_is_not_committed_to(staged: Path, hub: HubServer, api: HfApi) -> None:
    hub.faults["not visible"] = 2  # before it is made, and after
    with pytest.raises(ReleaseError, match="was created but can't be seen"):
        publish(staged, api)
    assert len(hub.repositories[NAME].commits) == 1


def test_a_public_repository_takes_only_what_is_to_be_public(staged: Path, hub: HubServer, api: HfApi) -> None:
    repository = place(hub, {"README.md": b"before"})
    repository.tags.clear()
    with pytest.raises(ReleaseError, match=f"{NAME} is public, so .* Push with --public, or make"):
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
    assert f"{NAME} is new: this token can see no such repository" in caplog.text
    assert "+ model.safetensors" in caplog.text
    assert "A private repository of this name would not be visible without HF_TOKEN." in caplog.text
    with pytest.raises(SystemExit, match="HF_TOKEN is not set"):
        run(monkeypatch, "push", str(staged))
    caplog.clear()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run(monkeypatch, "push", str(staged), "--dry_run", "--private")
    assert f"{NAME} is private, at {repository.main}, without the tag v1.0" in caplog.text
    assert "~ README.md" in caplog.text
    assert "Dry run: nothing was changed." in caplog.text
    assert (len(repository.commits), hub.uploads) == (1, [])
    assert "would not be visible" not in caplog.text
    with pytest.raises(SystemExit):
        run(monkeypatch, "push", str(staged), "--private", "--public")


def truth(hub: HubServer) -> str:
    """What a message has to say is on the Hub."""
    there = hub.repositories.get(NAME)
    if there is None:
        return str(State(NAME, "v1.0"))
    return str(State(NAME, "v1.0", there.main, "private" if there.private else "public", there.tags.get("v1.0")))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# What happens to a request, and what the message says, if the push does not succeed all the same.
STOPS = {
    "500": "Push again to continue from there",
    "403": "the token in HF_TOKEN may not do this",
    "html": "the Hub's answer is not JSON: <html>Log in",
    "no answer": "Push again to continue from there",
    "interrupt": "Interrupted. On the Hub, ",
    "expired": "the token in HF_TOKEN is invalid or expired",
}


@pytest.mark.parametrize("stop", STOPS)
def test_at_whatever_request_a_push_stops_the_same_push_goes_on(
    stop: str, staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(staged)
    HfApi(endpoint=hub.url, token=False).repo_exists(NAME)  # with a process's first question, the client asks its own
    hub.reset()
    hooks: dict[str, Callable[[], object]] = {
        "no answer": lambda: True,
        "interrupt": interrupt,
        "expired": lambda: setattr(hub, "token", hub.token + "x"),
    }
    for number in range(1, 100):
        if stop in hooks:
            hub.hooks[f"#{number}"] = hooks[stop]
        else:
            hub.faults[f"{stop} #{number}"] = 1
        api, stopped = HfApi(endpoint=hub.url, token=hub.token), False
        try:
            push(staged, manifest, plan_push(staged, manifest, api, True), api, True)
        except (ReleaseError, KeyboardInterrupt) as error:
            stopped, message = True, str(error)
            assert len(message.splitlines()) == 1
            assert STOPS[stop] in message or (stop == "html" and hub.requests[number - 1][1].startswith("/lfs/"))
            if stop != "expired":
                assert f"On the Hub, {truth(hub)}." in message
            elif NAME in hub.repositories and number > 5:  # it was seen
                assert f"On the Hub, when last seen, {NAME} is private, at " in message
        if hub.hooks or hub.faults.total():  # beyond the last request
            break
        assert stopped or stop not in ("403", "html", "interrupt")
        struck = hub.requests[number - 1][1]
        api = HfApi(endpoint=hub.url, token=hub.token)
        state = push(staged, manifest, plan_push(staged, manifest, api, True), api, True)
        repository = hub.repositories[NAME]
        assert published(hub, "v1.0") == tree(staged)
        assert str(state) == truth(hub)
        assert not repository.private
        assert len(repository.commits) == 2
        twice = stop == "no answer" and struck.startswith("/lfs/")  # which the client can't know
        assert len(hub.uploads) == len(set(hub.uploads)) + twice
        hub.reset()
    assert not stopped
    assert number > 12


def test_ctrl_c_ends_in_a_line_with_the_state(staged: Path, hub: HubServer) -> None:
    process = start(hub, "push", str(staged), "--public", token=hub.token)
    hub.hooks["PUT /lfs"] = lambda: process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in output + errors
    assert errors.splitlines()[-1] == f"Interrupted. On the Hub, {truth(hub)}. Push again to continue from there."


@pytest.mark.timeout(60)
def test_ctrl_c_leaves_no_lock_of_a_thread_pool_held(staged: Path, hub: HubServer, api: HfApi) -> None:
    def trace(frame: FrameType, event: str, argument: object) -> Any:
        """Press Ctrl-C where the pool that uploads, one thread at work, has just taken a lock which that one needs."""
        nonlocal taken
        caller = frame.f_back.f_code.co_qualname if frame.f_back else ""
        if event == "return" and (frame.f_code.co_qualname, caller) == ("Condition.__enter__", "Semaphore.acquire"):
            taken += 1
            if taken == 2:
                sys.settrace(None)
                interrupt()
        return trace

    taken = 0
    manifest = read_manifest(staged)
    plan = plan_push(staged, manifest, api, True)
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            push(staged, manifest, plan, api, True)
    finally:
        sys.settrace(None)
    assert taken == 2
    assert str(caught.value) == f"Interrupted. On the Hub, {truth(hub)}. Push again to continue from there."


def test_ctrl_c_stops_a_long_upload_between_its_parts_and_pressed_twice_at_once() -> None:
    sent, before = [], signal.getsignal(signal.SIGINT)

    def upload() -> None:
        with interrupts_at_requests():
            for part in InterruptibleStream([b"1", b"2", b"3"]):
                sent.append(part)
                if part == b"2":
                    interrupt()

    def press_twice() -> None:
        with interrupts_at_requests():
            interrupt()
            interrupt()
            sent.append(b"too late")

    for stopped in (upload, press_twice):
        with pytest.raises(KeyboardInterrupt):
            stopped()
    assert sent == [b"1", b"2"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_of_another_shape_is_said_in_a_line(staged: Path, hub: HubServer, api: HfApi) -> None:
    place(hub, {}, private=True)
    hub.faults["shape GET /refs"] = 1
    with pytest.raises(ReleaseError, match=r"stopped \(KeyError: 'branches'\)\. On the Hub"):
        publish(staged, api)


def test_a_release_that_is_there_is_only_made_public(
    staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.faults["403 PUT /settings"] = 1
    with pytest.raises(SystemExit, match=r"may not do this.* is private, at .*, with the tag v1\.0\. Push again"):
        run(monkeypatch, "push", str(staged), "--public")
    repository = hub.repositories[NAME]
    repository.commit({**repository.commits[repository.main], "theirs.txt": b"later"})
    hub.requests.clear()
    run(monkeypatch, "push", str(staged), "--public")
    tagged = repository.tags["v1.0"]
    assert f"{NAME} is private, at {repository.main}, with the tag v1.0 on {tagged}" in caplog.text
    assert f"Published: {NAME} is public, at {repository.main}, with the tag v1.0 on {tagged}" in caplog.text
    assert [path for method, path, _ in hub.requests if method != "GET"] == [f"/api/models/{NAME}/settings"]
    hub.requests.clear()
    run(monkeypatch, "push", str(staged))  # nothing is published into it, so it may be public
    assert {method for method, _, _ in hub.requests} == {"GET"}


@pytest.mark.parametrize("changed", ["model.safetensors", "README.md", "theirs.txt"])
def test_a_tag_on_other_files_stays_what_it_is(changed: str, staged: Path, hub: HubServer, api: HfApi) -> None:
    repository = place(hub, tree(staged) | {changed: b"other"}, private=True)
    repository.commit(tree(staged))  # the head is the same, and is not what counts
    with pytest.raises(ReleaseError, match=f"already has a tag v1.0, which is not moved, and {changed} differs"):
        publish(staged, api)
    assert (len(repository.commits), hub.uploads) == (2, [])


@pytest.mark.parametrize("there", [True, False])
def test_a_branch_is_no_name_for_a_tag(there: bool, staged: Path, hub: HubServer, api: HfApi) -> None:
    manifest = read_manifest(staged) | {"revision": "experiment" if there else "main"}
    if there:
        repository = place(hub, {"README.md": b"before"}, private=True)
        repository.branches["experiment"] = repository.main
    with pytest.raises(ReleaseError, match=f"{manifest['revision']} is a branch of {NAME}"):
        push(staged, manifest, plan_push(staged, manifest, api, False), api, False)
    assert len(hub.repositories[NAME].commits) == 1


@pytest.mark.parametrize("moment", ["before", "GET /tree", "POST /preupload", "PUT /lfs"])
def test_a_repository_made_public_meanwhile_is_not_published_into(
    moment: str, staged: Path, hub: HubServer, api: HfApi
) -> None:
    repository = place(hub, {"README.md": b"before"}, private=True)
    repository.tags.clear()
    manifest = read_manifest(staged)
    plan = plan_push(staged, manifest, api, False) if moment == "before" else None
    if plan is None:
        hub.hooks[moment] = lambda: setattr(repository, "private", False)
    else:
        repository.private = False
    with pytest.raises(ReleaseError, match=f"{NAME} is public, so a push would be visible at once; nothing"):
        push(staged, manifest, plan or plan_push(staged, manifest, api, False), api, False)
    assert len(repository.commits) == 1
    assert bool(hub.uploads) == (moment in ("POST /preupload", "PUT /lfs"))
    repository.private = True
    done = hub.uploads.copy()
    publish(staged, api)
    assert published(hub, "v1.0") == tree(staged)
    assert len(hub.uploads) == len(set(hub.uploads))
    assert hub.uploads[: len(done)] == done


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("path", ["model.safetensors", "README.md", MANIFEST, "secret.txt"])
@pytest.mark.parametrize("moment", ["checked", "GET /tree", "POST /preupload", "POST /objects/batch"])
def test_what_is_published_is_what_was_checked(
    moment: str, path: str, in_memory: bool, staged: Path, tmp_path: Path, hub: HubServer, api: HfApi,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    checked, stage = tree(staged), tmp_path / "stage"
    shutil.copytree(staged, stage)
    if not in_memory:
        monkeypatch.setattr(pushing, "IN_MEMORY", (stage / "model.safetensors").stat().st_size - 1)
    repository = place(hub, {"README.md": b"before"}, private=True)
    repository.tags.clear()
    changed = bytes(len(checked[path])) if path == "model.safetensors" else b"before"  # as long, or as on the Hub
    manifest = read_manifest(stage)
    if moment == "checked":
        (stage / path).write_bytes(changed)
    hub.hooks[moment] = lambda: (stage / path).write_bytes(changed) and None
    is_late = moment.startswith("POST") and (in_memory or path != "model.safetensors")  # it was read, or is not ours
    if path == "secret.txt" or is_late:
        push(stage, manifest, plan_push(stage, manifest, api, False), api, False)
    else:
        with pytest.raises(ReleaseError, match=f"{path} was changed after|The push stopped"):
            push(stage, manifest, plan_push(stage, manifest, api, False), api, False)
        assert len(repository.commits) == 1
        publish(staged, api)
    assert published(hub, "v1.0") == checked


@pytest.mark.parametrize("asked", ["7", "date"])
def test_an_answer_429_is_waited_out_wherever_it_comes(
    asked: str, staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    for wait in ("time.sleep", "hub_cards.client.wait"):
        monkeypatch.setattr(wait, waits.append)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    if asked == "date":
        asked = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    hub.retry_after = asked
    for number in range(1, 200, 2):  # each second request, so that each question is refused once
        hub.faults[f"429 #{number}"] = 1
    run(monkeypatch, "push", str(staged), "--public")
    assert published(hub, "v1.0") == tree(staged)
    waited = [seconds for seconds in waits if seconds >= 1]
    assert len(waited) > 12
    assert all(7 <= seconds <= 8 if asked == "7" else 60 < seconds <= 101 for seconds in waited)


def test_waiting_has_an_end_that_is_said(staged: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    for wait in ("time.sleep", "hub_cards.client.wait"):
        monkeypatch.setattr(wait, waits.append)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for asked, most in (("86400", 0), ("100", MAX_WAIT)):
        hub.retry_after = asked
        hub.faults["429 GET /api/models"] = 1000
        with pytest.raises(SystemExit, match=rf"{NAME}: the Hub asks to wait for {asked} s, but {MAX_WAIT} s is the"):
            run(monkeypatch, "push", str(staged), "--dry_run")
        assert sum(waits) <= 2 * most  # once for the plan, and once for what is on the Hub


def test_how_long_an_answer_429_asks_to_wait() -> None:
    assert seconds_to_wait({"Retry-After": "30"}) == 30
    assert seconds_to_wait({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 1  # it is over
    assert seconds_to_wait({"ratelimit": '"api";r=0;t=55', "Retry-After": "30"}) == 56
    assert seconds_to_wait({}) == seconds_to_wait({"Retry-After": "soon"}) == 10
