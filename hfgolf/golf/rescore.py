"""Run score.py on the bytes on disk, in a process that sees nothing of hfgolf, and compare with what a ledger says.

Owns the names of an export's files. Does not know how they were made.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hfgolf.errors import UserError
from hfgolf.golf.budget import SCRIPT, Entry, read_ledger
from hfgolf.run.record import read_json

ARTIFACT, TOKENS, TOKEN_BYTES, LEDGER = "artifact.bin", "tokens.bin", "bytes.bin", "ledger.json"
_RELATIVE_TOLERANCE = 1e-6  # of nats: another machine, or another number of threads, adds in another order


def rescore(folder: Path, mode: str = "flat", stride: int | None = None) -> dict[str, Any]:
    """Return what score.py prints: nats, tokens, bytes, bpb, the sha256 of the weights, and the coverage.

    The process is isolated (python -I): no PYTHONPATH, no user site, not the current folder. Raises UserError with the
    program's own words if it refuses the files.
    """
    files = [str((folder / name).resolve()) for name in (SCRIPT, ARTIFACT, TOKENS, TOKEN_BYTES)]
    options = ["--mode", mode, *(["--stride", str(stride)] if stride else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", *files, *options], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[-1].removeprefix("error: ") if said else f"it ended with status {done.returncode}"
        raise UserError(f"{SCRIPT} gave no score: {reason}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def rescore_folder(
    folder: Path, mode: str | None = None, stride: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Score an exported folder again; return the figures, and how it differs from its ledger.

    mode, stride: of the evaluation; None: those of the ledger, whose score must then come out again. If a file is not
    the one of the ledger, nothing is scored, and the figures are empty. Raises UserError if there is no ledger.
    """
    told = read_json(folder / LEDGER)
    try:
        entries = [Entry(e["name"], e["bytes"], e["sha256"], tuple(e["counted_by"])) for e in told["files"]]
        count, budget_bytes, settings = told["count"], told["budget_bytes"], told["settings"]
        nats, sha256 = told["after"]["nats"], told["weights_sha256"]
    except (KeyError, TypeError):
        raise UserError(f"{folder / LEDGER} is missing or broken; name a folder that golf_export.py wrote.") from None
    try:
        ledger = read_ledger({folder / entry.name: entry.counted_by for entry in entries}, count, budget_bytes)
    except OSError as error:
        return {}, [f"{error.filename} cannot be read ({error.strerror})."]
    problems = [
        f"{folder / new.name} is not the file of the ledger: its sha256 differs."
        for old, new in zip(entries, ledger.entries, strict=True)
        if old != new
    ]
    if problems or ledger.problem:
        return {}, [*problems, *([ledger.problem] if ledger.problem else [])]
    is_another = (mode or settings["mode"], stride or settings["stride"]) != (settings["mode"], settings["stride"])
    figures = rescore(folder, mode or settings["mode"], stride or (None if mode else settings["stride"]))
    if figures["sha256"] != sha256:
        problems.append(f"{folder / ARTIFACT} decodes to other weights than the ledger states.")
    if not is_another and not math.isclose(figures["nats"], nats, rel_tol=_RELATIVE_TOLERANCE):
        problems.append(f"The score is {figures['nats']} nats, but the ledger states {nats}.")
    return figures | {"counted_bytes": ledger.total(), "budget_bytes": budget_bytes}, problems
