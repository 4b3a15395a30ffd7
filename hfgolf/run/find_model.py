"""The folder that a person means by the name of a model: a run, a checkpoint, an exported model; or a name on the Hub.

Imports nothing heavy, so that scripts reject a wrong path at once. Does not know how a model is loaded
(publish/load.py), or which checkpoint a run resumes from (checkpoint/store.py).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from hfgolf.run.folder import RunFolder
from hfgolf.system.durable import find_damage
from hfgolf.system.errors import UserError
from hfgolf.system.wording import close_match, join_words

_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_STEP_FOLDER = re.compile(r"step-\d{6,}")
_OF_A_MODEL = (".json", ".jinja", ".safetensors")


def find_model(name: str, key: str = "--model", *, is_final: bool = False) -> str:
    """Return the folder of the model that a name means, or the name if only the Hub can have it. Asks no network.

    A run means its model if it is complete, and its newest undamaged checkpoint before that. is_final: a run means its
    exported model, because a checkpoint of a run that goes on is another one tomorrow. key: what named it, for error
    messages. Raises UserError if the name is a path without a model.
    """
    folder = Path(os.path.expanduser(name))  # not Path's own, which raises for an unknown user
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.is_dir():
        return str(_model_of_run(RunFolder(folder), key, is_final))
    is_path = "/" in name and (folder.parent.is_dir() or name.startswith("runs/"))  # the default run.output_dir
    if _HUB_NAME.fullmatch(name) and not is_path:
        return name
    raise UserError(f"{key}: there is no model {name}; {models_here(name)}")


def models_here(name: str) -> str:
    """Return the end of a message on a name without a model: what it may mean, else the runs that are here."""
    folder = Path(os.path.expanduser(name))
    runs = {path.name: str(path) for path in sorted(Path("runs").glob("*")) if is_run(path)}
    beside = {
        path.name: str(path)
        for path in sorted(folder.parent.glob("*"))
        if path != folder and (is_run(path) or (path / "config.json").is_file())
    }
    near = runs | beside
    meant = near.get(close_match(folder.name, near) or "") or close_match(str(folder), near.values())
    return f"did you mean {meant}?" if meant else f"runs here: {join_words(runs.values(), maximum=9) or 'none'}."


def is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.config.is_file() or run.checkpoints.is_dir() or (run.model / "config.json").is_file()


def _model_of_run(run: RunFolder, key: str, is_final: bool) -> Path:
    has_model = (run.model / "config.json").is_file()
    if has_model and (is_final or run.summary.is_file()):
        return run.model
    checkpoint = _newest_checkpoint(run)
    if checkpoint and not is_final:
        return checkpoint
    if has_model:  # of a run that was copied without its summary
        return run.model
    if checkpoint:
        raise UserError(f"{key}: there is no exported model in {run.path}; name its checkpoint {checkpoint}.")
    if run.config.is_file():
        raise UserError(
            f"{key}: {run.path} has no model and no checkpoint yet; a run saves one every train.save_every_minutes, or"
            " after a SIGUSR1."
        )
    raise UserError(f"{key}: there is no model in {run.path}; {models_here(str(run.path))}")


def _newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the newest checkpoint that loads as a model; None if there is none."""
    rejected: set[Path] = set()
    while True:  # looks again each time: a run that trains saves new checkpoints meanwhile, and deletes old ones
        found = {path for path in run.checkpoints.glob("*") if _STEP_FOLDER.fullmatch(path.name)} - rejected
        if not found:
            return None
        newest = max(found, key=lambda path: int(path.name.removeprefix("step-")))
        if _is_undamaged(newest):
            return newest
        rejected.add(newest)


def _is_undamaged(checkpoint: Path) -> bool:
    """Return whether the files of the model in a checkpoint are those of its manifest. Optimizers are not read."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        of_model = {name: listed for name, listed in files.items() if name.endswith(_OF_A_MODEL)}
        return "config.json" in files and find_damage(checkpoint, of_model) is None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False
