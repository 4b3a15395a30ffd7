"""Watch a run's report in the browser while it trains: hfgolf watch runs/small

The page is rendered from metrics.jsonl at each request, so it is as new as the last row. It is served on this machine
only, and nothing else of the folder is.
"""

from __future__ import annotations

import threading
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter
from typing import ClassVar

from hfgolf.commands.options import ScriptParser, within
from hfgolf.report.report import render_page
from hfgolf.run.folder import RunFolder
from hfgolf.run.record import read_run
from hfgolf.system.errors import UserError

HOST = "127.0.0.1"
_REWRITES_EVERY = 20.0  # seconds expected between two rows; the page reloads four times as often
_PAUSE = 20  # times what a page took until the next is rendered: reloads in many tabs must not slow the training
_WAITING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>waiting</title>
<style>:root { color-scheme: light dark; } body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; }</style></head>
<body><p>The run has logged nothing yet. This page shows its report after the first step.</p></body></html>
"""


def main() -> None:
    parser = ScriptParser(__doc__)
    parser.add_argument("run", type=Path, help="run folder, such as runs/small")
    parser.add_argument(
        "--port", type=within(0, 65535), default=0, help="on the loopback address (default: any free port)"
    )
    parser.add_argument("--no_browser", action="store_true", help="print the address and open nothing")
    arguments = parser.parse_args()

    with build_server(arguments.run, arguments.port) as server:
        print(f"watching {arguments.run} at {address(server)} (Ctrl-C ends it, and not the run)", flush=True)
        if not arguments.no_browser:
            webbrowser.open(address(server))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class WatchedRun:
    """The page of a run, rendered again if the run has logged something since."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if there is no such folder."""
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name the folder of a run, such as runs/small.")
        self._folder = RunFolder(path)
        self._lock = threading.Lock()
        self._state: object = None
        self._page = _WAITING
        self._next_at = 0.0

    def page(self) -> str:
        """Return the page; one that says to wait if there is not a single row yet."""
        with self._lock:
            state = self._files()
            if state != self._state and perf_counter() >= self._next_at:
                started_at = perf_counter()
                self._page, self._state = self._render(), state
                self._next_at = perf_counter() + _PAUSE * (perf_counter() - started_at)
            return self._page

    def _files(self) -> list[tuple[int, int]]:
        """Return what changes if the run logs or ends."""
        found = [path.stat() for path in (self._folder.metrics, self._folder.summary) if path.is_file()]
        return [(status.st_mtime_ns, status.st_size) for status in found]

    def _render(self) -> str:
        try:
            run = read_run(self._folder.path)
            written_at = self._folder.metrics.stat().st_mtime
        except (UserError, OSError):
            return _WAITING
        has_stopped = any(event["step"] >= run.last["step"] for event in run.events("stopped"))
        has_ended = bool(run.summary) or has_stopped
        return render_page([run], rewrite_seconds=None if has_ended else _REWRITES_EVERY, written_at=written_at)


class _Handler(BaseHTTPRequestHandler):
    run: ClassVar[WatchedRun]

    def do_GET(self) -> None:
        # Another name for this machine would let a foreign page read the report by rebinding its own name to it.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost") or self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = self.run.page().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent: the terminal may show the run."""


def build_server(path: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the run's report on the loopback address; serve_forever() starts it.

    port: 0 for any free one. Raises UserError if there is no such folder, or if the port is taken.
    """
    handler = type("Handler", (_Handler,), {"run": WatchedRun(path)})
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise UserError(f"--port: cannot listen on {port} ({error.strerror}); choose another.") from None


def address(server: ThreadingHTTPServer) -> str:
    """Return the page's address."""
    return f"http://{HOST}:{server.server_address[1]}/"
