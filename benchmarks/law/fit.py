"""Fit the autopilot's law to runs.jsonl: python benchmarks/law/fit.py

Prints the constants of hfgolf/train/law.py, how far the law is from the runs, and how far from an eighth of them that
the fit has not seen, for each eighth. Each text has a scale and a floor of its own; the law's are lines through them.
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
STARTS, FOLDS = 8, 8
PRIOR = {
    "capacity": ([0.3, 0.25, 0.37], [1, 0.4, 0.5]),
    "data": ([0.6, 0.37, 0.22], [1, 0.3, 0.5]),
    "repeats": ([5.0], [0.4]),
    "critical_tokens": ([10_000.0], [0.7]),
    "entries": ([1.0, 0.7, 0.7], [1, 0.4, 0.4]),
    "memory": ([0.02, 0.7, 1.8], [1, 0.4, 0.3]),
}
"""{constants: (what the fit starts from and stays near, how far their logarithms may be from it)}."""
SCALE, FLOOR = ([math.exp(0.3)], [0.5]), ([0.5], [0.4])
"""The same for the scale of each text, and for its floor itself."""


def main() -> None:
    rows = [row for row in map(json.loads, RUNS.read_text().splitlines()) if is_usable(row)]
    texts = sorted({row["text"] for row in rows})
    found = fit(rows, texts, STARTS)
    of_text = {row["text"]: row["density"] for row in rows}
    densities = [of_text[text] for text in texts]
    scales, floors = np.exp(found[-2 * len(texts) : -len(texts)]), found[-len(texts) :]
    weights = [sum(row["text"] == text for row in rows) ** 0.5 for text in texts]
    scale, floor = (tuple(np.polyfit(densities, values, 1, w=weights)[::-1]) for values in (scales, floors))
    law = dataclasses.replace(law_of(found), scale=scale, floor=floor)
    errors = differences(rows, texts, found)
    for name, value in rounded(law).items():
        print(f"{name}: {value}")
    print(f"{len(rows)} runs; off by {spread(errors)}")
    left_out: list[float] = []
    for fold in range(FOLDS):
        kept = [row for number, row in enumerate(rows) if number % FOLDS != fold]
        left_out += differences(rows[fold::FOLDS], texts, fit(kept, texts, 2, found))
    print(f"left out of the fit: off by {spread(left_out)}")


def is_usable(row: dict[str, Any]) -> bool:
    """Return whether the law is about a run: long enough to have learned something, of usual steps and sequences."""
    is_long = row["steps"] >= 100
    return is_long and row["tokens_per_step"] >= 2048 and row.get("sequence_length", 256) == 256


def law_of(found: Sequence[float]) -> Law:
    """Return the law with these logarithms of its constants; its scale is 1, and its floor is 0."""
    rest, values = list(found), dict[str, Any]()
    for name, (constants, _) in PRIOR.items():
        numbers = tuple(math.exp(rest.pop(0)) for _ in constants)
        values[name] = numbers if len(numbers) > 1 else numbers[0]
    return Law(**values, scale=(1.0, 0.0), floor=(0.0, 0.0))


def differences(rows: list[dict[str, Any]], texts: list[str], found: Sequence[float]) -> list[float]:
    """Return ln(law / measured) of each run."""
    law, count = law_of(found), len(texts)
    scales, floors = (dict(zip(texts, part, strict=True)) for part in (found[-2 * count : -count], found[-count:]))
    values = []
    for row in rows:
        ratio = row["tokens"] / row["epochs"] / row["train_bytes"]
        text = Text(row["train_bytes"], row["density"], {row["vocabulary"]: ratio})
        shape = Shape(row["width"], row["layers"], row["vocabulary"])
        learned = bits_per_byte(text, shape, row["tokens"], row["tokens_per_step"], law)
        expected = floors[row["text"]] + math.exp(scales[row["text"]]) * learned
        values.append(math.log(max(expected, 0.01) / row["best_bits_per_byte"]))
    return values


def fit(rows: list[dict[str, Any]], texts: list[str], starts: int, first: Sequence[float] | None = None) -> list[float]:
    """Return the best of some fits, each drawn to PRIOR."""
    of_texts = [SCALE] * len(texts)
    prior = np.log(np.concatenate([numbers for numbers, _ in (*PRIOR.values(), *of_texts)]))
    spreads = np.concatenate([spreads for _, spreads in (*PRIOR.values(), *of_texts)])
    prior, spreads = np.append(prior, FLOOR[0] * len(texts)), np.append(spreads, FLOOR[1] * len(texts))
    rng, best = np.random.default_rng(0), None
    for start in range(starts):
        begin = prior if first is None else np.array(first)
        found = least_squares(
            lambda point: [
                *(100 * error for error in differences(rows, texts, point)),
                *((point - prior) / spreads),
            ],
            begin + (rng.normal(size=len(prior)) * spreads / 2 if start else 0),
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
