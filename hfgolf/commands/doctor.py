"""Diagnose a run: what is wrong, why, and what to change: hfgolf doctor runs/small

Reads metrics.jsonl and config.yaml of runs that are running, complete or failed. Exit status 0: no findings; 1: there
are findings; 2: there is no such run.
"""

import dataclasses
import json
from pathlib import Path

from hfgolf.commands.options import ScriptParser
from hfgolf.doctor.doctor import examine
from hfgolf.doctor.finding import Finding
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics


def main() -> int:
    parser = ScriptParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/small")
    parser.add_argument("--json", action="store_true", help="print {run: [finding, ...]} instead")
    arguments = parser.parse_args()
    seen = {run: examine(run) for run in arguments.runs}
    if arguments.json:
        print(
            json.dumps({str(run): list(map(dataclasses.asdict, found)) for run, (found, _) in seen.items()}, indent=1)
        )
    else:
        print("\n\n".join(_describe(run, *findings) for run, findings in seen.items()))
    return 1 if any(findings for findings, _ in seen.values()) else 0


def _describe(run: Path, findings: list[Finding], metrics: Metrics) -> str:
    steps = metrics.rows[-1]["step"] if metrics.rows else metrics.events[-1]["step"]
    sample = ", a sample of the rows" if metrics.is_sampled else ""
    if not findings:
        return f"{run}: all is well ({steps} steps{sample})"
    lines = [f"{run}: {len(findings)} finding{'s' if len(findings) > 1 else ''} ({steps} steps{sample})"]
    for finding in sorted(findings, key=lambda finding: finding.step):
        lines += [f"\nstep {finding.step}: {finding.symptom}", f"  saw    {finding.saw}"]
        lines += [f"  {'causes' if i == 1 else '      '} {i}. {cause}" for i, cause in enumerate(finding.causes, 1)]
        lines += [f"  try    {finding.options}"] if finding.fix else []
        find_lr = finding.find_lr(RunFolder(run).config)
        lines += [f"  find   {find_lr}"] if find_lr else []
    return "\n".join(lines)
