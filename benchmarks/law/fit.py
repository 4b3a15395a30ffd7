"""Fit the autopilot's law to runs.jsonl: python benchmarks/law/fit.py

Prints the constants of hfgolf/train/law.py, how far the law is from the runs, and how far from an eighth of them that
the fit has not seen, for each eighth. Each kind of text has a scale of its own. It leaves out runs of fewer than
MIN_STEPS steps, of two layers, and those that ended more than a tenth above their best evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hfgolf.train.law import Law, Shape, Text, bits_per_byte

RUNS = Path(__file__).parent / "runs.jsonl"
KINDS = ("docstrings", "python", "shakespeare", "topics")
MIN_STEPS, STARTS, FOLDS = 140, 24, 8
PRIOR = Law(
    floor=0.03,
    capacity=(0.45, 0.25, 0.35),
    embedding=0.06,
    data=(0.6, 0.25, 0.2),
    repeats=2.0,
    start_steps=100.0,
    critical_tokens=30_000.0,
    entries=(1.5, 0.6),
    memory=(0.005, 1.5, 2.0),
    late=(0.15, 0.35, 1.0),
    dropout=0.8,
)
"""What the fit starts from and stays near: 80 runs can't tell all of these constants apart."""
LOGARITHMS = [name for name in vars(PRIOR) if name not in ("scale",)]
"""Fields that are fitted as the logarithms of their numbers, because all are positive."""


def main() -> None:
    rows = [json.loads(line) for line in RUNS.read_text().splitlines()]
    rows = [
        row
        for row in rows
        if row["steps"] >= MIN_STEPS and row["layers"] > 2 and row["bits_per_byte"] < 1.1 * row["best_bits_per_byte"]
    ]
    found = fit(rows, STARTS)
    law = law_of(found)
    errors = differences(rows, found)
    print(*(f"{name}: {value}" for name, value in rounded(law).items()), sep="\n")
    print("scales:", dict(zip(KINDS, np.exp(found[-len(KINDS) :]).round(3).tolist(), strict=True)))
    print(f"{len(rows)} runs; off by {spread(errors)}")
    left_out: list[float] = []
    for fold in range(FOLDS):
        kept = [row for number, row in enumerate(rows) if number % FOLDS != fold]
        left_out += differences(rows[fold::FOLDS], fit(kept, 4, found))
    print(f"left out of the fit: off by {spread(left_out)}")


def numbers(law: Law) -> list[float]:
    """Return the constants of a law as a list, without its scale."""
    return [number for name in LOGARITHMS for number in np.atleast_1d(getattr(law, name)).tolist()]


def law_of(found: Sequence[float]) -> Law:
    """Return the law with these logarithms of its constants; its scale is 1."""
    rest, values = [math.exp(number) for number in found], dict[str, Any]()
    for name in LOGARITHMS:
        count = np.size(getattr(PRIOR, name))
        values[name] = tuple(rest[:count]) if count > 1 else rest[0]
        del rest[:count]
    return Law(**values, scale=(1.0, 0.0))


def differences(rows: list[dict[str, Any]], found: Sequence[float]) -> list[float]:
    """Return ln(law / measured) of each run."""
    law, scales = law_of(found), dict(zip(KINDS, found[-len(KINDS) :], strict=True))
    values = []
    for row in rows:
        kind = next(kind for kind in KINDS if row["text"].startswith(kind))
        ratio = row["tokens"] / row["epochs"] / row["train_bytes"]
        text = Text(row["train_bytes"], 0.0, {row["vocabulary"]: ratio})
        shape = Shape(row["width"], row["layers"], row["vocabulary"], row["dropout"])
        expected = bits_per_byte(text, shape, row["tokens"], row["tokens_per_step"], law)
        values.append(math.log(expected / row["bits_per_byte"]) + scales[kind])
    return values


def fit(rows: list[dict[str, Any]], starts: int, first: Sequence[float] | None = None) -> list[float]:
    """Return the best of some fits, each drawn to the constants of PRIOR."""
    prior = np.array([*np.log(numbers(PRIOR)), *[0.5] * len(KINDS)])
    rng, best = np.random.default_rng(0), None
    for start in range(starts):
        begin = (prior if first is None else np.array(first)) + (rng.normal(size=len(prior)) / 3 if start else 0)
        found = least_squares(
            lambda point: [*(100 * error for error in differences(rows, point)), *(point - prior)],
            np.clip(begin, prior - 3, prior + 3),
            bounds=(prior - 3.01, prior + 3.01),
            loss="soft_l1",
            max_nfev=100,
        )
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    return list(best.x)


def rounded(law: Law) -> dict[str, Any]:
    """Return the constants with three digits."""
    values = dataclasses.asdict(law)
    return {name: tuple(float(f"{number:.3g}") for number in np.atleast_1d(value)) for name, value in values.items()}


def spread(errors: Sequence[float]) -> str:
    return f"{np.median(np.abs(errors)):.1%} (median), {np.sqrt(np.mean(np.square(errors))):.1%} (root mean square)"


if __name__ == "__main__":
    main()
