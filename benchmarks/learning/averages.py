"""Which average of the weights is the best at the end of a run? Start it once per core, then without --seeds:

    python benchmarks/learning/averages.py --shakespeare input.txt --tasks small --ideas base "floor 0.1" --seeds 1 2
    python benchmarks/learning/averages.py --proof proof_jobs.jsonl --seeds 1 2
    python benchmarks/learning/averages.py

Each run of a task of ideas.py, or of what the autopilot chose for a text (a job of law/proof.py), with its ideas, keeps
several averages at once: plain means over the last part of the steps, and exponential ones (EMA) whose mean age is a
part of the steps. At the end, it evaluates each of them and the last weights on the whole held-out part, and adds a row
to averages.jsonl beside this file. Differences are from the last weights of --base with the same seed. The rows without
induction heads are of earlier defaults: those of hfgolf1m read a million tokens in segments, as was chosen then.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ideas import TASKS, Idea, changes_of, known, train
from torch import Tensor

from hfgolf import api
from hfgolf.config.parse import load_config
from hfgolf.system.hardware import device_name
from hfgolf.train.validation import evaluate

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, rows_of, series_of

ROWS, CLAIMS = Path(__file__).parent / "averages.jsonl", Path("averages_claims")
PARTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
AGES = (0.02, 0.04, 0.08, 0.12, 0.16)
LAST = "last weights"


class Averages(Idea):
    """Keep all of the averages, and evaluate them after the last step."""

    def __init__(self) -> None:
        self.means: dict[float, list[Tensor]] = {}
        self.counts = dict.fromkeys(PARTS, 0)
        self.emas: dict[float, list[Tensor]] = {}
        self.losses: dict[str, float] = {}
        self.steps = 0.0

    def before_step(self, run: Any, expected_steps: float) -> None:
        super().before_step(run, expected_steps)
        self.steps = expected_steps

    @torch.no_grad()
    def after_step(self, run: Any, result: Any) -> None:
        weights = list(run.raw_model.parameters())
        for age in AGES:
            average = self.emas.setdefault(age, [weight.clone() for weight in weights])
            torch._foreach_lerp_(average, weights, 1 / (age * self.steps + 1))
        for part in PARTS:
            if self.progress >= 1 - part:
                self.counts[part] += 1
                mean = self.means.setdefault(part, [weight.clone() for weight in weights])
                torch._foreach_lerp_(mean, weights, 1 / self.counts[part])
        if self.is_last:
            averages = {f"mean of the last {part:.0%}": mean for part, mean in self.means.items()}
            averages |= {f"EMA, mean age {age:.0%}": average for age, average in self.emas.items()}
            last = [weight.clone() for weight in weights]
            for name, average in ({LAST: last} | averages).items():
                torch._foreach_copy_(weights, average)
                self.losses[name] = evaluate(run).loss
            torch._foreach_copy_(weights, last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", type=Path, help="the text tinyshakespeare")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[])
    parser.add_argument("--proof", type=Path, help="the jobs of law/proof.py, of which the choices are trained")
    parser.add_argument("--ideas", nargs="+", type=known, default=["base"], metavar="IDEA")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--base", type=known, default="base", metavar="IDEA", help="to compare with (base)")
    arguments = parser.parse_args()

    jobs = rows_of(arguments.proof) if arguments.proof else []
    choices = {f"{Path(job['text']).stem}, {job['minutes']:g} min": job for job in jobs if job["name"] == "choice"}

    def row(task: str, idea: str, seed: int) -> dict[str, Any]:
        averages = Averages()
        if task in choices:
            train_choice(choices[task], idea, seed, averages)
        else:
            train(task, idea, seed, arguments.shakespeare, [averages])
        machine = device_name(torch.device("cpu"))
        return {"task": task, "idea": idea, "seed": seed, "val_loss": averages.losses, "machine": machine}

    runs = [
        (task, idea, seed)
        for seed, idea, task in itertools.product(arguments.seeds, arguments.ideas, (*arguments.tasks, *choices))
    ]
    do_unclaimed(((f"{task}-{idea}-{seed}", partial(row, task, idea, seed)) for task, idea, seed in runs), CLAIMS, ROWS)
    for title, rows in series_of(ROWS, lambda row: f"{row['task']}, {row['machine']}").items():
        report(title, rows, arguments.base)


def train_choice(job: dict[str, Any], ideas: str, seed: int, averages: Averages) -> None:
    """Train what the autopilot chose, as law/proof.py does, but with ideas; `averages` evaluates it."""
    with tempfile.TemporaryDirectory() as folder:
        values, hooks = changes_of(ideas, job["values"])
        values = job["values"] | values | {"run.seed": seed, "run.output_dir": folder, "run.name": "run"}
        values |= {"train.cpu_threads": 1, "train.compile": False, "train.sample_tokens": None}
        values |= {"train.eval_every_steps": job["values"]["train.max_steps"], "train.final_eval_tokens": 4096}
        api.train(load_config([job["text"]], values=values), [*hooks, averages])


def report(title: str, rows: list[dict[str, Any]], base_idea: str) -> None:
    """Print each average of each idea, best first."""
    base = {row["seed"]: row["val_loss"][LAST] for row in rows if row["idea"] == base_idea}
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, loss in row["val_loss"].items():
            if row["seed"] in base:
                found.setdefault(f"{row['idea']}: {name}", []).append(loss - base[row["seed"]])
    print(f"{title}: {sum(base.values()) / max(1, len(base)):.4f} nats per token ({len(base)} seeds)")
    for name, differences in sorted(found.items(), key=lambda item: sum(item[1]) / len(item[1])):
        each = ", ".join(f"{difference:+.4f}" for difference in differences)
        print(f"  {name:42} {sum(differences) / len(differences):+.4f} ({each})")


if __name__ == "__main__":
    main()
