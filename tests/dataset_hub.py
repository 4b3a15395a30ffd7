"""A Hub on loopback that holds one dataset: enough of its HTTP API for the real client to find and stream it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from datasets import Dataset

REVISION = "a" * 40


def said_with_dataset(name: str, columns: dict[str, Any], program: str, folder: Path) -> str:
    """Serve a dataset, and return the last line that a Python program prints, whose argument is a new cache folder.

    In a process of its own, because huggingface_hub reads its endpoint when it is imported.
    """
    written = io.BytesIO()
    Dataset.from_dict(columns).to_parquet(written)
    with serving_dataset(name, {"train.parquet": written.getvalue()}) as endpoint:
        of_hub = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = os.environ | of_hub | {"HF_HOME": str(folder / "home")}
        command = [sys.executable, "-c", program, str(folder / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@contextmanager
def serving_dataset(name: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve the dataset `name` with its files in the root folder; yield the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).lstrip("/")
            if path.startswith(f"datasets/{name}/resolve/"):
                self._file(path.split("/")[-1])
            elif path.startswith(f"api/datasets/{name}/tree/"):
                listed = [{"type": "file", "path": file, "size": len(files[file]), "oid": etag(file)} for file in files]
                self._answer(listed if path.rsplit("/", 1)[1] in (REVISION, "main") else [])
            elif path.startswith(f"api/datasets/{name}"):
                siblings = [{"rfilename": file} for file in files]
                self._answer({"id": name, "sha": REVISION, "private": False, "siblings": siblings})
            else:
                self._answer({"error": "Repository not found"}, 404, "RepoNotFound")

        def _file(self, file: str) -> None:
            if file not in files:
                return self._answer({"error": "Entry not found"}, 404, "EntryNotFound")
            content = files[file]
            headers = {"ETag": f'"{etag(file)}"', "Accept-Ranges": "bytes"}
            wanted = self.headers.get("Range")
            if wanted is None:
                return self._send(content, 200, headers)
            first, last = wanted.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last or len(content)) + 1]
            span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            self._send(part, 206, headers | {"Content-Range": span})

        def _answer(self, value: Any, status: int = 200, error: str = "") -> None:
            headers = {"Content-Type": "application/json"} | ({"X-Error-Code": error} if error else {})
            self._send(json.dumps(value).encode(), status, headers)

        def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content)), "X-Repo-Commit": REVISION}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def etag(file: str) -> str:
        return hashlib.sha1(files[file]).hexdigest()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
