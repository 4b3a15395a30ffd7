"""Write the report of a run, or of several runs side by side: hfgolf report runs/small"""

import shutil
from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, bounded, check_output
from hfgolf.system.errors import UserError, writing


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
    is_in_run = arguments.output is None and len(arguments.runs) == 1
    output = arguments.runs[0] / "report.html" if is_in_run else arguments.output or Path("report.html")
    picture = output.with_suffix("") / "loss.png"
    if not is_in_run:
        check_output("--output", output, ["html"], [picture])
    elif output.parent.is_dir():  # otherwise read_run reports that there is no such run
        check_output("--output", output, ["html"])
    if arguments.png:
        check_output("--png", arguments.png, ["png"])

    from hfgolf.report.report import write_report
    from hfgolf.run.record import read_run

    runs = [read_run(folder) for folder in arguments.runs]
    with writing("--output", output):
        write_report(runs, output, arguments.price_per_hour)
    if not picture.is_file():
        if arguments.png:
            raise UserError(f"--png: no run has a loss yet; wait for the first one. {output} is written.")
        return Answer({"report": output, "losses": None}, f"wrote {output}")
    if arguments.png:
        with writing("--png", arguments.png):
            shutil.copyfile(picture, arguments.png)
    return Answer({"report": output, "losses": picture}, f"wrote {output}, and its losses as {output.stem}/loss.png")
