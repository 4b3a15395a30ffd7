"""Draw the losses of a run, or of several: python scripts/plot_metrics.py runs/small --output loss.png"""

import argparse
import math
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.report.metrics import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/small")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="picture to write (loss.png)")
    arguments = parser.parse_args()

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in arguments.runs:
        rows = _read(run / "metrics.jsonl")
        steps = [step for row in rows for step in range(row["step"] - len(row["train_losses"]) + 1, row["step"] + 1)]
        losses = [math.nan if loss is None else loss for row in rows for loss in row["train_losses"]]
        (line,) = axes.plot(steps, losses, alpha=0.35, linewidth=1, label=f"{run.name}: training, each step")
        judged = [row for row in rows if row["val_loss"] is not None]
        axes.plot(
            [row["step"] for row in judged],
            [row["val_loss"] for row in judged],
            color=line.get_color(),
            marker="o",
            label=f"{run.name}: validation ({judged[-1]['val_loss']:.3f} at the end)" if judged else None,
        )
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(arguments.output)
    print(f"wrote {arguments.output}")


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise UserError(f"there is no {path}; name a run folder, such as runs/small.")
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} is empty; the run has logged nothing yet.")
    return rows


if __name__ == "__main__":
    run_command(main)
