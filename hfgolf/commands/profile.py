"""Profile the training step of a config: hfgolf profile --config configs/small.yaml

Runs real steps on the real data under torch.profiler. Prints where the time goes by phase and by kind of work, the
slowest operations, and what bounds a step. Writes profile.json, which the run's report shows, and
trace.json.gz, for chrome://tracing or Perfetto, to the run's folder. Saves no weights.
"""

import json
import os
from pathlib import Path
from typing import Any

from hfgolf.commands.options import Answer, ScriptParser, bounded, check_output
from hfgolf.config.parse import load_config
from hfgolf.system.durable import write_text


def main() -> Answer | None:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE --section.key value. track.* and hub.* have no effect.",
    )
    parser.add_argument("--steps", **bounded(1, 10**4, "steps to profile, after three warm-up steps", 5))
    parser.add_argument(
        "--output", type=Path, help="folder to write to (default: the run's folder, such as runs/small)"
    )
    arguments, run_options = parser.parse_known_args()
    resolved = load_config(run_options, may_choose=False)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch says that its profiler starts

    from hfgolf.commands.profile_step import profile_run
    from hfgolf.commands.scratch import scratch_run
    from hfgolf.run.folder import run_folder
    from hfgolf.train.console import show_log

    is_main_process = os.environ.get("RANK", "0") == "0"
    show_log(is_main_process)
    folder = arguments.output or run_folder(resolved.config).path
    check_output("--output", folder, besides=[folder / "profile.json"])
    with scratch_run(resolved, "profile") as run:
        trace = (folder if is_main_process else run.folder.path) / "trace.json.gz"
        record, slowest = profile_run(run, arguments.steps, trace)
    if not is_main_process:
        return None
    write_text(folder / "profile.json", json.dumps(record, indent=1))
    return Answer(record, f"\n{_describe(record, slowest)}\nwrote {folder / 'profile.json'} and {trace}")


def _describe(record: dict[str, Any], slowest: str) -> str:
    """Format profile.json for a person. slowest: the table of the slowest operations."""
    tokens, seconds = record["tokens_per_step"], record["step_seconds"]
    uncompiled = ", from as many steps of the uncompiled model" if record["is_compiled"] else ""
    return "\n".join(
        [
            f"a step of {tokens:,} tokens: {1e3 * seconds:,.1f} ms ({tokens / seconds:,.0f} tokens/s),"
            f" {1e3 * record['profiled_step_seconds']:,.1f} ms under the profiler, MFU {record['mfu']:.0%};"
            f" {record['machine']['device']}, {record['precision']},"
            f" {'compiled' if record['is_compiled'] else 'not compiled'}",
            "\nphases, as shares of a step's time (the forward pass also computes the gradients of head and loss)",
            *_bars(record["shares"]),
            f"\nkinds of work, as shares of forward, backward and optimizer{uncompiled}",
            *_bars(record["kinds"]),
            f"\n{slowest}",
            record["sentence"],
        ]
    )


def _bars(shares: dict[str, float]) -> list[str]:
    rows = [f"{name:<14}{share:>7.1%} {'#' * round(40 * share)}" for name, share in shares.items()]
    return [*rows, f"{'total':<14}{sum(shares.values()):>7.1%}"]
