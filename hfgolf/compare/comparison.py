"""A comparison of runs, as JSON, Markdown and text: their statistics, and the caveats that a reader must know.

Most important: a difference that may be due to the seeds alone is called "within noise".
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.compare.experiment import Experiment
from hfgolf.compare.outcome import Outcome
from hfgolf.compare.statistics import NOISE_P_VALUE, ArmResult, GridBest, arm_results, best_of_grid
from hfgolf.config.parse import AUTOPILOT
from hfgolf.run.record import validates_on_other_text
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact, redact_values
from hfgolf.system.wording import aligned, count_of, join_words

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

    def figures(self) -> dict[str, Any]:
        """Return the comparison as JSON has it, with secrets redacted."""
        return {"written_by": "hfgolf"} | redact_values(dataclasses.asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.figures(), indent=1) + "\n"


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
    """Compare the runs of an experiment. outcomes must have every arm; margin: see `arm_results`."""
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
                " data and tokenizer, and train.final_eval_tokens null."
            )
        if validates_on_other_text(run.metadata, runs[0].metadata):
            raise UserError(
                f"{runs[0].path} and {run.path} were evaluated on different texts of the same size; compare runs with"
                " the same validation text."
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
        whole = [arm for arm in experiment.arms_of(grid) if not failures.get(arm)]
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
        failures={arm: dict(by_seed) for arm, by_seed in failures.items()},
        margin=margin,
        seconds_caveats=[caveat for caveat, holds in seconds_caveats.items() if holds],
        caveats=_caveats(runs) + _choices(outcomes) + _unpaired(outcomes, baseline),
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
            caveats.append(f"{run.name} exported step {step:,}, not the last; its summary has that step's loss")
        skipped, rollbacks = run.summary.get("skipped_steps"), run.summary.get("rollbacks")
        if skipped or rollbacks:
            caveats.append(f"{run.name} was unstable: {skipped or 0} skipped steps and {rollbacks or 0} rollbacks")
    return caveats


def _choices(outcomes: Outcomes) -> list[str]:
    """Say in what the runs of one arm differ that their starts chose (see `group_by_arm`) and that changes results."""
    caveats = []
    for arm, by_seed in outcomes.items():
        configs = [run.config for run in by_seed.values()]
        chosen = (*AUTOPILOT, "train.mixed_precision")
        differing = [key for key in chosen if any(config.get(key) != configs[0].get(key) for config in configs)]
        if differing:
            caveats.append(f"the runs of {arm} differ in {join_words(differing, maximum=3)}, which each start chose")
    return caveats


def _unpaired(outcomes: Outcomes, baseline: str) -> list[str]:
    """Say which arms have other seeds than the baseline: differences are of shared seeds, means of all."""
    caveats, of_baseline = [], outcomes.get(baseline, {}).keys()
    for arm, by_seed in outcomes.items():
        if not of_baseline or not by_seed or by_seed.keys() == of_baseline:
            continue
        if shared := sorted(by_seed.keys() & of_baseline):
            seeds = f"{'seed' if len(shared) == 1 else 'seeds'} {join_words(shared)}"
            caveats.append(f"{arm} and {baseline} share {seeds} only: their difference is of these, their means of all")
        else:
            caveats.append(f"{arm} and {baseline} share no seed, so there is no difference between them")
    return caveats


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates, in order; they may be unhashable."""
    distinct: list[Any] = []
    for value in values:
        distinct += [] if value in distinct else [value]
    return distinct


def to_markdown(comparison: Comparison) -> str:
    """Return the comparison as a Markdown page, secrets redacted. It shows the plot NAME.png in the same folder."""
    what, *others = _paragraphs(comparison)
    picture = f"![Validation loss over steps and over seconds]({comparison.name}.png)"
    header, *rows = _rows(comparison)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *([f"`{name}`", *cells] for name, *cells in rows))]
    lines.insert(1, f"|{'---|' * len(header)}")
    return redact("\n\n".join([f"# {comparison.name}", what, picture, "\n".join(lines), *others]) + "\n")


