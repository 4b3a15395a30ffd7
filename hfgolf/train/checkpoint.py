"""Checkpoints: accelerate's save_state and load_state behind folders that are whole or not there.

Owns the layout `checkpoints/step-000300`, the links `latest` and `best`, the manifest and the retention. A checkpoint
is written to a hidden folder, synced, and renamed, so that a reader never sees half of one. Does not know when to save.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import load

from hfgolf.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, model_config: PreTrainedConfig) -> Path:
    """Write `folder/step-NNNNNN` and point `latest` at it; returns its path. All ranks call it together.

    model_config: of the weights; a resume into another model is refused by it.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".partial-{final.name}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()  # save_state has no barrier of its own at the end
    if accelerator.is_main_process:
        _write_manifest(partial, step, model_config)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(folder)
        point(folder / "latest", final)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, model_config: PreTrainedConfig) -> None:
    """Load weights, optimizer, scaler, registered state and every random generator, exactly as saved.

    Raises UserError where the checkpoint is damaged or of another model, or lacks this rank's random state.
    """
    manifest = verify(checkpoint)
    saved, model = manifest["model"], _description(model_config)
    if saved != model:
        changed = [key for key in saved | model if saved.get(key) != model.get(key)]
        changes = ", ".join(f"{key} {saved.get(key)} -> {model.get(key)}" for key in changed)
        raise UserError(
            f"train.resume: {checkpoint} holds another model ({changes}); restore these keys or start a new run.name."
        )
    accelerator.load_state(str(checkpoint))
    random_states = checkpoint / f"random_states_{accelerator.process_index}.pkl"
    if random_states.exists():  # accelerate passes over an error here in silence, so it is checked
        if not torch.equal(load(random_states)["torch_manual_seed"], torch.get_rng_state()):
            raise UserError(f"train.resume: the random state in {random_states} could not be restored.")
    elif accelerator.num_processes == manifest["processes"]:
        raise UserError(f"train.resume: {random_states} is missing; choose an earlier checkpoint.")


def find_checkpoint(folder: Path, which: str) -> Path:
    """Return the checkpoint that train.resume names: latest, best, or a path. Raises UserError where there is none."""
    path = folder / which if which in ("latest", "best") else Path(which)
    if not path.is_dir():
        there = ", ".join(sorted(p.name for p in folder.glob("step-*"))) or "none"
        raise UserError(f"train.resume: there is no checkpoint {path} (checkpoints in {folder}: {there}).")
    return path.resolve()


def verify(checkpoint: Path) -> dict[str, Any]:
    """Check sizes and hashes of a checkpoint's files against its manifest and return the manifest."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError):
        raise UserError(f"train.resume: {checkpoint} has no readable {_MANIFEST}; choose another checkpoint.") from None
    if manifest["format"] != FORMAT_VERSION:
        raise UserError(
            f"train.resume: {checkpoint} has format {manifest['format']}, this hfgolf reads {FORMAT_VERSION}."
        )
    for name, expected in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise UserError(f"train.resume: {checkpoint} lacks {name}; choose another checkpoint.")
        if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
            raise UserError(
                f"train.resume: {file} is damaged (its manifest says otherwise); choose another checkpoint."
            )
    return manifest


def retain(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints; what `latest` or `best` points at stays."""
    steps = sorted((p for p in folder.iterdir() if _STEP_FOLDER.fullmatch(p.name)), key=lambda p: int(p.name[5:]))
    pinned = {(folder / link).resolve() for link in ("latest", "best")}
    for checkpoint in steps[:-keep_last]:
        if checkpoint.resolve() not in pinned:
            shutil.rmtree(checkpoint)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to its sibling `target`, in one atomic step."""
    temporary = link.with_name(f".{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(link)


def _description(model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return what makes the model this model, and not the versions it was saved with."""
    return {key: value for key, value in model_config.to_diff_dict().items() if key != "transformers_version"}


def _write_manifest(folder: Path, step: int, model_config: PreTrainedConfig) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {
        "format": FORMAT_VERSION,
        "step": step,
        "processes": len(list(folder.glob("random_states_*.pkl"))),
        "model": _description(model_config),
        "files": {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*files, folder / _MANIFEST, folder):
        _sync(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the file or folder on the disk before what follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
