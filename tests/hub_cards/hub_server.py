"""A server on the loopback that speaks as much of the Hub's HTTP API as publishing and loading take.

Faults are switched on by name in `faults`: each entry is how many times it still strikes. `500 #3` and `403 #3` are
answers to the third request; the others are named where they strike.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

from hub_cards.__main__ import main


LFS_NAMES = (".safetensors", ".png")
NAME = "me/Tiny-NormLlava"
REPO = r"([\w.-]+/[\w.-]+)"


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """Commits, each a whole tree, and what points to them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, tree: dict[str, bytes]) -> str:
        oid = hashlib.sha1(repr((self.main, sorted((k, git_oid(v)) for k, v in tree.items()))).encode()).hexdigest()
        self.commits[oid], self.main = tree, oid
        return oid

    def resolve(self, revision: str) -> str | None:
        revision = unquote(revision)
        found = self.main if revision == "main" else self.tags.get(revision, revision)
        return found if found in self.commits else None


class HubServer:
    """Use as a context manager; `url` is the endpoint."""

    def __init__(self, token: str = "hf_loopback") -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: Counter[str] = Counter()
        self.uploads: list[str] = []
        self.requests: list[tuple[str, str, str]] = []
        """Method, path, and the authorization header of every request."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Empty, without faults."""
        for held in (self.repositories, self.objects, self.faults, self.uploads, self.requests):
            held.clear()

    def count(self, method: str, path: str, authorization: str) -> int:
        with self._lock:
            self.requests.append((method, path, authorization))
            return len(self.requests)

    def strikes(self, fault: str) -> bool:
        is_planted = self.faults[fault] > 0
        self.faults[fault] -= is_planted
        return is_planted