def to_terminal(comparison: Comparison, width: int) -> str:
    """Return the comparison for eyes: paragraphs of so many characters and columns without marks, secrets redacted.

    The table has no range of losses, and short titles, so that it is about 110 characters wide.
    """
    what, *others = (re.sub(r"`([^`\n]*)`|\*\*", r"\1", text) for text in _paragraphs(comparison))
    header, *rows = _rows(comparison)
    titles = [re.sub(" to the baseline's loss| within .*", "", title) for title in header]
    columns = aligned([[*line[:3], *line[4:]] for line in (titles, *rows)], "lrrrllll" + "l" * (len(header) - 9))

    def wrapped(text: str) -> str:
        is_command = text.startswith("Repeat it: ")  # to copy
        return text if is_command else "\n".join(textwrap.fill(line, width) for line in text.splitlines())

    return redact("\n\n".join([comparison.name, wrapped(what), columns, *map(wrapped, others)]))


def _paragraphs(comparison: Comparison) -> list[str]:
    machines = [f"{machine.get('device')}, {machine.get('cores')} cores" for machine in comparison.hardware]
    versions = [f"torch {packages.get('torch')}, hfgolf {packages.get('hfgolf')}" for packages in comparison.packages]
    commits = [str(commit) for commit in comparison.commits]
    return [
        _what_is_compared(comparison),
        *_remarks(comparison),
        f"Repeat it: `{comparison.command}`",
        f"Measured on {join_words(machines, last=' and ')}; {join_words(versions)}; commit {join_words(commits)}.",
    ]


def _what_is_compared(comparison: Comparison) -> str:
    whole = "the whole validation set" if comparison.is_whole else "the beginning of the validation set"
    seeds = sorted({seed for arm in comparison.arms.values() for seed in arm.final_losses})
    text = (
        f"Validation loss at the last step, in nats per token, on {comparison.val_tokens:,} tokens ({whole});"
        f" {count_of(len(seeds), 'seed')} ({join_words(seeds)})."
    )
    if not comparison.is_whole:
        text += " A run's summary and report have the figure of the exported step."
    if comparison.baseline is None:
        return f"{text} No run of the baseline finished, so there is no comparison with it."
    if len(comparison.arms) == 1:
        return text
    return f"{text} Differences are from `{comparison.baseline}`, paired by seed; below 0 is better."


def _rows(comparison: Comparison) -> list[list[str]]:
    """Return the titles of the columns, and the cells of each arm: the best first, those that failed last."""
    header = ["arm", "mean", "sd", "lowest to highest", "difference", "p", "verdict"]
    header += ["steps to the baseline's loss", "seconds"]
    header += [f"equivalent within {comparison.margin:g} nats"] if comparison.margin else []
    finished = {name: arm for name, arm in comparison.arms.items() if arm.mean is not None}
    rows = []
    for name in sorted(finished, key=lambda name: finished[name].mean or 0):
        cells = [name, *_cells(comparison, name, finished[name])]
        if comparison.margin:
            found = finished[name].equivalence
            verdict = "" if found is None else "yes" if found.is_shown else "no" if found.is_refuted else "not shown"
            cells.append("" if found is None else f"{verdict} ({_stated(found.p_value)})")
        rows.append(cells)
    failed = [name for name in comparison.arms if name not in finished]
    return [header, *rows, *([name, "failed", *[""] * (len(header) - 2)] for name in failed)]


def _cells(comparison: Comparison, name: str, arm: ArmResult) -> list[str]:
    losses = arm.final_losses.values()
    sd = "" if arm.sd is None else f"{arm.sd:.4f}"
    cells = [f"{arm.mean:.4f}", sd, f"{min(losses):.4f} to {max(losses):.4f}"]
    failed = comparison.failures.get(name)
    if failed:
        cells[0] += f" ({len(failed)} of {len(failed) + len(losses)} failed)"
    if name == comparison.baseline:
        return [*cells, "", "", "baseline", f"{arm.steps:,.0f}", f"{arm.seconds:,.1f}"]
    difference = arm.difference
    if difference is None or arm.reach is None:
        return [*cells, "", "", "", "", ""]
    if difference.p_value is None:
        p_value, verdict = "", "one seed: cannot tell"
    else:
        p_value = "< 0.001" if difference.p_value < 0.001 else f"{difference.p_value:.3f}"
        verdict = "within noise" if difference.is_noise else "better" if difference.mean < 0 else "worse"
    return [
        *cells,
        f"{difference.mean:+.4f}" + ("" if difference.sd is None else f" ± {difference.sd:.4f}"),
        p_value,
        verdict,
        _reached(arm.reach.steps, arm.reach.share_of_steps, ",.0f"),
        _reached(arm.reach.seconds, arm.reach.share_of_seconds, ",.1f"),
    ]


