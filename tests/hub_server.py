"""A Hub on loopback: enough of its HTTP API for the real client to create, commit and download a repository.

Repositories are in memory. Like the real Hub, it rejects a missing token, broken card metadata, and a large file that
was not uploaded before its commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import huggingface_hub.constants
import pytest
import yaml

TOKEN = "hf_ofNobodyAtAll"
RELATIONS = ("adapter", "finetune", "merge", "quantized")
FIRST_COMMIT = "0" * 40


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Messages, oldest first."""
    branches: dict[str, Repository] = field(default_factory=dict)
    """Those beside main."""
    tags: dict[str, str] = field(default_factory=dict)
    """{name: commit}."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits} {sorted(self.files.items())}".encode()).hexdigest()

    def at(self, revision: str) -> Repository:
        """Return a branch, by its name or its latest commit, or what a tag names."""
        found = (one for one in self.branches.values() if self.tags.get(revision, revision) == one.sha)
        return self.branches.get(revision) or next(found, self)


class HubServer(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1.

    With `fail_with`, every write request to `failing_path` gets that status; with `never_answers`, requests wait until
    `released`.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.fail_with: int | None = None
        self.failing_path = ""
        self.never_answers = False
        self.released = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()


@contextmanager
def serving_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a Hub that this process, and those it starts, take for the real one."""
    with serving() as server:
        take_for_the_hub(monkeypatch, server.endpoint)
        yield server
        huggingface_hub.close_session()


def take_for_the_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process, and those it starts, take the server there for the real one."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    names = {"TOKEN": TOKEN, "ENDPOINT": endpoint, "HUB_OFFLINE": "0", "HUB_DISABLE_XET": "1"}
    for name, value in names.items():
        monkeypatch.setenv(f"HF_{name}", value)
    huggingface_hub.close_session()  # the client caches that it was offline


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def do_PUT(self) -> None:
        body = self._body()
        oid = self.path.rsplit("/", 1)[1]
        if self._is_failing():
            return
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer({"error": "not the bytes that were announced"}, 400)
        self.server.large_files[oid] = body
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        if self._is_failing():
            return
        is_public = path == "/api/validate-yaml"
        if not is_public and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            if metadata.get("base_model_relation", "finetune") not in RELATIONS:
                return self._answer({"error": '"base_model_relation" must be one of those'}, 400)
            self._answer({"errors": [], "warnings": [] if metadata else [{"message": "empty metadata"}]})
        elif "/preupload/" in path:
            self._preupload(self._repository(path).at(path.split("/")[-1]), json.loads(body)["files"])
        elif "/branch/" in path:
            self._branch(self._repository(path), path.split("/")[-1], json.loads(body)["startingPoint"])
        elif "/tag/" in path:
            self._repository(path).tags[json.loads(body)["tag"]] = path.split("/")[-1]
            self._answer({})
        elif path.endswith("/info/lfs/objects/batch"):
            self._lfs_batch(json.loads(body)["objects"])
        elif "/commit/" in path:
            self._commit(path, [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": f"no such thing: {path}"}, 404)

    def _is_failing(self) -> bool:
        if self.server.failing_path not in self.path:
            return False
        if self.server.never_answers:
            self.server.released.wait()
        if self.server.fail_with is not None:
            self._answer({"error": "out of order"}, self.server.fail_with)
        return self.server.fail_with is not None

    def _repository(self, path: str) -> Repository:
        return self.server.repositories["/".join(path.removeprefix("/api/models/").split("/")[:2])]

    def _create(self, wish: dict[str, Any]) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        answer = {"url": f"{self.server.endpoint}/{name}", "name": name}
        if name in self.server.repositories:
            return self._answer(answer | {"error": "You already created this model repo"}, 409)
        self.server.repositories[name] = Repository(wish.get("visibility") == "private" or bool(wish.get("private")))
        self._answer(answer)

    def _branch(self, repository: Repository, name: str, start: str) -> None:
        assert start == FIRST_COMMIT, "a branch begins without the files of main"
        if name in repository.branches:
            return self._answer({"error": "Reference already exists"}, 409)
        repository.branches[name] = Repository(repository.private)
        self._answer({})

    def _preupload(self, repository: Repository, files: list[dict[str, Any]]) -> None:
        answers = []
        for file in files:
            is_large = file["path"].endswith((".safetensors", ".gguf"))
            there = repository.files.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            if there is not None:
                answer["oid"] = hashlib.sha256(there).hexdigest() if is_large else _git_hash(there)
            answers.append(answer)
        self._answer({"files": answers})

    def _lfs_batch(self, objects: list[dict[str, Any]]) -> None:
        for thing in objects:
            if thing["oid"] not in self.server.large_files:
                thing["actions"] = {"upload": {"href": f"{self.server.endpoint}/storage/{thing['oid']}"}}
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, path: str, lines: list[dict[str, Any]]) -> None:
        repository = self._repository(path).at(path.split("/")[-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.large_files[value["oid"]]
        name = path.removeprefix("/api/models/").split("/commit/")[0]
        url = f"{self.server.endpoint}/{name}/commit/{repository.sha}"
        self._answer({"success": True, "commitOid": repository.sha, "commitUrl": url})

    def _read(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/").removeprefix("models/").split("/")
        length = 3 if parts[0] == "datasets" else 2
        name, request = "/".join(parts[:length]), parts[length:]
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            return self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if request[:1] == ["refs"]:
            tags = [
                {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": sha} for tag, sha in repository.tags.items()
            ]
            return self._answer({"branches": [], "converts": [], "tags": tags})
        if request[:1] == ["commits"]:
            facts = {"id": FIRST_COMMIT, "authors": [], "title": "initial commit", "message": ""}
            return self._answer([facts | {"date": "2026-01-01T00:00:00.000Z"}])
        repository = repository.at(request[1]) if len(request) > 1 else repository
        if request[:1] == ["resolve"]:
            return self._resolve(repository, "/".join(request[2:]))
        if request[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
                for path, content in repository.files.items()
            ]
            return self._answer(listed if len(request) == 2 else [])  # no folders
        card = repository.files.get("README.md", b"---\n{}\n---").decode().split("---")[1]
        self._answer(
            {
                "id": name,
                "sha": repository.sha,
                "private": repository.private,
                "siblings": [{"rfilename": path} for path in repository.files],
                "library_name": yaml.safe_load(card).get("library_name"),
                "config": json.loads(repository.files.get("config.json", b"{}")),
            }
        )

    def _resolve(self, repository: Repository, path: str) -> None:
        headers = {"X-Repo-Commit": repository.sha, "Accept-Ranges": "bytes"}
        if path not in repository.files:
            return self._answer({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        content = repository.files[path]
        headers["ETag"] = f'"{_git_hash(content)}"'
        if (wanted := self.headers.get("Range")) is None:
            return self._send(content, 200, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        part = content[int(first) : int(last or len(content)) + 1]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(part, 206, headers | {"Content-Range": span})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, value: Any, status: int | None = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status or 200, {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
