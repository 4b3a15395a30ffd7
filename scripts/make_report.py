"""Make the report of a run, or of several side by side: python scripts/make_report.py runs/small"""

import argparse
import shutil
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/small; metrics.jsonl is enough")
    parser.add_argument("--output", type=Path, help="page to write (report.html in the folder of a single run)")
    parser.add_argument("--price_per_hour", type=float, help="dollars for the machine (run.price_per_hour of the run)")
    parser.add_argument("--png", type=Path, help="also write a picture of the losses")
    arguments = parser.parse_args()
    output = arguments.output or (arguments.runs[0] if len(arguments.runs) == 1 else Path()) / "report.html"
    if output.suffix != ".html":
        raise UserError(f"--output: {output} is not a page; name a file that ends in .html.")
    if arguments.price_per_hour is not None and not 0 <= arguments.price_per_hour < float("inf"):
        raise UserError(f"--price_per_hour: {arguments.price_per_hour} is out of range; allowed: 0 or more.")

    from hfgolf.report.record import read_run
    from hfgolf.report.report import write_report

    runs = [read_run(folder) for folder in arguments.runs]
    try:
        write_report(runs, output, arguments.price_per_hour)
        print(f"wrote {output}, and {output.with_suffix('.md').name} with pictures in {output.with_suffix('').name}/")
        if arguments.png:
            shutil.copyfile(output.with_suffix("") / "loss.png", arguments.png)
    except OSError as error:
        raise UserError(f"--output: cannot write {error.filename} ({error.strerror}); choose another.") from None


if __name__ == "__main__":
    run_command(main)
