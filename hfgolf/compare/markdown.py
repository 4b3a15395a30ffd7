"""Write a comparison as a Markdown page: a table and its interpretation.

Owns the wording. Most important: a difference that may be due to the seeds alone is called "within noise".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hfgolf.compare.comparison import Comparison
from hfgolf.compare.statistics import NOISE_P_VALUE, ArmResult, GridBest
from hfgolf.system.redact import redact
from hfgolf.system.wording import count_of, join_words


def to_markdown(comparison: Comparison) -> str:
    """Return the comparison as a Markdown page, secrets redacted. It shows the plot NAME.png in the same folder."""
    machines = [f"{machine.get('device')}, {machine.get('cores')} cores" for machine in comparison.hardware]
    versions = [f"torch {packages.get('torch')}, hfgolf {packages.get('hfgolf')}" for packages in comparison.packages]
    commits = [str(commit) for commit in comparison.commits]
    parts = [
        f"# {comparison.name}",
        _what_is_compared(comparison),
        f"![Validation loss over steps and over seconds]({comparison.name}.png)",
        _table(comparison),
        *_remarks(comparison),
        f"Repeat it: `{comparison.command}`",
        f"Measured on {join_words(machines, last=' and ')}; {join_words(versions)}; commit {join_words(commits)}.",
    ]
    return redact("\n\n".join(parts) + "\n")


def _what_is_compared(comparison: Comparison) -> str:
    whole = "the whole validation set" if comparison.is_whole else "the beginning of the validation set"
    seeds = sorted({seed for arm in comparison.arms.values() for seed in arm.final_losses})
    text = (
        f"Validation loss at the last step, in nats per token, on {comparison.val_tokens:,} tokens ({whole});"
        f" {count_of(len(seeds), 'seed')} ({join_words(seeds)})."
    )
    if not comparison.is_whole:
        text += " A run's summary and report have another figure: the exported step, on the whole validation set."
    if comparison.baseline is None:
        return f"{text} No run of the baseline finished, so there is no comparison with it."
    if len(comparison.arms) == 1:
        return text
    return f"{text} Differences are from `{comparison.baseline}`, paired by seed; below 0 is better."


def _table(comparison: Comparison) -> str:
    lines = [
        "| arm | mean | sd | lowest to highest | difference | p | verdict | steps to the baseline's loss | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if comparison.margin:
        lines = [f"{lines[0]} equivalent within {comparison.margin:g} nats |", f"{lines[1]}---|"]
    finished = {name: arm for name, arm in comparison.arms.items() if arm.mean is not None}
    for name in sorted(finished, key=lambda name: finished[name].mean or 0):
        cells = [f"`{name}`", *_cells(comparison, name, finished[name])]
        if comparison.margin:
            found = finished[name].equivalence
            verdict = "" if found is None else "yes" if found.is_shown else "no" if found.is_refuted else "not shown"
            cells.append("" if found is None else f"{verdict} ({_stated(found.p_value)})")
        lines.append(f"| {' | '.join(cells)} |")
    columns = lines[1].count("---")
    lines += [
        f"| `{name}` | failed |" + " |" * (columns - 2) for name, arm in comparison.arms.items() if arm.mean is None
    ]
    return "\n".join(lines)


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
