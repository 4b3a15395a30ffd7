"""The example notebook runs from its first cell to its last, and its kernel survives what people do to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

SMALLER = """
import functools, hfgolf
small = {"model": {"hidden_size": 64, "num_hidden_layers": 1}, "max_steps": 20, "train": {"cpu_threads": 1}}
hfgolf.fit = functools.partial(hfgolf.fit, **small)"""
BAD_KEY = 'hfgolf.fit("my.txt", model={"depth": 3})'
STOPPED = """
import os, signal

class StopButton(hfgolf.Hook):
    def after_step(self, run, result):
        if run.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # what the button sends

options = {"model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "max_steps": 4,
           "batch": {"sequence_length": 32, "tokens_per_step": 128},
           "train": {"compile": False, "log_every_steps": 1, "cpu_threads": 1}}
hfgolf.fit("my.txt", hooks=[StopButton()], **options)"""
LAUNCHED = """
import socket
import accelerate, hfgolf

options = {"model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "max_steps": 2,
           "batch": {"sequence_length": 32, "tokens_per_step": 128}, "tokenizer": {"kind": "byte"},
           "train": {"compile": False, "log_every_steps": 1, "cpu_threads": 1}}
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
accelerate.notebook_launcher(lambda: hfgolf.fit("my.txt", **options), num_processes=2, use_port=port)
print(hfgolf.open_run("runs/my").metrics.train_loss.count())"""
CONTINUED = 'hfgolf.fit("my.txt", **options)'


def execute(notebook: Any, folder: Path, cell_seconds: float = 250) -> list[Any]:
    """Run a notebook in a folder, and return its cells with code. An error in a cell is one of its outputs."""
    import nbclient

    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=cell_seconds, resources=resources, coalesce_streams=True, allow_errors=True
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


def printed(cell: Any) -> str:
    """Return what a cell printed on stdout; on stderr, which notebooks show on red, it must print nothing."""
    streams = {output.name: output.text for output in outputs(cell, "stream")}
    assert "stderr" not in streams, streams["stderr"]
    return streams.get("stdout", "")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


@pytest.mark.slow
def test_example_goes_from_text_to_a_report_and_survives_a_mistake_and_the_stop_button(folder):
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "train_on_your_text.ipynb", as_version=4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source += SMALLER
    (folder / "my.txt").write_text("To be, or not to be, that is the question. " * 200)
    notebook.cells += map(nbformat.v4.new_code_cell, [BAD_KEY, STOPPED, CONTINUED])
    *cells, mistake, stopped, continued = execute(notebook, folder)
    assert [outputs(cell, "error") for cell in cells] == [[]] * len(cells)
    log = "".join(printed(cell) for cell in cells)
    labels = [line.split("  ")[0] for line in log.splitlines()]
    assert [labels.count(label) for label in ("device", "model", "plan", "validation loss", "bits per byte")] == [1] * 5
    assert "Return the number of" in log
    images = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) == 1
    assert cells[-1].outputs[0].data["text/html"].startswith("<iframe srcdoc=")

    (error,) = outputs(mistake, "error")
    assert printed(mistake) == "" and len(error.traceback) == 1
    assert error.traceback[0].startswith("error: hfgolf.fit: unknown key model.depth")
    assert outputs(stopped, "error") == [] and "stopped by SIGINT at step 2; saved" in printed(stopped)
    assert outputs(continued, "error") == [] and "resum" in printed(continued)
    assert "after 4 steps" in outputs(continued, "execute_result")[0].data["text/plain"]


@pytest.mark.slow
@pytest.mark.distributed
def test_notebook_launcher_trains_on_two_processes_of_which_one_speaks(folder):
    import nbformat

    (folder / "my.txt").write_text("To be, or not to be, that is the question. " * 200)
    (cell,) = execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LAUNCHED)]), folder)
    said = "".join(output.text for output in outputs(cell, "stream") if output.name == "stdout")
    assert outputs(cell, "error") == [] and said.endswith("\n2\n"), said
    assert "x 2 processes" in said and said.count("\nrun folder") == 1, said
