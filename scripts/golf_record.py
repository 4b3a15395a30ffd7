"""Is a record real? python scripts/golf_record.py --runs runs/a runs/b runs/c --reference 1.0611

Prints each seed, their mean and deviation, and a one-sided test that the mean beats the reference by the margin
(Welch's if the reference has seeds of its own). Exit status 0: it does. 1: it does not, or not yet; then the seeds that
it would take.
"""

import argparse
import json
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, within


def main() -> int:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = parser.add_mutually_exclusive_group(required=True)
    own.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        help="folders of runs, or JSON files that score.py or evaluate.py --json printed",
    )
    own.add_argument("--scores", nargs="+", type=within(0.0, 100.0), help="bits per byte of each seed")
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--reference", type=within(0.0, 100.0), help="bits per byte to beat, one number")
    known.add_argument("--reference_runs", nargs="+", type=Path, help="the runs to beat")
    known.add_argument("--reference_scores", nargs="+", type=within(0.0, 100.0), help="bits per byte of their seeds")
    parser.add_argument(
        "--margin_nats", type=within(0.0, 10.0), default=0.005, help="nats per token to beat the reference by (0.005)"
    )
    parser.add_argument("--tokens", type=within(1, 10**15), help="scored tokens, for --scores")
    parser.add_argument("--bytes", type=within(1, 10**15), help="bytes of the scored text, for --scores")
    parser.add_argument("--significance", type=within(1e-9, 0.5), default=0.01, help="the p-value to be below (0.01)")
    parser.add_argument(
        "--leave_out",
        action="append",
        default=[],
        metavar="RUN=REASON",
        help="a run that does not count, and why; both are printed. All other runs count",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    if (arguments.tokens is None) != (arguments.bytes is None):
        parser.error("--tokens and --bytes go together")
    if arguments.runs and arguments.tokens:
        parser.error("--tokens and --bytes are for --scores; runs say how much text was scored")

    from hfgolf.tools.golf_record import Score, judge, read_scores

    def scores(paths: list[Path] | None, numbers: list[float] | None) -> list[Score]:
        if paths:
            return read_scores(paths)
        return [Score(f"seed {number}", bits) for number, bits in enumerate(numbers or [], start=1)]

    left_out = {}
    for text in arguments.leave_out:
        name, separator, reason = text.partition("=")
        if not separator:
            raise UserError(f"--leave_out: {text!r} has no reason; write it as RUN=REASON.")
        left_out[name] = reason
    reference = arguments.reference_scores if arguments.reference is None else [arguments.reference]
    claim = judge(
        scores(arguments.runs, arguments.scores),
        scores(arguments.reference_runs, reference),
        margin_nats=arguments.margin_nats,
        significance=arguments.significance,
        tokens_per_byte=arguments.tokens / arguments.bytes if arguments.tokens else None,
        left_out=left_out,
    )
    print(json.dumps(claim.figures()) if arguments.json else claim.table())
    return 0 if claim.holds else 1


if __name__ == "__main__":
    run_command(main)