def _reached(by_seed: Mapping[int, float | None], share: float | None, form: str) -> str:
    reached = [value for value in by_seed.values() if value is not None]
    if share is None:
        return "never"
    text = f"{statistics.mean(reached):{form}} ({share:.2f}x)"
    return text if len(reached) == len(by_seed) else f"{text}, {len(reached)} of {len(by_seed)} seeds"


def _remarks(comparison: Comparison) -> list[str]:
    differences = [arm.difference for arm in comparison.arms.values() if arm.difference is not None]
    tested = [difference for difference in differences if difference.p_value is not None]
    remarks = []
    if tested:
        remarks.append(
            "± is the standard deviation of the differences over seeds. p is the p-value of a two-sided paired t-test,"
            f" which assumes that they are normally distributed. A difference with p of {NOISE_P_VALUE} or more is"
            " within noise: it may be due to the seeds alone."
        )
    if len(tested) > 1:
        remarks.append(
            f"This page makes {len(tested)} comparisons. If no arm really differed, 1 in {1 / NOISE_P_VALUE:.0f}"
            f" comparisons would still have p below {NOISE_P_VALUE}: here, about {len(tested) * NOISE_P_VALUE:.1f}."
        )
    if comparison.margin:
        remarks.append(_equivalence_remark(comparison))
    if differences:
        remarks.append(
            "Steps and seconds to the baseline's loss: when a run first reaches the mean final loss of"
            f" `{comparison.baseline}`, interpolated linearly between evaluations; in parentheses, as a fraction of the"
            " baseline's total. A run reaches a loss later if its learning rate has not decayed yet; a shorter run that"
            " ends there would be faster. Seconds count compilation and the median step time, without evaluations and"
            " saves."
        )
    if comparison.seconds_caveats:
        remarks.append(f"**The seconds are not comparable**: {join_words(comparison.seconds_caveats)}.")
    if comparison.grids:
        remarks.append("\n".join(_grid_remark(grid, best) for grid, best in comparison.grids.items()))
        remarks.append(
            "The best arm of a grid looks better than it is, because it was selected: confirm it with other seeds."
        )
    for arm, by_seed in comparison.failures.items():
        remarks.append("\n".join(f"- `{arm}` failed with seed {seed}: {reason}" for seed, reason in by_seed.items()))
    return remarks + [f"Note: {caveat}." for caveat in comparison.caveats]


def _equivalence_remark(comparison: Comparison) -> str:
    margin = f"{comparison.margin:g} nats"
    lines = [
        "Equivalence is tested by two one-sided paired t-tests, each at 5 %: a p below 0.05 shows that the true"
        f" difference is less than {margin}, in either direction. That a difference is within noise does not show it."
    ]
    for name, arm in comparison.arms.items():
        found = arm.equivalence
        if found is None:
            if arm.difference is not None:
                lines.append(f"- `{name}`: one seed; it takes two or more.")
            continue
        low, high = found.interval
        interval = f"90 % confidence interval of the difference: {low:+.4f} to {high:+.4f}"
        verdict = f"not shown to be equivalent ({_stated(found.p_value)})"
        if found.is_shown:
            verdict = f"equivalent within {margin} ({_stated(found.p_value)})"
        elif found.is_refuted:
            verdict = f"not equivalent; it differs by more than {margin}"
        lines.append(f"- `{name}`: {verdict}. {interval}.")
    return "\n".join(lines)


def _grid_remark(grid: str, best: GridBest | None) -> str:
    if best is None:
        return f"- Grid of `{grid}`: no arm finished with every seed."
    axes = join_words(f"{key}: {'yes' if inside else 'no'}" for key, inside in best.is_bracketed.items())
    text = f"- Grid of `{grid}`: best is `{best.arm}`; bracketed: {axes or 'no numeric axis'}."
    if not all(best.is_bracketed.values()):
        text += " If it is not bracketed, a value beyond the edge may be even better."
    return text


def _stated(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
