"""Push the model to the Hub: every hub.every_steps while the run continues, and at its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.hub import HubPusher
from hfgolf.publish.model_card import model_card
from hfgolf.system.durable import make_folder
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line
from hfgolf.train.finish import exported_form
from hfgolf.train.hooks import Hook
from hfgolf.train.meter import StepResult
from hfgolf.train.run import Run
from hfgolf.train.validation import exported_weights

logger = logging.getLogger(__name__)


class Push(Hook):
    """Pushes in a process of its own, which never delays or stops the run."""

    def __init__(self, every_steps: int | None, pusher: HubPusher) -> None:
        self._every_steps, self._hub = every_steps, pusher

    def start(self, run: Run) -> None:
        """Refuse, before any training, to push a native form that does not exist."""
        if run.config.hub.format != "native" or not isinstance(run.raw_model, GolfForCausalLM):
            return
        from hfgolf.publish.native import find_architecture  # late: it imports the architectures

        try:
            find_architecture(run.raw_model.config)
        except UserError as error:
            raise UserError(f"hub.format: {error}") from None

    def after_step(self, run: Run, result: StepResult) -> None:
        """Export the current weights, or their averages under ema_export, and push them in the background."""
        is_due = self._every_steps is not None and run.state.step % self._every_steps == 0
        is_main = run.accelerator.is_main_process
        if not is_due or run.clock.stop_signal or not (is_main or run.is_sharded):
            return
        folder = run.folder.path / "model-in-training"
        problem = export_now(run, [folder])
        if problem:
            logger.warning("push at step %d failed: %s", run.state.step, problem)
        elif is_main:
            self._hub.push_later(folder, f"step {run.state.step}")

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if summary is not None and run.accelerator.is_main_process:
            self._hub.push_now(run.folder.model, f"step {summary['step']}: validation loss {summary['val_loss']:.4f}")


def export_now(run: Run, folders: Sequence[Path], **figures: Any) -> str | None:
    """Export the weights of this step, or their averages under ema_export; return why that failed, None if it did not.

    If the model is sharded, all processes call it. figures: for the card.
    """
    run.tokens.check()  # a model of damaged tokens must not leave the machine
    of_all = {"step": run.state.step, "init_from": run.init_from, "parameters": run.raw_model.num_parameters()}
    try:
        with exported_weights(run):
            model = run.whole_model()
            if model is None or not run.accelerator.is_main_process:
                return None
            form, _ = exported_form(run, model)
            for folder in folders:
                make_folder(folder.parent)
                card = model_card(run.resolved.config, of_all | {"model": str(folder)} | figures, form)
                export_model(form, run.tokens.tokenizer, folder, card)
    except (OSError, SafetensorError) as error:
        return one_line(error)
    return None
