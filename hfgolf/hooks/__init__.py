"""What takes part in a run beside the loop: this package has its hooks, and golf/hooks.py those of golf."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfgolf.config.sections import RunConfig
    from hfgolf.train.hooks import Hook


def model_hooks(config: RunConfig) -> list[Hook]:
    """Return the hooks that change what a step computes."""
    from hfgolf.train.recurrence import Recurrence

    hooks: list[Hook] = [] if config.model.overrides.get("loop") is None else [Recurrence()]
    if config.golf.qat_fraction:
        from hfgolf.golf.hooks import QuantizationAwareTraining

        hooks.append(QuantizationAwareTraining())
    if config.train.distill_from:
        from hfgolf.hooks.distillation import Distillation

        hooks.append(Distillation(config.train.distill_from))
    return hooks


def standard_hooks(config: RunConfig) -> list[Hook]:
    """Return the hooks of a run with this config. Raises UserError for a tracker that does not exist."""
    from hfgolf.hooks.doctor import Diagnosis
    from hfgolf.hooks.report import Report

    hooks = model_hooks(config)
    if config.golf.forecast_every_steps:
        from hfgolf.golf.hooks import SizeForecast

        hooks.append(SizeForecast())
    pusher = None
    if config.hub.push and config.hub.repo_id:  # which HubSection asks for
        from hfgolf.hooks.push import Push
        from hfgolf.publish.hub import HubPusher

        pusher = HubPusher(config.hub.repo_id, config.hub.private, config.hub.format)
        hooks.append(Push(config.hub.every_steps, pusher))
    if config.train.milestones:
        from hfgolf.hooks.milestones import Milestones

        hooks.append(Milestones(config.train.milestones, pusher))
    hooks += [Diagnosis(), Report()]  # the report before the trackers, which upload it
    if config.track.trackers:
        from hfgolf.hooks.trackers import Trackers

        hooks.append(Trackers(config.track.trackers))
    return hooks
