"""Batches per second of the loader, compared with a bare NumPy gather, from a memory map and from RAM.

    python benchmarks/data_loading.py --output benchmarks/results/data_loading_cpu.json

Tokens are random, in a file in the token cache's format, and in the page cache. A batch is what a step gets:
{"input_ids", "shift_labels"}, int64. The bare gather makes the same batch at precomputed random places, without our
order, hash and DataLoader. Workers start before the clock does. Repetitions are interleaved in one process, and ratios
are medians over pairs. Nothing computes on these batches, so this is the loader's top speed. In training, it only
matters that a batch takes far less time than a step or, with workers, that it is ready when the step ends.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, write

PLACES = ("memory map", "RAM")
WORKERS = (0, 2)
PIECE = 2000  # tokens


def bare_batches(tokens: Any, arguments: argparse.Namespace) -> Iterator[Any]:
    """Gather (B, T + 1) tokens at random places and split them into inputs and targets."""
    import numpy as np
    import torch

    length, size = arguments.sequence_length, arguments.micro_batch_size
    shape = (arguments.batches + 1, size)
    starts = np.random.default_rng(0).integers(len(tokens) - length, size=shape)
    for row in starts:
        block = torch.from_numpy(tokens[row[:, None] + np.arange(length + 1)].astype(np.int64))
        yield {"input_ids": block[:, :-1].contiguous(), "shift_labels": block[:, 1:].contiguous()}


def our_batches(stream: Any, num_workers: int, arguments: argparse.Namespace) -> Iterable[Any]:
    from hfgolf.data.batches import build_loader

    return build_loader(
        stream,
        sequence_length=arguments.sequence_length,
        micro_batch_size=arguments.micro_batch_size,
        accumulation=1,
        rank=0,
        world=1,
        seed=0,
        num_steps=arguments.batches + 1,
        num_workers=num_workers,
    )


def rate(batches: Iterable[Any]) -> float:
    """Return batches per second. The first batch, which starts the workers and shuffles an epoch, does not count."""
    iterator = iter(batches)
    next(iterator)
    started_at = time.perf_counter()
    number = sum(1 for _ in iterator)
    return number / (time.perf_counter() - started_at)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return {way: batches per second in each repetition}."""
    import numpy as np
    from datasets import Dataset

    from hfgolf.data.token_stream import open_stream, stream_path

    tokens = np.random.default_rng(0).integers(50257, size=(arguments.tokens // PIECE, PIECE), dtype=np.uint16)
    pieces = {"input_ids": list(tokens), "num_bytes": np.full(len(tokens), PIECE, np.uint32)}
    Dataset.from_dict(pieces).save_to_disk(folder / "train", num_shards=1)
    streams = {place: open_stream(stream_path(folder, "train"), is_in_memory=place == "RAM") for place in PLACES}
    rates: dict[str, list[float]] = {}
    for _ in range(arguments.repetitions):
        for place, stream in streams.items():
            rates.setdefault(f"{place}, bare", []).append(rate(bare_batches(stream.tokens, arguments)))
            for workers in WORKERS:
                loader = our_batches(stream, workers, arguments)
                rates.setdefault(f"{place}, {workers} workers", []).append(rate(loader))
    return rates


def show(rates: dict[str, list[float]]) -> None:
    print(f"{'':<24}{'batches/s':>10}{'from':>9}{'to':>9}{'ms/batch':>12}{'of bare':>9}")
    for way, values in rates.items():
        bare = rates[f"{way.split(',')[0]}, bare"]
        share = median(ours / theirs for ours, theirs in zip(values, bare, strict=True))
        middle = median(values)
        print(f"{way:<24}{middle:>10,.0f}{min(values):>9,.0f}{max(values):>9,.0f}{1e3 / middle:>12.3f}{share:>9.2f}")


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--batches", type=int, default=500, help="batches per repetition")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=1024)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        rates = measure(arguments, Path(folder))
    show(rates)
    shape = {name: getattr(arguments, name) for name in ("tokens", "micro_batch_size", "sequence_length")}
    write(arguments.output, ["torch", "numpy"], shape=shape, batches_per_second=rates)


if __name__ == "__main__":
    main()
