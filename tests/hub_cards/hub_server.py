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
import yaml

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
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
        if self.faults[fault] > 0:
            self.faults[fault] -= 1
            return True
        return False


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets, and the second would wait 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().strip(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _handle(self) -> None:
        hub = self.server_state
        path = urlsplit(self.path).path
        authorization = self.headers.get("Authorization") or ""
        self.number = hub.count(self.command, path, authorization)
        body = self._body() if self.command in ("POST", "PUT") else b""
        for status in (403, 500):
            if hub.strikes(f"{status} #{self.number}"):
                return self._reply(status, {"error": "planted"})
        if authorization not in ("", f"Bearer {hub.token}"):
            message = "Invalid credentials in Authorization header"
            return self._reply(401, {"error": message}, {"X-Error-Message": message})
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                return function(self, *match.groups(), body=body)
        return self._reply(404, {"error": f"no route {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.server_state.token}":
            return True
        self._reply(403 if self.headers.get("Authorization") else 401, {"error": "unauthorized"})
        return False

    def _repository(self, name: str) -> Repository | None:
        found = self.server_state.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {self.server_state.token}"
        if found is None or (found.private and not allowed):
            self._reply(
                404 if self.headers.get("Authorization") else 401,
                {"error": "not found"},
                {"X-Error-Code": "RepoNotFound"},
            )
            return None
        return found

    def create(self, body: bytes) -> None:
        if not self._may_write():
            return
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server_state.repositories:
            self._reply(409, {"error": "exists", "url": f"{self.server_state.url}/{name}"})
            return
        made = self.server_state.repositories[name] = Repository(
            bool(asked.get("private")) or asked.get("visibility") == "private"
        )
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._reply(200, {"url": f"{self.server_state.url}/{name}", "name": name, "id": name})

    def info(self, name: str, revision: str = "main", *, body: bytes) -> None:
        found = self._repository(name)
        if found is None:
            return
        oid = found.resolve(revision)
        if oid is None:
            self._reply(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": path} for path in found.commits[oid]]
        self._reply(
            200,
            {
                "id": name,
                "sha": oid,
                "private": found.private,
                "siblings": siblings,
                "tags": [],
                "gated": False,
            },
        )

    def tree(self, name: str, revision: str, *, body: bytes) -> None:
        found = self._repository(name)
        if found is None:
            return
        oid = found.resolve(revision)
        if oid is None:
            self._reply(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return
        self._reply(200, [_entry(path, content) for path, content in found.commits[oid].items()])

    def paths_info(self, name: str, revision: str, *, body: bytes) -> None:
        found = self._repository(name)
        if found is not None:
            paths = json.loads(body)["paths"]
            tree = found.commits[found.resolve(revision) or found.main]
            self._reply(200, [_entry(path, tree[path]) for path in paths if path in tree])

    def refs(self, name: str, *, body: bytes) -> None:
        found = self._repository(name)
        if found is not None:
            heads = {"main": found.main, **found.branches}
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in heads.items()]
            tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in found.tags.items()]
            self._reply(200, {"branches": branches, "tags": tags, "converts": []})

    def settings(self, name: str, *, body: bytes) -> None:
        if self._may_write():
            asked = json.loads(body)
            found = self.server_state.repositories[name]
            found.private = asked.get("private", asked.get("visibility") != "public")
            self._reply(200, {"private": found.private})

    def preupload(self, name: str, revision: str, *, body: bytes) -> None:
        if self._may_write():
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_NAMES) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._reply(200, {"files": files})

    def lfs_batch(self, name: str, *, body: bytes) -> None:
        if not self._may_write():
            return
        objects = []
        for entry in json.loads(body)["objects"]:
            made = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.server_state.objects:
                upload = {"href": f"{self.server_state.url}/lfs/{entry['oid']}", "header": {}}
                made["actions"] = {"upload": upload}
            objects.append(made)
        self._reply(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str, *, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._reply(400, {"error": "another hash"})
        self.server_state.objects[oid] = body
        self.server_state.uploads.append(oid)
        return self._reply(200)

    def commit(self, name: str, revision: str, *, body: bytes) -> None:
        hub = self.server_state
        if not self._may_write():
            return None
        found = hub.repositories[name]
        if hub.strikes("conflict"):  # somebody else was faster
            found.commit({**found.commits[found.main], "theirs.txt": b"x"})
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        tree = dict(found.commits[found.main])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", found.main) != found.main:
                return self._reply(412, {"error": "the parent commit is not the head"})
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] not in hub.objects:
                return self._reply(400, {"error": "a large file was not uploaded"})
            elif line["key"] == "lfsFile":
                tree[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                tree.pop(value["path"])
        oid = found.commit(tree)
        if hub.strikes("dropped after commit"):
            return self._drop()
        answer = {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        return self._reply(200, answer)

    def tag(self, name: str, revision: str, *, body: bytes) -> None:
        if not self._may_write():
            return None
        found, tag = self.server_state.repositories[name], json.loads(body)["tag"]
        if tag in found.tags:
            return self._reply(409, {"error": "the tag exists"})
        found.tags[tag] = found.resolve(revision) or found.main
        return self._reply(200)

    def validate_yaml(self, *, body: bytes) -> None:
        match = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else None
        errors = [] if isinstance(metadata, dict) and "license" in metadata else [{"message": '"license" is required'}]
        self._reply(400 if errors else 200, {"errors": errors, "warnings": []})

    def resolve(self, name: str, revision: str, path: str, *, body: bytes) -> None:
        found = self._repository(name)
        if found is None:
            return None
        oid = found.resolve(revision)
        content = found.commits[oid].get(unquote(path)) if oid is not None else None
        if oid is None or content is None:
            code = "RevisionNotFound" if oid is None else "EntryNotFound"
            headers = {"X-Error-Code": code} | ({"X-Repo-Commit": oid} if oid else {})
            return self._reply(404, {"error": "not found"}, headers)
        etag = hashlib.sha256(content).hexdigest() if path.endswith(LFS_NAMES) else git_oid(content)
        if self.command == "GET" and path.endswith(".safetensors") and self.server_state.strikes("flipped byte"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        return self._reply(200, content, headers)


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
    ("POST", rf"/api/models/{REPO}/paths-info/([^/]+)", _Handler.paths_info),
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
