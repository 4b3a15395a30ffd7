"""Do models that were trained alike teach another one something? On 200 kB of Shakespeare, which are read nine times.

    python benchmarks/learning/distill.py input.txt --seeds 3 4 --teachers 2 --weights 0.3 0.6

Start it once per core. Trains a model with each seed, and teachers with the seeds 101, 102, ...; then, from the same
seeds, students whose loss is in part the cross-entropy to the mean of the teachers' probabilities. Shape and steps are
what the autopilot chose for such a text. Adds a row for each to distill.jsonl beside this file, with the seconds of the
training; the teachers' come on top. Prints how far the students are from the models with their seeds, in nats per
token.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfgolf
from hfgolf import api
from hfgolf.compare.statistics import paired_difference
from hfgolf.config.parse import load_config
from hfgolf.publish.load import load_model
from hfgolf.system.hardware import device_name

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, series_of

ROWS, RUNS = Path(__file__).parent / "distill.jsonl", Path("distill_runs")
VALUES = {
    "data.source": "files",
    "data.split": "contiguous",
    "tokenizer.vocab_size": 512,
    "model.dropout": 0.2,
    "train.max_steps": 404,
    "train.final_eval_tokens": None,
    "train.cpu_threads": 1,
    "train.compile": False,
    "train.sample_tokens": None,
}
"""Changes of configs/small.yaml."""


class Distill(hfgolf.Hook):
    """Make a share of the training loss the cross-entropy to the mean of the teachers' probabilities."""

    def __init__(self, teachers: list[Any], weight: float) -> None:
        self.teachers, self.weight = teachers, weight
        self.input_ids: Tensor | None = None

    def start(self, run: Any) -> None:
        def keep_ids(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.input_ids = kwargs.get("input_ids", args[0] if args else None)

        run.raw_model.register_forward_pre_hook(keep_ids, with_kwargs=True)
        run.raw_model.cross_entropy = _SoftTargets(self, run.raw_model.cross_entropy)


class _SoftTargets(nn.Module):
    def __init__(self, hook: Distill, plain: nn.Module) -> None:
        super().__init__()
        self.hook, self.plain = [hook], plain

    def forward(self, hidden: Tensor, head: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        nats: Tensor = self.plain(hidden, head, targets, *rest)
        hook = self.hook[0]
        if not self.training:
            return nats
        log_probabilities = F.linear(hidden, head).float().log_softmax(-1).view(targets.numel(), -1)
        soft = -(probabilities(hook.teachers, hook.input_ids) * log_probabilities).sum(-1)
        return (1 - hook.weight) * nats + hook.weight * soft[targets.flatten() != -100].sum()


@torch.no_grad()
def probabilities(teachers: list[Any], input_ids: Any) -> Tensor:
    """Return the mean of the teachers' probabilities: (tokens, entries)."""
    each = [teacher(input_ids=input_ids, use_cache=False).logits.float().softmax(-1) for teacher in teachers]
    return torch.stack(each).mean(0).flatten(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shakespeare", type=Path, help="the text tinyshakespeare")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--weights", nargs="+", type=float, default=[0.3, 0.6])
    arguments = parser.parse_args()
    if arguments.seeds:
        do_unclaimed(jobs(arguments), Path("distill_claims"), ROWS)
    report()


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    text = Path("distill_200kB.txt").resolve()
    text.write_bytes(arguments.shakespeare.read_bytes()[:200_000])
    teachers = [*range(101, 101 + arguments.teachers)]
    taught = [(seed, teachers, weight) for seed in arguments.seeds for weight in arguments.weights]
    for seed, by, weight in [*((seed, [], 0.0) for seed in (*teachers, *arguments.seeds)), *taught]:
        name = f"taught-{seed}-{len(by)}-{weight}" if by else f"alone-{seed}"
        yield name, partial(train, name, text, seed, by, weight)


def train(name: str, text: Path, seed: int, teachers: list[int], weight: float) -> dict[str, Any]:
    """Train a model, and return its row. Waits for teachers that another process still trains."""
    folders = [RUNS / f"alone-{teacher}" / "model" for teacher in teachers]
    while not all((folder.parent / "summary.json").exists() for folder in folders):
        time.sleep(5)
    models = [load_model(str(folder)).eval().requires_grad_(False) for folder in folders]
    run = {"run.seed": seed, "run.output_dir": str(RUNS), "run.name": name, "data.files": [str(text)]}
    summary = api.train(
        load_config(["--config", "small"], values=VALUES | run), [Distill(models, weight)] if models else []
    )
    return {
        "seed": seed,
        "teachers": len(teachers),
        "weight": weight,
        "val_loss": summary["val_loss"],
        "train_seconds": summary["train_seconds"],
        "machine": device_name(torch.device("cpu")),
    }


def report() -> None:
    found = series_of(ROWS, lambda row: f"{row['teachers']} teachers, weight {row['weight']}")
    losses = {title: {row["seed"]: row["val_loss"] for row in rows} for title, rows in found.items()}
    alone = losses.pop("0 teachers, weight 0.0", {})
    for title, taught in losses.items():
        if difference := paired_difference(taught, alone):
            p = math.nan if difference.p_value is None else difference.p_value
            print(f"{title}: {difference.mean:+.4f}, p {p:.3f} ({len(difference.by_seed)} seeds)")


if __name__ == "__main__":
    main()
