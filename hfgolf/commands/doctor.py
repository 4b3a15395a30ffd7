"""Diagnose a run: what is wrong, why, and what to change: hfgolf doctor runs/small

Reads metrics.jsonl and config.yaml of runs that are running, complete or failed. Exit status 0: no findings; 1: there
are findings; 2: there is no such run.
"""

import dataclasses
from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser
from hfgolf.doctor.doctor import advice, examine
from hfgolf.doctor.finding import Finding
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics
from hfgolf.system.wording import count_of

_HARDLY = 0.9  # of the first loss; a model that only knows how frequent each token is gets below


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/small")
    arguments = parser.parse_args()
    seen = {run: examine(run) for run in arguments.runs}
    findings = {str(run): list(map(dataclasses.asdict, found)) for run, (found, _) in seen.items()}
    text = "\n\n".join(_describe(run, *found) for run, found in seen.items())
    return Answer(findings, text, status=int(any(findings.values())))


def _describe(run: Path, findings: list[Finding], metrics: Metrics) -> str:
    steps = metrics.rows[-1]["step"] if metrics.rows else metrics.events[-1]["step"]
    sample = ", a sample of the rows" if metrics.is_sampled else ""
    if not findings:
        epochs = metrics.rows[-1].get("epoch") if metrics.rows else None
        better = advice(run, epochs)
        said = f"{run}: {_well(metrics)} ({count_of(steps, 'step')}{sample})"
        return f"{said}\n  better {better}" if better else said
    lines = [f"{run}: {count_of(len(findings), 'finding')} ({count_of(steps, 'step')}{sample})"]
    for finding in sorted(findings, key=lambda finding: finding.step):
        lines += [f"\nstep {finding.step}: {finding.symptom}", f"  saw    {finding.saw}"]
        lines += [f"  {'causes' if i == 1 else '      '} {i}. {cause}" for i, cause in enumerate(finding.causes, 1)]
        lines += [f"  try    {finding.options}"] if finding.fix else []
        find_lr = finding.find_lr(RunFolder(run).config)
        lines += [f"  find   {find_lr}"] if find_lr else []
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
