"""The power fails at any moment of a run: nothing finished is lost, and nothing incomplete is ever read."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from accelerate.state import AcceleratorState, GradientState
from faults import FORKING, before_step, differences, rows
from power import FOLDER, Disk, Moment, Tree, below, write_tree

import hfgolf
from hfgolf.checkpoint import contents
from hfgolf.checkpoint.store import is_whole, step_of
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.hooks.report import Report
from hfgolf.run.metrics import read_metrics
from hfgolf.train import loop

pytestmark = pytest.mark.slow

RUN = "runs/cut"  # below the disk
OPTIONS = {
    "run__name": "cut",
    "tokenizer__kind": "char",  # trained, and kept in the cache
    "model__hidden_size": 16,
    "batch__tokens_per_step": 128,
    "batch__micro_batch_size": 4,
    "train__eval_tokens": 512,
    "train__save_every_steps": 2,
    "train__resume": "auto",
}


class Life(NamedTuple):
    """The state of the disk at each moment of a run."""

    states: dict[Tree, Moment]
    contents: dict[str, bytes]
    now: Tree
    """The final state, with nothing lost."""


def _live(resolved: ResolvedConfig, disk: Path, answer: Path) -> None:
    """Train, with a SIGTERM after three steps, then again to the end; record the disk."""
    recorder = Disk(disk)
    commit = contents.commit_checkpoint

    def commit_and_note(partial: Path, step: int, *arguments: Any) -> Path:
        path = commit(partial, step, *arguments)
        recorder.saved_step = step
        return path

    contents.commit_checkpoint = commit_and_note
    recorder.watch()
    step = loop.train_step
    loop.train_step = before_step({4: lambda run: os.kill(os.getpid(), signal.SIGTERM)})
    try:
        hfgolf.train(resolved)
    except SystemExit as stop:
        assert stop.code == 128 + signal.SIGTERM
    loop.train_step = step
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hfgolf.train(resolved)
    answer.write_bytes(pickle.dumps((recorder.states, recorder.contents, recorder.now())))


@pytest.fixture
def life(tiny_run: Callable[..., list[str]], tmp_path: Path) -> Life:
    """The states of the disk during one run, recorded once for all tests."""
    if not _RECORDED:
        disk, answer = tmp_path / "disk", tmp_path / "answer"
        disk.mkdir()
        resolved = load_config(tiny_run(**OPTIONS, run__output_dir=disk / "runs", data__cache_dir=disk / "cache"))
        process = FORKING.Process(target=_live, args=(resolved, disk, answer))
        process.start()
        process.join()
        assert process.exitcode == 0
        _RECORDED.append(Life(*pickle.loads(answer.read_bytes())))
    return _RECORDED[0]


_RECORDED: list[Life] = []


class Reader:
    """Finds incomplete or lost files in the states of a run's folder; checks equal content only once."""

    def __init__(self, life: Life, scratch: Path) -> None:
        self._contents, self._scratch = life.contents, scratch
        self._model = below(life.now, f"{RUN}/model")
        self._seen: dict[Any, Any] = {}

    def complaints(self, tree: Tree, saved_step: int) -> list[str]:
        run = dict(below(tree, RUN))
        files = {path: what for path, what in run.items() if not re.search(r"(^|/)\.|^checkpoints", path)}
        found = [f"{path} is half" for path, what in files.items() if not self._once(self._is_whole, path, what)]
        steps = {path: step_of(Path(path)) for path in run if re.fullmatch(r"checkpoints/step-\d+", path)}
        for path in steps:
            if not self._once(self._is_valid, path, below(tree, f"{RUN}/{path}")):
                found.append(f"{path} is half")
        links = {path: f"checkpoints/{what[3:]}" for path, what in run.items() if what.startswith("-> ")}
        found += [f"{path} leads to {to}, which is not there" for path, to in links.items() if to not in steps]
        newest = max(steps.values(), default=0)
        if newest < saved_step:
            found.append(f"step {saved_step} was saved, step {newest} is there")
        logged = self._once(self._logged_steps, run.get("metrics.jsonl"))
        if [step for step in logged if step <= newest] != list(range(1, newest + 1)):
            found.append(f"step {newest} was saved, the steps logged are {logged}")
        if "model" in run and below(tree, f"{RUN}/model") != self._model:
            found.append("model is half")
        if "summary.json" in run and "model" not in run:
            found.append("complete without a model")
        return found

    def _once(self, look: Callable[..., Any], *at: Any) -> Any:
        key = (look.__name__, *at)
        if key not in self._seen:
            self._seen[key] = look(*at)
        return self._seen[key]

    def _is_whole(self, path: str, what: str) -> bool:
        if what == FOLDER or path.startswith("model/") or path == "metrics.jsonl":
            return True
        content = self._contents[what]
        if path.endswith(".json"):
            return is_json(content)
        if path.endswith(".yaml"):
            return isinstance(yaml.safe_load(content), dict) and content.endswith(b"\n")
        return content.endswith(b"IEND\xaeB`\x82" if path.endswith(".png") else b"\n")

    def _is_valid(self, path: str, tree: Tree) -> bool:
        return is_whole(write_tree(tree, self._scratch / str(len(self._seen)) / Path(path).name, self._contents))

    def _logged_steps(self, what: str | None) -> list[int]:
        if what is None:
            return []
        path = self._scratch / "metrics.jsonl"
        path.write_bytes(self._contents[what])
        return [row["step"] for row in read_metrics(path).rows]


def is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def test_power_cut_leaves_no_partial_files_and_loses_no_finished_ones(life, tmp_path):
    reader, found = Reader(life, tmp_path), {}
    for tree, moment in life.states.items():
        for complaint in reader.complaints(tree, moment.saved_step):
            found.setdefault(complaint, moment)
    assert not found


def kinds(life: Life) -> list[Tree]:
    """Return one state of each kind, by the run's files with final names, or before it has any by those of the cache.

    In turns the first one and the last one, so that the cache of some runs is lost.
    """
    of_kind: dict[tuple[str, ...], list[Tree]] = {}
    for tree in life.states:
        names = tuple(path for path, _ in tree if not _UNFINISHED.search(path))
        of_kind.setdefault(tuple(name for name in names if name.startswith(f"{RUN}/")) or names, []).append(tree)
    return [trees[-(number % 2)] for number, trees in enumerate(of_kind.values())]


# these, and what no resume reads
_UNFINISHED = re.compile(r"(^|/)[.]|[.]lock$|^runs/cut/(report|starts|metadata|uncommitted)")


def figures(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "train_losses", "grad_norms", "sample_hashes", "val_loss")
    return [tuple(row[key] for key in keys) for row in rows(folder)]


def test_same_command_resumes_after_a_power_cut(life, run, tiny_run, tmp_path, monkeypatch):
    """Bitwise equal to an undisturbed run."""
    monkeypatch.setattr(Report, "_write", lambda *arguments: None)  # drawing takes longer than everything else
    straight = run(tiny_run(**OPTIONS))
    for number, tree in enumerate(kinds(life)):
        disk = write_tree(tree, tmp_path / str(number), life.contents)
        folder = run(tiny_run(**OPTIONS, run__output_dir=disk / "runs", data__cache_dir=disk / "cache"))
        when = life.states[tree]
        assert figures(folder) == figures(straight), when
        one, other = (path / "checkpoints" / "step-000006" for path in (folder, straight))
        assert differences(one, other) == [], when
        assert exported(folder) == exported(straight), when
        assert not list(folder.rglob(".partial-*")), when


def exported(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model/*") if path.suffix in (".json", ".safetensors")}
