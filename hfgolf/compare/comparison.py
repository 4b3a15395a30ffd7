"""A comparison of runs: their statistics, and the caveats that a reader must know.

Owns the content of the JSON; markdown.py owns the wording.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.compare.experiment import Experiment
from hfgolf.compare.outcome import Outcome
from hfgolf.compare.statistics import ArmResult, GridBest, arm_results, best_of_grid
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact_values

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""{arm: {seed: finished run}}"""
Failures = Mapping[str, Mapping[int, str]]
"""{arm: {seed: why the run did not finish, in one line}}"""


@dataclass(frozen=True)
class Comparison:
    """The result of an experiment; its fields are those of the JSON."""

    name: str
    command: str
    """The command that repeats it."""
    baseline: str | None
    """The arm that the others are compared with; None if none of its runs finished."""
    val_tokens: int
    """Validation tokens behind every final loss."""
    is_whole: bool
    """Whether these are the whole validation set."""
    arms: dict[str, ArmResult]
    settings: dict[str, dict[str, Any]]
    """{arm: {key: value}}, the values that each arm sets."""
    grids: dict[str, GridBest | None]
    failures: dict[str, dict[int, str]]
    margin: float | None
    """Of the test for equivalence, in nats per token; None if it was not asked for."""
    seconds_caveats: list[str]
    """Why the seconds are not comparable; empty if they are."""
    caveats: list[str]
    """Other caveats."""
    hardware: list[dict[str, Any]]
    packages: list[dict[str, str]]
    commits: list[str | None]

    def to_json(self) -> str:
        """Return the comparison as JSON, with secrets redacted."""
        return json.dumps({"written_by": "hfgolf"} | redact_values(dataclasses.asdict(self)), indent=1) + "\n"


def compare_outcomes(name: str, command: str, outcomes: Outcomes, margin: float | None = None) -> Comparison:
    """Compare finished runs; the first arm is the baseline. margin: see `arm_results`."""
    configs = {arm: next(iter(runs.values())).config for arm, runs in outcomes.items()}
    keys = {key for config in configs.values() for key in config if not key.startswith("run.")}
    differing = sorted(key for key in keys if len({json.dumps(config.get(key)) for config in configs.values()}) > 1)
    settings = {arm: {key: config.get(key) for key in differing} for arm, config in configs.items()}
    experiment = Experiment(Path(f"{name}.yaml"), None, [], settings, {}, next(iter(outcomes)))
    return compare_experiment(experiment, command, outcomes, {}, margin)


def compare_experiment(
    experiment: Experiment, command: str, outcomes: Outcomes, failures: Failures, margin: float | None = None
) -> Comparison:
    """Compare the runs of an experiment. outcomes and failures must have every arm; margin: see `arm_results`."""
    runs = [run for by_seed in outcomes.values() for run in by_seed.values()]
    if not runs:
        reasons = [reason for by_seed in failures.values() for reason in by_seed.values()]
        raise UserError(f"no run finished; the first failure: {reasons[0]}")
    for run in runs:
        if run.evaluated_on != runs[0].evaluated_on:
            pairs = (runs[0].evaluated_on, run.evaluated_on)
            extents = [f"{tokens:,} tokens of {num_bytes:,} bytes" for tokens, num_bytes in pairs]
            raise UserError(
                f"{runs[0].path} was evaluated on {extents[0]}, {run.path} on {extents[1]}; compare runs with the same"
                " data, tokenizer and batch.sequence_length."
            )
    hardware = _distinct(run.metadata["hardware"] for run in runs)
    seconds_caveats = {
        "runs shared the machine with other runs (`--jobs`)": any(run.shared_the_machine for run in runs),
        "runs used different machines": len(hardware) > 1,
        "runs used different numbers of threads": len({run.config.get("train.cpu_threads") for run in runs}) > 1,
    }
    grids = {}
    for grid, axes in experiment.grids.items():
        # an arm that failed with any seed is not a candidate, however good its other runs are
        whole = [arm for arm in experiment.arms_of(grid) if not failures[arm]]
        means = {arm: statistics.mean(run.curve[-1].final_loss for run in outcomes[arm].values()) for arm in whole}
        grids[grid] = best_of_grid(means, experiment.arms, axes)
    best = grids.get(experiment.baseline)
    baseline = best.arm if best else experiment.baseline
    curves = {arm: {seed: run.curve for seed, run in by_seed.items()} for arm, by_seed in outcomes.items()}
    return Comparison(
        name=experiment.path.stem,
        command=command,
        baseline=baseline if outcomes.get(baseline) else None,
        val_tokens=runs[0].evaluated_on[0],
        is_whole=all(run.is_whole for run in runs),
        arms=arm_results(curves, baseline, margin),
        settings=experiment.arms,
        grids=grids,
        failures={arm: dict(by_seed) for arm, by_seed in failures.items() if by_seed},
        margin=margin,
        seconds_caveats=[caveat for caveat, holds in seconds_caveats.items() if holds],
        caveats=_caveats(runs),
        hardware=hardware,
        packages=_distinct(run.metadata["packages"] for run in runs),
        commits=_distinct(run.metadata["commit"] for run in runs),
    )


def _caveats(runs: list[Outcome]) -> list[str]:
    caveats = []
    if len({run.curve_tokens for run in runs}) > 1:
        caveats.append(
            "runs were evaluated on different numbers of tokens before the last step, so their curves and steps to the"
            " baseline's loss do not compare; give them the same `train.eval_tokens`"
        )
    for run in runs:
        step = run.summary.get("step")
        if isinstance(step, int) and step != run.curve[-1].step:
            caveats.append(f"{run.path.name} exported step {step:,}, not the last; its summary has that step's loss")
        skipped, rollbacks = run.summary.get("skipped_steps"), run.summary.get("rollbacks")
        if skipped or rollbacks:
            caveats.append(f"{run.path.name} was unstable: {skipped or 0} skipped steps and {rollbacks or 0} rollbacks")
    return caveats


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates, in order; they may be unhashable."""
    distinct: list[Any] = []
    for value in values:
        distinct += [] if value in distinct else [value]
    return distinct
