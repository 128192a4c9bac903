"""A server on the loopback address that speaks as much of the Hub's HTTP API as pushing and loading need.

It knows one repository, `NAME`, and one token, `TOKEN`.
"""

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from hub_cards.__main__ import main


NAME = "me/Tiny-NormLlava"
TOKEN = "hf_loopback"
# Files with these endings are large files, which Git LFS stores.
LFS_SUFFIXES = (".safetensors", ".png")
# The files of a folder or a commit: content by path.
Tree = dict[str, bytes]


@dataclass
class Repository:
    """A repository on the server.

    Attributes:
        private: Whether only requests with the token see the repository.
        commits: The files of each commit, by the commit's id, the newest last.
        tags: The id of the commit that each tag is on.
    """

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: Tree) -> str:
        """Add a commit, and return its id."""
        oid = f"{len(self.commits):040x}"
        self.commits[oid] = tree
        return oid

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def find_commit(self, revision: str) -> tuple[str, Tree]:
        """The id and the files of the commit that a branch, a tag or a commit's id names."""
        oid = {"main": self.head, **self.tags}.get(revision, revision)
        if oid not in self.commits:
            raise HTTPException(404, "no revision", {"X-Error-Code": "RevisionNotFound"})
        return oid, self.commits[oid]


class ReceivedRequest(NamedTuple):
    """A request that the server got. `authorization` is empty without a token."""

    method: str
    path: str
    authorization: str


@dataclass
class HubServer:
    """The server's state, and what tests set in it.

    Attributes:
        url: The server's address.
        created_repository: The repository; `None` until one is created.
        objects: Content of the large files, by their hashes.
        failures: Parts of paths, each with a status. The next request to a path that contains the part fails with that
            status, and the entry is removed.
        card_error: If set, the server refuses a card's metadata with this message.
        requests: All requests so far.
    """

    url: str
    created_repository: Repository | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    card_error: str | None = None
    requests: list[ReceivedRequest] = field(default_factory=list)

    @property
    def repository(self) -> Repository:
        if self.created_repository is None:
            raise HTTPException(404, "not found", {"X-Error-Code": "RepoNotFound"})
        return self.created_repository

    def is_hidden(self) -> bool:
        """Whether there is a repository that requests without the token don't see."""
        return self.created_repository is not None and self.created_repository.private

    def list_uploads(self) -> list[str]:
        """The paths at which large files were uploaded."""
        paths = [request.path for request in self.requests if request.method == "PUT"]
        return [path for path in paths if path.startswith("/lfs/")]


