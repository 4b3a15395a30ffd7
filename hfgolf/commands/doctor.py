"""Diagnose a run: what is wrong, why, and what to change: hfgolf doctor runs/small

Reads metrics.jsonl and config.yaml of runs that are running, complete or failed. Exit status 0: no findings; 1: there
are findings; 2: there is no such run.
"""

import dataclasses
from pathlib import Path
from typing import Any

from hfgolf.commands.options import Answer, ScriptParser
from hfgolf.doctor.doctor import advice, examine
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics
from hfgolf.system.wording import count_of

_HARDLY = 0.9  # of the first loss; a model that only knows how frequent each token is gets below


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/small")
    arguments = parser.parse_args()
    figures = {str(run): _figures(run) for run in arguments.runs}
    text = "\n\n".join(_describe(run, **found) for run, found in figures.items())
    return Answer(figures, text, status=int(any(found["findings"] for found in figures.values())))


def _figures(run: Path) -> dict[str, Any]:
    findings, metrics = examine(run)
    last = (metrics.rows or metrics.events)[-1]
    return {
        "steps": last["step"],
        "is_sampled": metrics.is_sampled,
        "verdict": count_of(len(findings), "finding") if findings else _well(metrics),
        "better": None if findings else advice(run, last.get("epoch")),
        "findings": [
            dataclasses.asdict(finding)
            | {"options": finding.options, "find_lr": finding.find_lr(RunFolder(run).config)}
            for finding in sorted(findings, key=lambda finding: finding.step)
        ],
    }


def _describe(
    run: str, steps: int, is_sampled: bool, verdict: str, better: str | None, findings: list[dict[str, Any]]
) -> str:
    sample = ", a sample of the rows" if is_sampled else ""
    lines = [f"{run}: {verdict} ({count_of(steps, 'step')}{sample})"]
    lines += [f"  better {better}"] if better else []
    for finding in findings:
        lines += [f"\nstep {finding['step']}: {finding['symptom']}", f"  saw    {finding['saw']}"]
        causes = enumerate(finding["causes"], 1)
        lines += [f"  {'causes' if number == 1 else '      '} {number}. {cause}" for number, cause in causes]
        lines += [f"  try    {finding['options']}"] if finding["options"] else []
        lines += [f"  find   {finding['find_lr']}"] if finding["find_lr"] else []
    return "\n".join(lines)


def _well(metrics: Metrics) -> str:
    """Say that nothing is wrong; and whether random weights are still near ln(vocabulary), the loss of guessing."""
    losses = [loss for row in metrics.rows for loss in row.get("train_losses") or () if loss is not None]
    starts_elsewhere = any(event["event"] == "init_from" for event in metrics.events)
    if not losses or starts_elsewhere or losses[-1] < _HARDLY * losses[0]:
        return "all is well"
    return (
        f"nothing is wrong, but the training loss, {losses[-1]:.2f}, is still near that of the first step,"
        f" {losses[0]:.2f}: the model has learned next to nothing so far"
    )
