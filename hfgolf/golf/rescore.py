"""Run score.py on the bytes on disk, in a process that sees nothing of hfgolf.

Owns that process. Does not know how the files were made, or what score they should have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfgolf.errors import UserError


def rescore(
    script: Path, artifact: Path, tokens: Path, token_bytes: Path, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what score.py prints: nats, tokens, bytes, bpb, the sha256 of the weights, and the coverage.

    The process is isolated (python -I): no PYTHONPATH, no user site, not the current folder. Raises UserError with the
    program's own words if it refuses the files.
    """
    files = [str(path.resolve()) for path in (script, artifact, tokens, token_bytes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", *files, *options],
        cwd=script.resolve().parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[-1].removeprefix("error: ") if said else f"it ended with status {done.returncode}"
        raise UserError(f"score.py did not score {artifact.name}: {reason}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