def build_app(hub: HubServer) -> FastAPI:
    app = FastAPI()
    api = f"/api/models/{NAME}"

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[..., Any]) -> Any:
        """Record a request, then answer it unless a failure is set or the token doesn't allow it."""
        path = request.url.path
        authorization = request.headers.get("Authorization", "")
        hub.requests.append(ReceivedRequest(request.method, path, authorization))
        for part in hub.failures:
            if part in path:
                return JSONResponse({"error": "set by a test"}, hub.failures.pop(part))

        if authorization not in ("", f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            return JSONResponse({"error": message}, 401, {"X-Error-Message": message})
        if NAME in path and hub.is_hidden() and not authorization:
            return JSONResponse({"error": "not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        return await answer(request)

    @app.post("/api/repos/create")
    def create(body: dict[str, Any]) -> Any:
        # Versions of the client differ in the field by which they ask for a private repository.
        is_private = bool(body.get("private")) or body.get("visibility") == "private"
        hub.created_repository = Repository(is_private)
        hub.created_repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{hub.url}/{NAME}", "name": NAME, "id": NAME}

    @app.get(api)
    @app.get(api + "/revision/{revision}")
    def info(revision: str = "main") -> Any:
        oid, files = hub.repository.find_commit(revision)
        return {
            "id": NAME,
            "sha": oid,
            "siblings": [{"rfilename": path} for path in files],
            "tags": [],
            "gated": False,
            "private": hub.repository.private,
        }

    @app.get(api + "/tree/{revision}")
    def tree(revision: str) -> Any:
        _, files = hub.repository.find_commit(revision)
        return [describe_file(path, content) for path, content in files.items()]

    @app.get(api + "/refs")
    def refs() -> Any:
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": hub.repository.head}
        tags = []
        for name, oid in hub.repository.tags.items():
            tags.append({"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid})
        return {"branches": [main], "tags": tags, "converts": []}

    @app.put(api + "/settings")
    def settings(body: dict[str, Any]) -> Any:
        if "private" in body:
            hub.repository.private = body["private"]
        else:
            hub.repository.private = body.get("visibility") != "public"
        return {"private": hub.repository.private}

    @app.post(api + "/preupload/{revision}")
    def preupload(body: dict[str, Any]) -> Any:
        """Say for each file whether it is uploaded by Git LFS or within the commit."""
        files = []
        for file in body["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return {"files": files}

    @app.post(f"/{NAME}.git/info/lfs/objects/batch")
    def lfs_batch(body: dict[str, Any]) -> Any:
        """Say for each large file where to upload it; nowhere if the server has it."""
        objects = [{"oid": entry["oid"], "size": entry["size"]} for entry in body["objects"]]
        for entry in objects:
            if entry["oid"] not in hub.objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}", "header": {}}}
        return {"transfer": "basic", "objects": objects}

    @app.put("/lfs/{oid}")
    async def lfs_upload(oid: str, request: Request) -> Any:
        hub.objects[oid] = await request.body()
        assert hashlib.sha256(hub.objects[oid]).hexdigest() == oid
        return {}

    @app.post(api + "/commit/main")
    async def commit(request: Request) -> Any:
        """Apply a commit, which is sent as one JSON object a line."""
        _, head_files = hub.repository.find_commit("main")
        files = dict(head_files)
        body = await request.body()
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                files.pop(value["path"])
        oid = hub.repository.commit(files)
        return {"commitUrl": f"{hub.url}/{NAME}/commit/{oid}", "commitOid": oid, "success": True}

    @app.post(api + "/tag/{revision}")
    def tag(revision: str, body: dict[str, Any]) -> Any:
        oid, _ = hub.repository.find_commit(revision)
        hub.repository.tags[body["tag"]] = oid
        return {}

    @app.post("/api/validate-yaml")
    def validate_yaml() -> Any:
        if hub.card_error is not None:
            return JSONResponse({"errors": [{"message": hub.card_error}], "warnings": []}, 400)
        return {"errors": [], "warnings": []}

    @app.api_route(f"/{NAME}/resolve/{{revision}}/{{path:path}}", methods=["GET", "HEAD"])
    def resolve(revision: str, path: str) -> Any:
        oid, files = hub.repository.find_commit(revision)
        if path not in files:
            raise HTTPException(404, "not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})

        # The ETag is the hash of the large file, or else Git's hash.
        entry = describe_file(path, files[path])
        etag = entry.get("lfs", entry)["oid"]
        return Response(files[path], headers={"ETag": f'"{etag}"', "X-Repo-Commit": oid})

    return app


def describe_file(path: str, content: bytes) -> dict[str, Any]:
    """A file's entry in the Hub's list of files."""
    # Git's hash of a file covers a header with its length.
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": oid, "size": len(content), "path": path}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start a server, and have the Hub's client ask it, in this process and in processes that this one starts."""
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        port = listening_socket.getsockname()[1]
        hub = HubServer(f"http://127.0.0.1:{port}")
        server = uvicorn.Server(uvicorn.Config(build_app(hub), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening_socket],), daemon=True)
        thread.start()
        redirect_client(monkeypatch, hub.url)
        yield hub
        server.should_exit = True
        thread.join()


def redirect_client(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Have the Hub's client ask a server at `url`, without any token and without waiting between retries."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants + "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants + "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)

    # Processes that are started later read the environment.
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)


def read_tree(folder: Path) -> Tree:
    """All files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def place_files(hub: HubServer, files: Tree, private: bool = False) -> Repository:
    """Create the repository with these files in one commit, tagged v1.0, without the client."""
    repository = Repository(private)
    repository.tags["v1.0"] = repository.commit({".gitattributes": b"", **files})
    hub.created_repository = repository
    return repository


def read_published(hub: HubServer) -> Tree:
    """The files at the tag v1.0, without the file that the Hub adds itself."""
    _, files = hub.repository.find_commit("v1.0")
    return {path: content for path, content in files.items() if path != ".gitattributes"}


def run_command(*arguments: object) -> None:
    """Run `python -m hub_cards` with these arguments, in this process."""
    main([str(argument) for argument in arguments])
