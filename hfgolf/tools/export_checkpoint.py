"""Export a model with its card from any checkpoint of a run, even if the run was killed.

Owns which weights are exported and what the card says about them. Does not know what is in an exported folder
(publish/export.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hfgolf.checkpoint.contents import EMA_NAME
from hfgolf.checkpoint.identity import read_identity, saved_config
from hfgolf.checkpoint.store import STATE_NAME, Rejected, find_checkpoint, newest_first, verify
from hfgolf.config import RunConfig
from hfgolf.errors import UserError, writing
from hfgolf.evaluate.sample import generate_text
from hfgolf.publish.export import export_model
from hfgolf.publish.load import load_exported
from hfgolf.publish.model_card import model_card
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import read_metrics
from hfgolf.wording import join_words, one_line


def export_checkpoint(run: RunFolder, which: str | None, output: Path) -> int:
    """Export a checkpoint's weights to `output` and return its step. Under optim.ema_export, exports the averaged ones.

    which: latest, best or a path; None: best, or latest if nothing was evaluated. Raises UserError if there is no such
    checkpoint, it is damaged, or `output` can't be written.
    """
    checkpoint = _find(run, which)
    try:
        step = verify(checkpoint)["step"]
        state = json.loads((checkpoint / STATE_NAME).read_text())
    except (Rejected, OSError, ValueError) as error:
        raise UserError(f"--checkpoint: {checkpoint} rejected: {one_line(error)}; {_others(run)}.") from None
    identity = read_identity(checkpoint)
    config = saved_config(identity)  # not config.yaml, which may be from a later start, or missing
    if not (checkpoint / "config.json").is_file():
        raise UserError(
            f"--checkpoint: {checkpoint} has no config.json: an older version saved it, or its weights are sharded;"
            f" continue the run with --train.resume {checkpoint}, and it exports its model at the end."
        )
    model, tokenizer = load_exported(str(checkpoint))
    model = model.cpu()
    if config.optim.ema_export:
        if not (checkpoint / EMA_NAME).is_file():
            raise UserError(f"--checkpoint: {checkpoint} has no averaged weights (optim.ema_export); {_others(run)}.")
        model.load_state_dict(load_file(checkpoint / EMA_NAME), strict=False)  # the file holds tied weights only once
    summary = {
        "step": step,
        "steps": state["step"],
        "tokens": state["tokens"],
        "weights": "ema" if config.optim.ema_export else "raw",
        "is_best": step == state["best_step"],
        "parameters": model.num_parameters(),
        "model": str(output),
        "sample": generate_text(model, tokenizer, seed=config.run.seed),
        "init_from": identity.get("init_from"),
        **_figures(run, config, step),
    }
    with writing("--output", output):
        export_model(model, tokenizer, output, model_card(config, summary, model=model))
    return step


def _find(run: RunFolder, which: str | None) -> Path:
    best_or_latest = ("best", "latest") if which is None else (which,)
    found = (find_checkpoint(run.checkpoints, name) for name in best_or_latest)
    checkpoint = next((path for path in found if path is not None and path.is_dir()), None)
    if checkpoint is None:
        raise UserError(f"--checkpoint: there is no {which or 'checkpoint'} in {run.checkpoints}; {_others(run)}.")
    return checkpoint.resolve()


def _others(run: RunFolder) -> str:
    names = join_words(sorted(path.name for path in newest_first(run.checkpoints)))
    return f"available checkpoints: {names}" if names else "the run has no checkpoints"


def _figures(run: RunFolder, config: RunConfig, step: int) -> dict[str, Any]:
    """Return the figures of the evaluation at a step, with a summary's keys; {} if that step was not evaluated."""
    rows = read_metrics(run.metrics).rows if run.metrics.is_file() else []
    row: dict[str, Any] = next((row for row in reversed(rows) if row["step"] == step), {})
    averaged = "_ema" if config.optim.ema_export else ""
    loss = row.get(f"val_loss{averaged}")
    if loss is None or "val_tokens" not in row:
        return {}
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)),
        "val_bits_per_byte": row[f"val_bits_per_byte{averaged}"],
        "val_tokens": row["val_tokens"],
        "val_bytes": row["val_bytes"],
    }
