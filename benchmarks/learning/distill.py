"""Do models that were trained alike teach another one something? On text that is read often, and on text read once.

    python benchmarks/learning/distill.py input.txt --texts shakespeare200 --seeds 3 4 5

Start it once per core. For each text it trains a model with each seed, and teachers with the seeds 101, 102, ...; then,
from the same seeds, students with train.distill_from. Adds a row for each to distill.jsonl beside this file, with the
seconds of the training; the teachers' come on top. Prints how far the students are from the models with their seeds, in
nats per token.
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

from hfgolf import api
from hfgolf.compare.statistics import paired_difference
from hfgolf.config.parse import load_config
from hfgolf.hooks import distillation
from hfgolf.system.hardware import device_name
from hfgolf.train.autopilot import values_of_repeats
from hfgolf.train.law import heads_of, layers_of, rates_of

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, series_of

ROWS, RUNS = Path(__file__).parent / "distill.jsonl", Path("distill_runs")
VALUES = {
    "data.split": "contiguous",
    "train.final_eval_tokens": None,
    "train.cpu_threads": 1,
    "train.compile": False,
    "train.sample_tokens": None,
}
"""Changes of configs/small.yaml."""


def _values(width: int, entries: int, steps: int, epochs: float) -> dict[str, Any]:
    """Return what --minutes would choose for a model of such a width."""
    muon, adamw = rates_of(width)
    values = {"model.hidden_size": width, "model.num_hidden_layers": layers_of(width), "tokenizer.vocab_size": entries}
    values |= {"model.num_attention_heads": heads_of(width), "train.max_steps": steps}
    return values | {"optim.learning_rate": muon, "optim.adamw_learning_rate": adamw} | values_of_repeats(epochs, steps)


TEXTS: dict[str, dict[str, Any]] = {
    "shakespeare200": _values(256, 512, 404, epochs=9) | {"model.dropout": 0.2},
    "shakespeare": _values(128, 1024, 950, epochs=5),
    "python": _values(128, 1024, 950, epochs=0.2) | {"data.source": "python_stdlib"},
}
"""{text: its values}: 200 kB, read nine times; 1 MB, five times; 9 MB, not yet once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shakespeare", type=Path, help="the text tinyshakespeare")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=[*TEXTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--shares", nargs="+", type=float, default=[distillation.SHARE], help="of the loss")
    arguments = parser.parse_args()
    if arguments.seeds:
        do_unclaimed(jobs(arguments), Path("distill_claims"), ROWS)
    report()


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    raw = arguments.shakespeare.read_bytes()
    teachers = [*range(101, 101 + arguments.teachers)]
    for text in arguments.texts:
        path = Path(f"{text}.txt").resolve()
        path.write_bytes(raw[:200_000] if text == "shakespeare200" else raw)
        taught = [(seed, teachers, share) for seed in arguments.seeds for share in arguments.shares]
        for seed, by, share in [*((seed, [], 0.0) for seed in (*teachers, *arguments.seeds)), *taught]:
            name = f"{text}-taught-{seed}-{len(by)}-{share}" if by else f"{text}-alone-{seed}"
            yield name, partial(train, name, text, path, seed, by, share)


def train(name: str, text: str, path: Path, seed: int, teachers: list[int], share: float) -> dict[str, Any]:
    """Train a model, and return its row. Waits for teachers that another process still trains."""
    folders = [RUNS / f"{text}-alone-{teacher}" for teacher in teachers]
    while not all((folder / "summary.json").exists() for folder in folders):
        time.sleep(5)
    values = {"data.source": "files", **VALUES, **TEXTS[text], "run.seed": seed, "run.name": name}
    values |= {"run.output_dir": str(RUNS), "train.distill_from": [*map(str, folders)]}
    values |= {"data.files": [str(path)]} if values["data.source"] == "files" else {}
    distillation.SHARE = share
    summary = api.train(load_config(["--config", "small"], values=values))
    return {
        "text": f"{text} as chosen",  # older rows had no averages and no induction heads
        "seed": seed,
        "teachers": len(teachers),
        "share": share,
        "val_loss": summary["val_loss"],
        "train_seconds": summary["train_seconds"],
        "machine": device_name(torch.device("cpu")),
    }


def _title(row: dict[str, Any]) -> str:
    is_own = row["teachers"] and 100 < row["seed"] <= 100 + row["teachers"]
    own = ", the seed of a teacher" if is_own else ""
    return f"{row['text']}, {row['teachers']} teachers, share {row['share']}{own}"


def report() -> None:
    found = series_of(ROWS, _title)
    losses = {title: {row["seed"]: row["val_loss"] for row in rows} for title, rows in found.items()}
    alone = {title.partition(",")[0]: losses.pop(title) for title in [*losses] if ", 0 teachers" in title}
    for title, taught in losses.items():
        if difference := paired_difference(taught, alone[title.partition(",")[0]]):
            p = math.nan if difference.p_value is None else difference.p_value
            print(f"{title}: {difference.mean:+.4f}, p {p:.3f} ({len(difference.by_seed)} seeds)")


if __name__ == "__main__":
    main()
