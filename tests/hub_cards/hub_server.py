"""A server on the loopback address with as much of the Hub's HTTP API as pushing and loading a model need.

The server can have one repository, `REPO_ID`, and accepts one token, `TOKEN`. `serve_hub` starts it.
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

from hub_cards.__main__ import main as run_hub_cards
from hub_cards.contents import list_release


REPO_ID = "me/Tiny-NormLlava"
TOKEN = "hf_loopback"
# Files with these endings are the large files, which the Hub stores with Git LFS instead of in the commit.
LFS_SUFFIXES = (".safetensors", ".png", ".gguf")
# The files of a folder or of a commit: their contents by their paths.
Tree = dict[str, bytes]


@dataclass
class Repository:
    """A repository on the server.

    Attributes:
        private: Whether only requests with the token see the repository.
        commits: The files of each commit, by the commit's id. The newest commit is the last.
        tags: The id of the commit that a tag is on, by the tag's name.
    """

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def add_commit(self, tree: Tree) -> str:
        """Add a commit with these files, and return its id."""
        commit_id = f"{len(self.commits):040x}"  # 40 hexadecimal digits, as in Git
        self.commits[commit_id] = tree
        return commit_id

    @property
    def head(self) -> str:
        """The id of the newest commit."""
        return list(self.commits)[-1]

    def find_commit(self, revision: str) -> tuple[str, Tree]:
        """The id and the files of a commit.

        Args:
            revision: The branch "main", a tag, or a commit's id.

        Raises:
            HTTPException: if there is no such revision. The server answers with the exception's status.
        """
        ids_by_name = {"main": self.head, **self.tags}
        commit_id = ids_by_name.get(revision, revision)  # a revision without an entry is a commit's id
        if commit_id not in self.commits:
            raise HTTPException(404, "no revision", {"X-Error-Code": "RevisionNotFound"})
        return commit_id, self.commits[commit_id]


class ReceivedRequest(NamedTuple):
    """A request that the server got.

    Attributes:
        method: The HTTP method.
        path: The URL's path.
        authorization: The header `Authorization`, which holds the token; empty if the request has no token.
    """

    method: str
    path: str
    authorization: str


@dataclass
class HubServer:
    """The server's state. Tests read it, and set `failures` and `card_error`.

    Attributes:
        url: The server's address.
        created_repository: The repository; `None` until it is created.
        large_files: Content of the large files that were uploaded, by their SHA-256 hashes.
        failures: HTTP statuses by parts of paths. The next request whose path contains the part fails with the
            status, and the entry is removed.
        card_error: The message with which the server refuses the metadata of cards; `None` if cards are accepted.
        requests: All requests so far.
    """

    url: str
    created_repository: Repository | None = None
    large_files: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    card_error: str | None = None
    requests: list[ReceivedRequest] = field(default_factory=list)

    @property
    def repository(self) -> Repository:
        """The repository.

        Raises:
            HTTPException: if there is no repository. The server answers with the exception's status.
        """
        if self.created_repository is None:
            raise HTTPException(404, "not found", {"X-Error-Code": "RepoNotFound"})
        return self.created_repository

    def has_private_repository(self) -> bool:
        """Whether there is a repository and it is private."""
        return self.created_repository is not None and self.created_repository.private

    def list_uploads(self) -> list[str]:
        """The paths to which large files were uploaded."""
        paths = [request.path for request in self.requests if request.method == "PUT"]
        return [path for path in paths if path.startswith("/lfs/")]


def build_app(hub: HubServer) -> FastAPI:
    """The server's app. Each function inside answers the requests to the path in its decorator."""
    app = FastAPI()
    model_api = f"/api/models/{REPO_ID}"

    @app.middleware("http")
    async def admit_request(request: Request, answer: Callable[..., Any]) -> Any:
        """Record a request, then refuse it or pass it on to the function that answers it."""
        path = request.url.path
        authorization = request.headers.get("Authorization", "")
        hub.requests.append(ReceivedRequest(request.method, path, authorization))
        for part, status in hub.failures.items():
            if part in path:
                del hub.failures[part]
                return JSONResponse({"error": "set by a test"}, status)

        if authorization not in ("", f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            return JSONResponse({"error": message}, 401, {"X-Error-Message": message})
        # To requests without a token, the Hub doesn't tell that a private repository exists.
        asks_for_repository = REPO_ID in path
        if asks_for_repository and hub.has_private_repository() and not authorization:
            return JSONResponse({"error": "not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        return await answer(request)

    @app.post("/api/repos/create")
    def create_repository(body: dict[str, Any]) -> Any:
        # Versions of the client differ in the field by which they ask for a private repository.
        is_private = bool(body.get("private")) or body.get("visibility") == "private"
        hub.created_repository = Repository(is_private)
        hub.created_repository.add_commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{hub.url}/{REPO_ID}", "name": REPO_ID, "id": REPO_ID}

    @app.get(model_api)
    @app.get(model_api + "/revision/{revision}")
    def describe_repository(revision: str = "main") -> Any:
        commit_id, files = hub.repository.find_commit(revision)
        return {
            "id": REPO_ID,
            "sha": commit_id,
            "siblings": [{"rfilename": path} for path in files],
            "tags": [],
            "gated": False,
            "private": hub.repository.private,
        }

    @app.get(model_api + "/tree/{revision}")
    def list_files(revision: str) -> Any:
        _, files = hub.repository.find_commit(revision)
        return [describe_file(path, content) for path, content in files.items()]

    @app.get(model_api + "/refs")
    def list_branches_and_tags() -> Any:
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": hub.repository.head}
        tags = []
        for name, commit_id in hub.repository.tags.items():
            tags.append({"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit_id})
        return {"branches": [main], "tags": tags, "converts": []}

    @app.put(model_api + "/settings")
    def change_visibility(body: dict[str, Any]) -> Any:
        # Here too, versions of the client differ in the field that they send.
        if "private" in body:
            hub.repository.private = body["private"]
        else:
            hub.repository.private = body.get("visibility") != "public"
        return {"private": hub.repository.private}

    @app.post(model_api + "/preupload/{revision}")
    def choose_upload_mode(body: dict[str, Any]) -> Any:
        """Say for each file whether the client has to upload it with Git LFS or within the commit."""
        files = []
        for file in body["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return {"files": files}

    @app.post(f"/{REPO_ID}.git/info/lfs/objects/batch")
    def choose_upload_urls(body: dict[str, Any]) -> Any:
        """Say for each large file to which URL the client has to upload it. Files on the server get no URL."""
        objects = []
        for entry in body["objects"]:
            file_hash = entry["oid"]
            answer = {"oid": file_hash, "size": entry["size"]}
            if file_hash not in hub.large_files:
                answer["actions"] = {"upload": {"href": f"{hub.url}/lfs/{file_hash}", "header": {}}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    @app.put("/lfs/{file_hash}")
    async def upload_large_file(file_hash: str, request: Request) -> Any:
        content = await request.body()
        assert hashlib.sha256(content).hexdigest() == file_hash
        hub.large_files[file_hash] = content
        return {}

    @app.post(model_api + "/commit/main")
    async def apply_commit(request: Request) -> Any:
        """Make a commit from the operations in the request's body, one JSON object in each line."""
        _, head_files = hub.repository.find_commit("main")
        files = dict(head_files)
        body = await request.body()
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = hub.large_files[value["oid"]]
            elif operation["key"] == "deletedFile":
                files.pop(value["path"])
        commit_id = hub.repository.add_commit(files)
        return {"commitUrl": f"{hub.url}/{REPO_ID}/commit/{commit_id}", "commitOid": commit_id, "success": True}

    @app.post(model_api + "/tag/{revision}")
    def set_tag(revision: str, body: dict[str, Any]) -> Any:
        commit_id, _ = hub.repository.find_commit(revision)
        hub.repository.tags[body["tag"]] = commit_id
        return {}

    @app.post("/api/validate-yaml")
    def validate_metadata() -> Any:
        if hub.card_error is not None:
            return JSONResponse({"errors": [{"message": hub.card_error}], "warnings": []}, 400)
        return {"errors": [], "warnings": []}

    @app.api_route(f"/{REPO_ID}" + "/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def download_file(revision: str, path: str) -> Any:
        commit_id, files = hub.repository.find_commit(revision)
        if path not in files:
            raise HTTPException(404, "not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit_id})

        # The ETag of a large file is its SHA-256 hash. Other files have Git's hash.
        entry = describe_file(path, files[path])
        etag = entry["oid"]
        if "lfs" in entry:
            etag = entry["lfs"]["oid"]
        return Response(files[path], headers={"ETag": f'"{etag}"', "X-Repo-Commit": commit_id})

    return app


def describe_file(path: str, content: bytes) -> dict[str, Any]:
    """A file's entry in the Hub's list of files."""
    # Git hashes a header with the file's size, then the content.
    header = b"blob %d\0" % len(content)
    git_hash = hashlib.sha1(header + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": git_hash, "size": len(content), "path": path}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,  # about the size of the small file that Git has in place of a large file
        }
    return entry


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start a server, and have the Hub's client send its requests to this server instead of the Hub.

    The same holds for the client in processes that this process starts.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:  # the system chooses a free port
        _, port = listening_socket.getsockname()
        hub = HubServer(f"http://127.0.0.1:{port}")
        server = uvicorn.Server(uvicorn.Config(build_app(hub), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening_socket],), daemon=True)
        thread.start()
        redirect_client(monkeypatch, hub.url)
        yield hub
        server.should_exit = True
        thread.join()


def redirect_client(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Have the Hub's client send its requests to `url`, without any token and without waiting between retries."""
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
    """All files of a release folder and of its subfolders."""
    files = [path for path in list_release(folder) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def place_files(hub: HubServer, files: Tree, private: bool = False) -> Repository:
    """Create the repository with one commit of these files, and put the tag v1.0 on the commit."""
    repository = Repository(private)
    commit_id = repository.add_commit({".gitattributes": b"", **files})
    repository.tags["v1.0"] = commit_id
    hub.created_repository = repository
    return repository


def read_published(hub: HubServer) -> Tree:
    """The files at the tag v1.0, without the file that the Hub adds itself."""
    _, files = hub.repository.find_commit("v1.0")
    return {path: content for path, content in files.items() if path != ".gitattributes"}


def run_command(*arguments: object) -> None:
    """Run `python -m hub_cards` with these arguments, in this process."""
    run_hub_cards([str(argument) for argument in arguments])
