"""No token reaches a file, a tracker or the terminal: a whole run with secrets in every place a user puts them."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from hfgolf.train import validation

pytestmark = pytest.mark.slow

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx123456",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_DATABASE_PASSWORD": "correct horse battery",
}
IN_URL = "supersecretvalue99"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_no_secret_is_written_by_a_run(tiny_run, run_script, corpus_file, tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=corpus_file.parent))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/{corpus_file.name}?token={IN_URL}"
    arguments = tiny_run(
        data__files=url,
        track__trackers="[wandb,tensorboard]",
        run__output_dir=tmp_path / "output",
        track__project=SECRETS["HF_TOKEN"],
    )
    for name, value in (SECRETS | {"WANDB_MODE": "offline"}).items():
        monkeypatch.setenv(name, value)
    said = run_script("train.py", *arguments)
    server.shutdown()
    assert said.status == 0, said.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metadata.json", "metrics.jsonl", "README.md", "manifest.json"} <= names
    assert any(name.endswith(".wandb") for name in names) and any("tfevents" in name for name in names)
    written = {str(path): path.read_bytes() for path in files} | {"terminal": (said.out + said.err).encode()}
    for secret in (*SECRETS.values(), IN_URL):
        assert [path for path, content in written.items() if secret.encode() in content] == []
    folder = tmp_path / "output" / "tiny"
    assert (
        "[redacted]" in (folder / "config.yaml").read_text() and "[redacted]" in (folder / "metadata.json").read_text()
    )


def test_memorized_secret_is_in_no_file(run, tiny_run, monkeypatch, caplog, tmp_path):
    token = "ghp_" + "x7" * 18
    monkeypatch.setattr(validation, "generate_text", lambda *arguments, **options: f"password = '{token}'")
    options = {"track__trackers": "[tensorboard]", "hub__push": "false"}
    folder = run(tiny_run(train__sample_tokens=4, **options))
    assert "password = '[redacted]'" in (folder / "metrics.jsonl").read_text()
    assert "password = '[redacted]'" in (folder / "summary.json").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if token.encode() in path.read_bytes()] == []
    assert token not in caplog.text


def test_errors_contain_no_secret(tiny_run, run_script):
    said = run_script("train.py", *tiny_run(data__files=f"http://127.0.0.1:9/a.txt?token={IN_URL}"))
    assert said.status == 2
    assert said.err.startswith("error: data.files: ") and "token=[redacted]" in said.err
    assert IN_URL not in said.out + said.err
