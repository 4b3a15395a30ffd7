"""Write the report of a run, or of several runs side by side: hfgolf report runs/small"""

import shutil
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
    parser.add_argument("--png", type=Path, help="also write a picture of the losses to this file")
    arguments = parser.parse_args()
    output = arguments.output or (arguments.runs[0] if len(arguments.runs) == 1 else Path()) / "report.html"
    besides = [output.with_suffix("") / "loss.png"]
    if arguments.output:
        check_output("--output", output, ["html"], besides)
    elif output.parent.is_dir():  # otherwise read_run reports that there is no such run
        check_output("--output", output, ["html"])
    if arguments.png:
        check_output("--png", arguments.png, ["png"])

    from hfgolf.report.report import write_report
    from hfgolf.run.record import read_run

    runs = [read_run(folder) for folder in arguments.runs]
    with writing("--output", output):
        write_report(runs, output, arguments.price_per_hour)
        if arguments.png:
            shutil.copyfile(output.with_suffix("") / "loss.png", arguments.png)
    picture = output.with_suffix("") / "loss.png"
    return Answer({"report": output, "losses": picture}, f"wrote {output}, and its losses as {output.stem}/loss.png")
