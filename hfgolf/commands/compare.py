"""Compare configs over seeds: hfgolf compare benchmarks/experiments/muon_vs_adamw.yaml

Runs the missing runs of a definition, or reads the run folders that are given (hfgolf compare runs/a runs/b; the first
one's arm is the baseline), and writes their comparison as JSON, Markdown and PNG: means, paired differences with
p-values, and the steps and seconds to reach the baseline's loss.
"""

import logging
import shlex
import shutil
import sys
from pathlib import Path

from hfgolf.commands.options import MARK, Answer, ScriptParser, bounded, check_output
from hfgolf.compare.experiment import load_experiment, plan_runs
from hfgolf.config.parse import is_option, one_token_per_option
from hfgolf.system.errors import UserError


def main() -> Answer:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train, for every run: --section.key value.\n"
        "benchmarks/experiments/README.md explains the format of a definition.",
    )
    parser.add_argument("paths", nargs="+", type=Path, help="a definition (a .yaml file), or the folders of runs")
    text = "also test whether the arms are equivalent to the baseline within so many nats, such as 0.005"
    parser.add_argument("--equivalent", **bounded(1e-6, 10.0, text))
    parser.add_argument("--output_dir", type=Path, help="folder for runs and results (runs/experiments/NAME)")
    text = "runs to run at once; with more than one, their seconds are not comparable"
    parser.add_argument("--jobs", **bounded(1, 1024, text, 1))
    # one token each: argparse would take the value of an option that it does not know for a path
    tokens = one_token_per_option(sys.argv[1:])
    run_options = [token for token in tokens if is_option(token)]
    arguments, unknown = parser.parse_known_args([token for token in tokens if not is_option(token)])
    run_options += unknown
    reads = arguments.paths[0].suffix not in (".yaml", ".yml")
    if reads and (for_runs := [*run_options, *(["--jobs"] if arguments.jobs > 1 else [])]):
        raise UserError(f"{for_runs[0].partition('=')[0]}: only for a definition; run folders are only read.")
    if not reads and len(arguments.paths) > 1:
        raise UserError(f"{arguments.paths[1]}: only one definition is allowed, or the folders of runs.")
    experiment = None if reads else load_experiment(arguments.paths[0])
    output_dir = arguments.output_dir or Path("runs/experiments", "runs" if reads else arguments.paths[0].stem)
    planned = [] if experiment is None else plan_runs(experiment, output_dir, run_options)

    from hfgolf.compare.comparison import compare_experiment, compare_outcomes, to_markdown, to_terminal
    from hfgolf.compare.launch import run_missing
    from hfgolf.compare.outcome import group_by_arm, read_outcome, read_outcomes
    from hfgolf.compare.plot import draw
    from hfgolf.run.folder import RunFolder
    from hfgolf.system.durable import write_text
    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    name = output_dir.resolve().name if experiment is None else experiment.path.stem
    results = output_dir / name
    check_output("--output_dir", output_dir, besides=[Path(f"{results}.{kind}") for kind in ("json", "md", "png")])
    margin = arguments.equivalent
    options = [] if margin is None else ["--equivalent", f"{margin:g}"]
    options += [] if arguments.output_dir is None else ["--output_dir", str(arguments.output_dir)]
    command = shlex.join(["hfgolf", "compare", *map(str, arguments.paths), *run_options, *options])
    if experiment is None:
        outcomes = group_by_arm([read_outcome(RunFolder(path)) for path in arguments.paths], by_name=True)
        comparison = compare_outcomes(name, command, outcomes, margin)
    else:
        failed = run_missing(planned, arguments.jobs)
        outcomes, failures = read_outcomes(planned, failed)
        comparison = compare_experiment(experiment, command, outcomes, failures, margin)
    write_text(Path(f"{results}.json"), comparison.to_json())
    write_text(Path(f"{results}.md"), f"{to_markdown(comparison)}\n{MARK}\n")
    draw(comparison, outcomes, Path(f"{results}.png"), experiment)
    shown = to_terminal(comparison, min(110, shutil.get_terminal_size((110, 24)).columns))
    logging.getLogger("hfgolf").info("\n%s\n\nwrote %s.json, .md and .png", shown, results)
    return Answer(comparison.figures())
