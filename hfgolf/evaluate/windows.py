"""Which token is scored from which window: flat rows, sliding windows, and documents apart.

A stream is tokens x_0 ... x_N. Each of x_1 ... x_N is a target, scored once, from tokens before it only. This file
knows neither models nor text. It imports nothing of hfgolf, because golf ships it inside the program that scores an
artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label of a position that is not scored, as F.cross_entropy has it
MODES = ("flat", "sliding", "documents")


@dataclass(frozen=True)
class Plan:
    """The windows that score a stream of num_tokens tokens.

    windows: (number, 3) int64, one row per window: the first input token, the first scored target, the last target.
    A window reads the inputs from `first input` to `last target` - 1; the targets between are scored, in order.
    """

    mode: str
    length: int
    stride: int
    num_tokens: int
    tail: str
    separators: str
    windows: np.ndarray

    @property
    def num_scored(self) -> int:
        """The number of scored targets."""
        return int((self.windows[:, 2] - self.windows[:, 1] + 1).sum())

    def targets(self) -> np.ndarray:
        """Return the index of each scored target, in order, (num_scored,) int64."""
        first, last = self.windows[:, 1], self.windows[:, 2]
        counts = last - first + 1
        return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)

    def coverage(self) -> dict[str, Any]:
        """Return what a score must state about itself; num_unscored includes x_0, which has no context."""
        return {
            "mode": self.mode,
            "window": self.length,
            "stride": self.stride,
            "num_scored": self.num_scored,
            "num_unscored": self.num_tokens - self.num_scored,
            "first_target": int(self.windows[0, 1]),
            "last_target": int(self.windows[:, 2].max()),
            "tail": self.tail,
            "separators": self.separators,
        }


def plan_windows(
    mode: str,
    num_tokens: int,
    length: int,
    stride: int | None = None,
    separators: np.ndarray | None = None,
    drop_tail: bool = False,
    skip_separators: int = 0,
) -> Plan:
    """Plan the windows of `length` tokens that score each target of a stream once.

    flat: rows end to end; the last, shorter one is dropped with drop_tail, as in the challenge's baseline.
    sliding: a window every `stride` tokens scores its last `stride` targets, so each but the first `length` targets of
        the stream has at least length - stride + 1 inputs. stride = length is flat.
    documents: sliding windows inside each document; no window crosses a separator. separators: their positions, sorted.
        The separator that ends a document is scored from that document. skip_separators: the number of tokens at the
        end of each document that are not scored, because they only separate it from the next one.

    Raises ValueError if the mode or the stride is not allowed, or if nothing is left to score.
    """
    stride = length if mode == "flat" else stride or length
    if mode not in MODES or not 1 <= stride <= length:
        raise ValueError(f"mode {mode}, stride {stride}; allowed: {', '.join(MODES)}, and a stride of 1 to {length}")
    if mode != "documents":
        separators, skip_separators = np.array([], np.int64), 0
    elif separators is None:
        raise ValueError("documents need the positions of their separators")
    starts = np.union1d([0], separators).astype(np.int64)  # the first input of each part, and its last target
    ends = np.append(starts[1:] - skip_separators, num_tokens - 1)
    starts, ends = starts[ends > starts], ends[ends > starts]
    counts = 1 + np.maximum(0, -((starts + length - ends) // stride))
    part = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the window in its part
    begin = starts[part] + number * stride
    first = np.where(number > 0, begin + length - stride, begin) + 1
    last = np.minimum(begin + length, ends[part])
    windows = np.stack([begin, first, last], 1).astype(np.int64)
    if mode == "flat" and drop_tail:
        windows = windows[last - begin == length]
    if not len(windows) or num_tokens < 2:
        raise ValueError(f"nothing to score: {num_tokens} tokens, windows of {length}")
    tail = "dropped" if mode == "flat" and drop_tail else "scored"
    policy = "skipped" if skip_separators else "scored"
    return Plan(mode, length, stride, num_tokens, tail, policy, windows)


def batches(
    read: Callable[[np.ndarray], np.ndarray], plan: Plan, batch_size: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, labels), (B, T) int64, of this rank's share of the windows. Labels not scored here are IGNORED.

    read: returns the tokens at the given positions, of any shape. All ranks yield equally many batches of equal shapes,
    padded on the right, so a batch may have no label. Its mean loss would be NaN: sum the losses.
    """
    windows, length = plan.windows, plan.length
    if plan.mode == "documents":  # together with others of their length: less padding
        windows = windows[np.argsort(windows[:, 0] - windows[:, 2], kind="stable")]
    for start in range(0, len(windows), batch_size * world):
        group = windows[start : start + batch_size * world]
        if plan.mode == "documents":
            length = int((group[:, 2] - group[:, 0]).max())
        mine = group[rank * batch_size : (rank + 1) * batch_size]
        end = plan.num_tokens - 1
        mine = np.concatenate([mine, np.tile([[end, end + 1, end]], (batch_size - len(mine), 1))])
        begin, first, last = np.split(mine, 3, axis=1)
        places = begin + np.arange(length + 1)
        tokens = torch.from_numpy(read(np.minimum(places, last)).astype(np.int64))
        is_scored = torch.from_numpy((places >= first) & (places <= last))[:, 1:]
        # clone, because contiguous() keeps the strides of a single row, and torch.compile would compile again
        inputs = tokens[:, :-1].clone(memory_format=torch.contiguous_format)
        yield inputs, tokens[:, 1:].masked_fill(~is_scored, IGNORED)


def sum_nats(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss in nats, an fp64 scalar. logits: (B, T, V); labels: (B, T), ignoring IGNORED."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return as_fp64(losses).sum()


def as_fp64(values: Tensor) -> Tensor:
    """Return the values in fp64, on the host if their device may have no fp64, as MPS."""
    return values.to(_device_with_fp64(values.device)).double()


def zero_nats(device: torch.device) -> Tensor:
    """Return 0 in fp64, where as_fp64 has its results."""
    return torch.zeros((), dtype=torch.float64, device=_device_with_fp64(device))


def _device_with_fp64(device: torch.device) -> torch.device:
    return device if device.type == "cuda" else torch.device("cpu")


@torch.no_grad()
def score(
    nats: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[np.ndarray], np.ndarray],
    plan: Plan,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> float:
    """Return the total nats of a plan, summed in fp64. nats: (inputs, labels) -> summed nats of the labels."""
    total = zero_nats(torch.device(device))
    for inputs, labels in batches(read, plan, batch_size):
        total += nats(inputs.to(device), labels.to(device)).to(total.device)
    return total.item()