class Answer(Exception):
    """Raised where a request ends early."""

    def __init__(self, status: int, error: str, **headers: str) -> None:
        self.status, self.body = status, {"error": error}
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    """Each route returns what is sent as JSON or bytes, the latter with headers."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets, and the second would wait 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, status: int, body: Any, headers: dict[str, str]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().strip(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        self.authorization = self.headers.get("Authorization") or ""
        number = self.hub.count(self.command, path, self.authorization)
        self.body = self._body() if self.command in ("POST", "PUT") else b""
        try:
            for status in (403, 500):
                if self.hub.strikes(f"{status} #{number}"):
                    raise Answer(status, "planted")
            if self.authorization not in ("", f"Bearer {self.hub.token}"):
                message = "Invalid credentials in Authorization header"
                raise Answer(401, message, X_Error_Message=message)
            for method, pattern, function in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    answer, headers = function(self, *match.groups()), {}
                    if isinstance(answer, tuple):
                        answer, headers = answer
                    return self._reply(200, answer, headers)
            raise Answer(404, f"no route {self.command} {path}")
        except Answer as answer:
            return self._reply(answer.status, answer.body, answer.headers)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle

    def _asked(self) -> Any:
        """The body of a request that writes."""
        if not self.authorization:
            raise Answer(401, "unauthorized")
        return json.loads(self.body)

    def _repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.authorization):
            raise Answer(404 if self.authorization else 401, "not found", X_Error_Code="RepoNotFound")
        return found

    def _tree(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit at a revision, and its files."""
        found = self._repository(name)
        oid = found.resolve(revision)
        if oid is None:
            raise Answer(404, "no revision", X_Error_Code="RevisionNotFound")
        return oid, found.commits[oid]

    def create(self) -> Any:
        asked = self._asked()
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repositories:
            raise Answer(409, "exists")
        is_private = bool(asked.get("private")) or asked.get("visibility") == "private"
        made = self.hub.repositories[name] = Repository(is_private)
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{self.hub.url}/{name}", "name": name, "id": name}

    def info(self, name: str, revision: str = "main") -> Any:
        oid, files = self._tree(name, revision)
        siblings = [{"rfilename": path} for path in files]
        found = {"id": name, "sha": oid, "siblings": siblings, "tags": [], "gated": False}
        return {**found, "private": self._repository(name).private}

    def tree(self, name: str, revision: str) -> Any:
        return [_entry(path, content) for path, content in self._tree(name, revision)[1].items()]

    def refs(self, name: str) -> Any:
        found = self._repository(name)
        heads = {"main": found.main, **found.branches}
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in heads.items()]
        tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in found.tags.items()]
        return {"branches": branches, "tags": tags, "converts": []}

    def settings(self, name: str) -> Any:
        asked, found = self._asked(), self.hub.repositories[name]
        found.private = asked.get("private", asked.get("visibility") != "public")
        return {"private": found.private}

    def preupload(self, name: str, revision: str) -> Any:
        paths = [file["path"] for file in self._asked()["files"]]
        modes = {path: "lfs" if path.endswith(LFS_NAMES) else "regular" for path in paths}
        return {"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]}

    def lfs_batch(self, name: str) -> Any:
        objects = []
        for entry in self._asked()["objects"]:
            made = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.hub.objects:
                made["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}", "header": {}}}
            objects.append(made)
        return {"transfer": "basic", "objects": objects}

    def lfs_upload(self, oid: str) -> Any:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Answer(400, "another hash")
        self.hub.objects[oid] = self.body
        self.hub.uploads.append(oid)
        return {}

    def commit(self, name: str, revision: str) -> Any:
        if not self.authorization:
            raise Answer(401, "unauthorized")
        found = self.hub.repositories[name]
        if self.hub.strikes("conflict"):  # somebody else was faster
            found.commit({**found.commits[found.main], "theirs.txt": b"x"})
        tree = dict(found.commits[found.main])
        for line in (json.loads(line) for line in self.body.splitlines() if line.strip()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", found.main) != found.main:
                raise Answer(412, "the parent commit is not the head")
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                tree.pop(value["path"])
        oid = found.commit(tree)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}

    def tag(self, name: str, revision: str) -> Any:
        tag, found = self._asked()["tag"], self.hub.repositories[name]
        if tag in found.tags:
            raise Answer(409, "the tag exists")
        found.tags[tag] = found.resolve(revision) or found.main
        return {}

    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    def resolve(self, name: str, revision: str, path: str) -> Any:
        oid, files = self._tree(name, revision)
        if (content := files.get(unquote(path))) is None:
            raise Answer(404, "not found", X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        etag = hashlib.sha256(content).hexdigest() if path.endswith(LFS_NAMES) else git_oid(content)
        if self.command == "GET" and path.endswith(".safetensors") and self.hub.strikes("flipped byte"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        return content, {"ETag": f'"{etag}"', "X-Repo-Commit": oid, "Accept-Ranges": "bytes"}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": git_oid(content), "size": len(content), "path": path}
    if path.endswith(LFS_NAMES):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("GET", rf"/api/models/{REPO}", _Handler.info),
    ("GET", rf"/api/models/{REPO}/revision/([^/]+)", _Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/([^/]+)", _Handler.tree),
    ("GET", rf"/api/models/{REPO}/refs", _Handler.refs),
    ("PUT", rf"/api/models/{REPO}/settings", _Handler.settings),
    ("POST", rf"/api/models/{REPO}/preupload/([^/]+)", _Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(\w+)", _Handler.lfs_upload),
    ("POST", rf"/api/models/{REPO}/commit/([^/]+)", _Handler.commit),
    ("POST", rf"/api/models/{REPO}/tag/([^/]+)", _Handler.tag),
    ("GET", rf"/{REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("HEAD", rf"/{REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
]


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point the command line's client at a server, in this process and in those that it starts."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")


def tree(stage: Path) -> dict[str, bytes]:
    return {path.relative_to(stage).as_posix(): path.read_bytes() for path in stage.rglob("*") if path.is_file()}


def place(hub: HubServer, files: dict[str, bytes], private: bool = False) -> Repository:
    """Put files on the server without the client, tagged v1.0."""
    made = hub.repositories[NAME] = Repository(private)
    made.tags["v1.0"] = made.commit({".gitattributes": b"", **files})
    return made


def published(hub: HubServer, revision: str) -> dict[str, bytes]:
    repository = hub.repositories[NAME]
    found = repository.commits[repository.resolve(revision) or ""]
    return {path: content for path, content in found.items() if path != ".gitattributes"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["hub_cards", *arguments])
    main()
