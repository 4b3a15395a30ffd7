"""Would trellis-coded rounding pay? Entropy and loss of a run's weights, with and without a trellis.

    python benchmarks/experiments/golf_trellis.py --run runs/small --budget 1200000

A prototype, without coder or decoder: the bits are the entropy of all integers of a matrix, one histogram for each
quantizer. A trellis of four or eight states has two quantizers, of even and of odd multiples of a step and zero, and
the parity of each integer says which one the next weight of its row has (dependent quantization; Schwarz et al., DCC
2019). A Viterbi search chooses; each survivor has passed its errors on to later columns (GPTQ).
"scalar" is the same search with one state; "columns" and "descent" are those of golf_rounding.py, the last of which is
what an export does. rate: what a bit costs, as a share of the mean price of a squared step. "added" is what rounding
adds to the loss of the float weights, in nats per token of the whole validation part. Adds a row for each to
golf_trellis.jsonl in results/.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from golf_export import Weights
from golf_rounding import Subject
from numpy.typing import NDArray

from hfgolf.golf.gptq import Feedback, error_feedback
from hfgolf.train.console import quiet_libraries

RESULTS = Path(__file__).parent / "results" / "golf_trellis.jsonl"
Array = NDArray[np.float64]
TRELLISES = {
    "scalar": ([(0, 0)], [0], (0.54, 0.52, 0.5, 0.48, 0.46, 0.44)),
    "4 states": ([(0, 2), (2, 0), (1, 3), (3, 1)], [0, 0, 1, 1], (0.72, 0.68, 0.64, 0.6, 0.57, 0.54)),
    "8 states": (
        [(0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)],
        [0, 1, 0, 1, 0, 1, 0, 1],
        (0.72, 0.68, 0.64, 0.6, 0.57, 0.54),
    ),
}
"""{name: (next states by the parity of an integer, and the quantizer, of each state; steps, as shares of hfgolf's)}.

The levels of both quantizers together are multiples of a step, those of each one of about two.
"""
RATES = (0.0, 0.1)
LARGEST = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--budget", required=True, type=int, help="bytes of hfgolf's artifact alone")
    arguments = parser.parse_args()
    quiet_libraries()
    subject = Subject(arguments.run)
    weights = subject.weights
    num_weights = sum(weight.size for weight in weights.values())

    def show(arm: str, changed: Weights, bits: float, rate: float = 0.0, step: float = 1.0) -> None:
        row = {"run": arguments.run.name, "arm": arm, "rate": rate, "step": step, "bits_per_weight": bits / num_weights}
        row["added_nats"] = subject.added_nats(changed)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{arm:10}{rate:6.1f}{step:6.2f}{row['bits_per_weight']:8.3f} bits{row['added_nats']:9.4f}", flush=True)

    for arm in ("descent", "columns"):
        found = subject.rounded(arm, arguments.budget).tensors
        bits = sum(entropy(np.unique(one.integers, return_counts=True)[1]) for one in found.values())
        show(arm, {name: one.dequantized() for name, one in found.items()}, bits)
    feedback = {name: error_feedback(one.hessian) for name, one in subject.curvature.items()}
    for arm, (trellis, quantizers, shares) in TRELLISES.items():
        for rate in RATES:
            for share in shares:
                changed, bits = {}, 0.0
                for name, weight in weights.items():
                    steps = share * np.broadcast_to(found[name].steps(), weight.shape)[:, 0].astype(np.float64)
                    levels, more = search(weight / steps[:, None], feedback[name], trellis, np.array(quantizers), rate)
                    changed[name], bits = (levels * steps[:, None]).astype(np.float32), bits + more
                show(arm, changed, bits, rate, share)


def search(
    weight: Array, feedback: Feedback, trellis: list[tuple[int, int]], quantizers: NDArray[np.int64], rate: float
) -> tuple[Array, float]:
    """Return the levels of a matrix (rows, columns) in steps, and the bits of their integers.

    If bits have a price, the search is repeated twice, with those of the histograms before.
    """
    bits, price = np.zeros((2, 2 * LARGEST + 1)), 0.0
    for _ in range(3 if rate else 1):
        integers, states = _viterbi(weight, feedback, trellis, quantizers, bits, price)
        used = quantizers[states]
        counts = np.stack([np.bincount(integers[used == one] + LARGEST, minlength=bits.shape[1]) for one in (0, 1)])
        bits = -np.log2((counts + 0.1) / (counts + 0.1).sum(1, keepdims=True))
        price = rate * float(np.mean(np.diag(feedback.upper) ** -2.0))
    levels = np.empty(weight.shape)
    levels[:, feedback.order] = _levels(integers, used)
    return levels, entropy(counts[0]) + entropy(counts[1])


def _viterbi(
    weight: Array,
    feedback: Feedback,
    trellis: list[tuple[int, int]],
    quantizers: NDArray[np.int64],
    bits: Array,
    price: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return integers and states, (rows, columns) in the order of the feedback, of the cheapest paths."""
    rows, columns, upper = *weight.shape, feedback.upper
    left = np.repeat(weight[:, None, feedback.order], len(trellis), 1)  # (rows, states, columns): of each survivor
    costs = np.full(left.shape[:2], np.inf)
    costs[:, 0] = 0.0
    chosen = np.empty((columns, *costs.shape), np.int64)
    before = np.zeros((columns, *costs.shape), np.int64)
    of_states = np.broadcast_to(quantizers, costs.shape)
    for j in range(columns):
        here = left[:, :, j]
        nearest = np.where(of_states == 1, np.sign(here) * np.rint((np.abs(here) + 1) / 2), np.rint(here / 2))
        toward = np.where(here > _levels(nearest, of_states), 1, -1)
        tried = np.stack([nearest, nearest + toward, nearest - toward, np.zeros_like(here)])
        tried = tried.clip(-LARGEST, LARGEST).astype(np.int64)
        errors = here - _levels(tried, of_states)
        prices = upper[j, j] ** -2.0 * errors**2 + price * bits[of_states, tried + LARGEST] + costs
        costs, error = np.full(costs.shape, np.inf), np.zeros(costs.shape)
        for state, following in enumerate(trellis):
            for parity in (0, 1) if len(trellis) > 1 else (None,):
                of_parity = prices[:, :, state]
                if parity is not None:
                    of_parity = np.where(tried[:, :, state] % 2 == parity, of_parity, np.inf)
                best = of_parity.argmin(0)[None]
                cost, integer, missed = (
                    np.take_along_axis(each, best, 0)[0]
                    for each in (of_parity, tried[:, :, state], errors[:, :, state])
                )
                to = following[parity or 0]
                wins = cost < costs[:, to]
                costs[wins, to], error[wins, to] = cost[wins], missed[wins]
                chosen[j, wins, to], before[j, wins, to] = integer[wins], state
        left = np.take_along_axis(left, before[j][:, :, None], 1)
        left[:, :, j + 1 :] -= (error / upper[j, j])[:, :, None] * upper[j, j + 1 :]
    integers, states = np.empty((2, rows, columns), np.int64)
    state, every = costs.argmin(1), np.arange(rows)
    for j in reversed(range(columns)):
        integers[:, j], state = chosen[j, every, state], before[j, every, state]
        states[:, j] = state
    return integers, states


def _levels(integers: NDArray[np.generic], of_quantizers: NDArray[np.int64]) -> Array:
    """Return the multiples of a step that integers stand for: even ones, or odd ones and zero."""
    return np.asarray(2.0 * integers.astype(np.float64) - (of_quantizers == 1) * np.sign(integers.astype(np.float64)))


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the bits of all symbols, coded by the shares that they have."""
    used = counts[counts > 0].astype(np.float64)
    return float(-(used * np.log2(used / used.sum())).sum()) if len(used) else 0.0


if __name__ == "__main__":
    main()
