"""A server on the loopback that speaks as much of the Hub's HTTP API as publishing and loading a repository take."""

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from hub_cards.__main__ import main


LFS_NAMES = (".safetensors", ".png")
NAME = "me/Tiny-NormLlava"
TOKEN = "hf_loopback"
Tree = dict[str, bytes]


@dataclass
class Repository:
    """Commits, each a whole tree, and the tags on them."""

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: Tree) -> str:
        oid = f"{len(self.commits):040x}"
        self.commits[oid] = tree
        return oid

    @property
    def head(self) -> str:
        return [*self.commits][-1]

    def at(self, revision: str) -> tuple[str, Tree]:
        oid = {"main": self.head, **self.tags}.get(revision, revision)
        if oid not in self.commits:
            raise HTTPException(404, "no revision", {"X-Error-Code": "RevisionNotFound"})
        return oid, self.commits[oid]


@dataclass
class HubServer:
    """What the server holds.

    The next request whose path holds one in `failures` gets its status. A card is refused with `card_error`.
    """

    url: str
    made: Repository | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    card_error: str | None = None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and the authorization header of every request."""

    @property
    def repository(self) -> Repository:
        if self.made is None:
            raise HTTPException(404, "not found", {"X-Error-Code": "RepoNotFound"})
        return self.made

    def uploads(self) -> list[str]:
        return [path for method, path, _ in self.requests if method == "PUT" and path.startswith("/lfs/")]


def build_app(hub: HubServer) -> FastAPI:
    app = FastAPI()
    api = f"/api/models/{NAME}"

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[..., Any]) -> Any:
        path, authorization = request.url.path, request.headers.get("Authorization", "")
        hub.requests.append((request.method, path, authorization))
        for part in [part for part in hub.failures if part in path]:
            return JSONResponse({"error": "planted"}, hub.failures.pop(part))
        if authorization not in ("", f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            return JSONResponse({"error": message}, 401, {"X-Error-Message": message})
        if NAME in path and hub.made and hub.made.private and not authorization:
            return JSONResponse({"error": "not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        return await answer(request)

    @app.post("/api/repos/create")
    def create(asked: dict[str, Any]) -> Any:
        hub.made = Repository(bool(asked.get("private")) or asked.get("visibility") == "private")
        hub.made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{hub.url}/{NAME}", "name": NAME, "id": NAME}

    @app.get(api)
    @app.get(api + "/revision/{revision}")
    def info(revision: str = "main") -> Any:
        oid, files = hub.repository.at(revision)
        siblings = [{"rfilename": path} for path in files]
        found = {"id": NAME, "sha": oid, "siblings": siblings, "tags": [], "gated": False}
        return {**found, "private": hub.repository.private}

    @app.get(api + "/tree/{revision}")
    def tree(revision: str) -> Any:
        return [describe(path, content) for path, content in hub.repository.at(revision)[1].items()]

    @app.get(api + "/refs")
    def refs() -> Any:
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": hub.repository.head}
        tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": oid} for n, oid in hub.repository.tags.items()]
        return {"branches": [main], "tags": tags, "converts": []}

    @app.put(api + "/settings")
    def settings(asked: dict[str, Any]) -> Any:
        hub.repository.private = asked.get("private", asked.get("visibility") != "public")
        return {"private": hub.repository.private}

    @app.post(api + "/preupload/{revision}")
    def preupload(asked: dict[str, Any]) -> Any:
        modes = {file["path"]: "lfs" if file["path"].endswith(LFS_NAMES) else "regular" for file in asked["files"]}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    @app.post(f"/{NAME}.git/info/lfs/objects/batch")
    def lfs_batch(asked: dict[str, Any]) -> Any:
        objects = [{"oid": entry["oid"], "size": entry["size"]} for entry in asked["objects"]]
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
        files = dict(hub.repository.at("main")[1])
        for line in map(json.loads, (await request.body()).splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        oid = hub.repository.commit(files)
        return {"commitUrl": f"{hub.url}/{NAME}/commit/{oid}", "commitOid": oid, "success": True}

    @app.post(api + "/tag/{revision}")
    def tag(revision: str, asked: dict[str, Any]) -> Any:
        hub.repository.tags[asked["tag"]] = hub.repository.at(revision)[0]
        return {}

    @app.post("/api/validate-yaml")
    def validate_yaml() -> Any:
        if hub.card_error is not None:
            return JSONResponse({"errors": [{"message": hub.card_error}], "warnings": []}, 400)
        return {"errors": [], "warnings": []}

    @app.api_route(f"/{NAME}/resolve/{{revision}}/{{path:path}}", methods=["GET", "HEAD"])
    def resolve(revision: str, path: str) -> Any:
        oid, files = hub.repository.at(revision)
        if path not in files:
            raise HTTPException(404, "not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
        entry = describe(path, files[path])
        etag = entry.get("lfs", entry)["oid"]
        return Response(files[path], headers={"ETag": f'"{etag}"', "X-Repo-Commit": oid})

    return app


def describe(path: str, content: bytes) -> dict[str, Any]:
    """A file as the Hub lists it."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # git's
    entry: dict[str, Any] = {"type": "file", "oid": oid, "size": len(content), "path": path}
    if path.endswith(LFS_NAMES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server that the client asks in place of the Hub, in this process and in those that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hub = HubServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(build_app(hub), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(constants + "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants + "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants + "HF_TOKEN_PATH", "/nonexistent")
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub
        server.should_exit = True
        thread.join()


def read_tree(folder: Path) -> Tree:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def place_files(hub: HubServer, files: Tree, private: bool = False) -> Repository:
    """Put files on the server without the client, tagged v1.0."""
    hub.made = Repository(private)
    hub.made.tags["v1.0"] = hub.made.commit({".gitattributes": b"", **files})
    return hub.made


def published(hub: HubServer) -> Tree:
    """The files at the tag, less the Hub's own."""
    return {path: content for path, content in hub.repository.at("v1.0")[1].items() if path != ".gitattributes"}


def run_command(*words: object) -> None:
    """The command line, in this process."""
    main([str(word) for word in words])
