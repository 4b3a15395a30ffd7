"""hfgolf watch: the report over HTTP, on this machine only, and nothing else of the folder."""

from __future__ import annotations

import http.client
import json
import threading

import pytest

from hfgolf.commands import watch
from hfgolf.system.errors import UserError


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Return (run folder, function that requests a path and returns status and text)."""
    monkeypatch.setattr(watch, "_PAUSE", 0)
    server = watch.build_server(tmp_path)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def get(path="/", **headers):
        connection = http.client.HTTPConnection(watch.HOST, server.server_address[1], timeout=30)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()

    yield tmp_path, get
    server.shutdown()
    server.server_close()


def log(folder, **row):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_page_follows_the_run_to_its_end(served):
    folder, get = served
    assert "logged nothing yet" in get()[1]
    log(folder, step=1, train_losses=[3.0])
    assert "Running: step 1." in get()[1]
    log(folder, step=2, train_losses=[2.5])
    assert "Running: step 2." in get()[1]
    (folder / "summary.json").write_text(json.dumps({"steps": 2, "val_loss": 2.0}))
    page = get()[1]
    assert "Complete: 2 steps." in page and '"live":null' in page


def test_page_of_a_stopped_run_does_not_reload(served):
    folder, get = served
    log(folder, step=1, train_losses=[3.0])
    log(folder, step=1, event="stopped", elapsed_seconds=1.0, signal="SIGINT")
    page = get()[1]
    assert "Stopped by SIGINT at step 1" in page and '"live":null' in page


def test_nothing_else_is_served(served):
    folder, get = served
    log(folder, step=1, train_losses=[3.0])
    for path in ("/metrics.jsonl", "/../metrics.jsonl", "/report.html"):
        assert get(path)[0] == 404
    assert get(Host="example.com")[0] == 404 and get(Host="localhost:80")[0] == 200


def test_bad_folder_and_taken_port_are_one_line(served, tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        watch.build_server(tmp_path / "none")
    taken = watch.build_server(tmp_path)
    with taken, pytest.raises(UserError, match="--port: cannot listen"):
        watch.build_server(tmp_path, taken.server_address[1])
