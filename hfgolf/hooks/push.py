"""Push the model to the Hub: every hub.every_steps while the run continues, and at its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.hub import HubPusher
from hfgolf.publish.model_card import model_card
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line
from hfgolf.train.hooks import Hook
from hfgolf.train.validation import exported_weights

if TYPE_CHECKING:
    from hfgolf.config.sections import HubSection
    from hfgolf.train.meter import StepResult
    from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


class Push(Hook):
    """Pushes in a process of its own, which never delays or stops the run."""

    def __init__(self, hub: HubSection) -> None:
        assert hub.repo_id is not None  # HubSection asks for it
        self._every_steps = hub.every_steps
        self._hub = HubPusher(hub.repo_id, hub.private, hub.format)

    def start(self, run: Run) -> None:
        """Refuse, before any training, to push a native form that does not exist."""
        if run.config.hub.format != "native" or not isinstance(run.raw_model, GolfForCausalLM):
            return
        from hfgolf.publish.native import find_architecture  # late: it imports six architectures

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
        run.tokens.check()  # a model of damaged tokens must not leave the machine
        folder = run.folder.path / "model-in-training"
        try:
            with exported_weights(run):
                model = run.whole_model()
                if model is None or not is_main:
                    return
                figures = {"step": run.state.step, "init_from": run.init_from}
                card = model_card(run.resolved.config, figures, model)
                export_model(model, run.tokens.tokenizer, folder, card)
        except (OSError, SafetensorError) as error:
            logger.warning("push at step %d failed: %s", run.state.step, one_line(error))
            return
        self._hub.push_later(folder, f"step {run.state.step}")

    def end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if summary is not None and run.accelerator.is_main_process:
            self._hub.push_now(run.folder.model, f"step {summary['step']}: validation loss {summary['val_loss']:.4f}")
