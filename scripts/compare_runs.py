"""Compare configs over seeds: python scripts/compare_runs.py benchmarks/experiments/muon_vs_adamw.yaml

Makes the runs of a definition that are not there yet, or reads runs that are (--runs), and writes what they say: means,
paired differences with p-values, steps and seconds to the baseline's loss, as JSON, Markdown and PNG.
"""

import argparse
import logging
import shlex
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, check_output, within
from hfgolf.tools.compare.experiment import load_experiment, plan_runs


def main() -> None:
    parser = ScriptParser(
        description=__doc__,
        epilog="All else is for every run, as train.py takes it: --section.key value.\n"
        "benchmarks/experiments/README.md says how a definition is written.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="+", type=Path, help="a definition, or with --runs the folders of runs")
    parser.add_argument("--runs", action="store_true", help="only read these runs; the first one's arm is the baseline")
    parser.add_argument("--output_dir", type=Path, help="folder for runs and results (runs/experiments/NAME)")
    parser.add_argument(
        "--jobs", type=within(1, 1024), default=1, help="runs at once; their seconds are then not comparable (1)"
    )
    arguments, of_runs = parser.parse_known_args()
    if arguments.runs and of_runs:
        raise UserError(f"--runs: only reads, and takes no {of_runs[0]}; leave it out.")
    if not arguments.runs and len(arguments.paths) > 1:
        raise UserError(f"{arguments.paths[1]}: one definition at a time; --runs compares the folders of runs.")
    experiment = None if arguments.runs else load_experiment(arguments.paths[0])
    output_dir = arguments.output_dir or Path(
        "runs/experiments", "runs" if experiment is None else experiment.path.stem
    )
    planned = [] if experiment is None else plan_runs(experiment, output_dir, of_runs)

    from hfgolf.durable import write_text
    from hfgolf.run.folder import RunFolder
    from hfgolf.tools.compare.comparison import compare_experiment, compare_outcomes
    from hfgolf.tools.compare.launch import run_missing
    from hfgolf.tools.compare.markdown import to_markdown
    from hfgolf.tools.compare.outcome import group_by_arm, read_outcome, read_outcomes
    from hfgolf.tools.compare.plot import draw
    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    check_output("--output_dir", output_dir)
    command = shlex.join(["python", "scripts/compare_runs.py", *map(str, arguments.paths), *of_runs])
    if experiment is None:
        outcomes = group_by_arm([read_outcome(RunFolder(path)) for path in arguments.paths])
        comparison = compare_outcomes(output_dir.name, f"{command} --runs", outcomes)
    else:
        failed = run_missing(planned, Path(__file__).with_name("train.py"), arguments.jobs)
        outcomes, failures = read_outcomes(planned, failed)
        comparison = compare_experiment(experiment, command, outcomes, failures)
    results, page = output_dir / comparison.name, to_markdown(comparison)
    write_text(Path(f"{results}.json"), comparison.to_json())
    write_text(Path(f"{results}.md"), page)
    draw(comparison, outcomes, Path(f"{results}.png"), experiment)
    logging.getLogger("hfgolf").info("\n%s\nwrote %s.json, .md and .png", page, results)


if __name__ == "__main__":
    run_command(main)
