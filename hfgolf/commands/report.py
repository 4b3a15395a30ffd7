"""Write the report of a run, or of several runs side by side: hfgolf report runs/small"""

from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, bounded, check_output
from hfgolf.system.errors import writing


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders, such as runs/small; each needs only metrics.jsonl"
    )
    parser.add_argument(
        "--output", type=Path, help="page to write (default: report.html in the folder of a single run)"
    )
    parser.add_argument(
        "--price_per_hour",
        **bounded(0.0, 1e12, "dollars per hour for the machine (default: the run's run.price_per_hour)"),
    )
    arguments = parser.parse_args()
    is_in_run = arguments.output is None and len(arguments.runs) == 1
    output = arguments.runs[0] / "report.html" if is_in_run else arguments.output or Path("report.html")
    if not is_in_run:
        check_output("--output", output, ["html"], [output.with_suffix("") / "loss.png"])
    elif output.parent.is_dir():  # otherwise read_run reports that there is no such run
        check_output("--output", output, ["html"])

    from hfgolf.report.report import write_report
    from hfgolf.run.record import read_run

    runs = [read_run(folder) for folder in arguments.runs]
    with writing("--output", output):
        picture = write_report(runs, output, arguments.price_per_hour)
    losses = f", and its losses as {output.stem}/loss.png" if picture else ""
    return Answer({"report": output, "losses": picture}, f"wrote {output}{losses}")
