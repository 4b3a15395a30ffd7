"""The data order is a pure function of (seed, step), for any reader, and evaluation reads each token once."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hfgolf.config.parse import load_config
from hfgolf.data.batches import (
    IGNORED,
    MicroBatches,
    Segments,
    as_ranges,
    block_starts,
    build_loader,
    device_prefetch,
    evaluation_extent,
    explain_worker,
    gather,
    num_blocks,
    part_starts,
    sample_hash,
    stream_positions,
)
from hfgolf.system.errors import UserError
from hfgolf.train import feed

T = 8


class Stream(SimpleNamespace):
    def __len__(self):
        return len(self.tokens)


@pytest.fixture
def stream():
    """A stream of 67 blocks and a remainder. Token i is i, so a batch shows where it was read."""
    return stream_of(np.array([100, 1, 49, 200, 190], np.uint32))


def stream_of(pieces):
    """Return a stream with pieces of the given numbers of tokens. Token i is i."""
    tokens = np.arange(pieces.sum(), dtype=np.uint16)
    read = functools.partial(tokens.take, mode="wrap")
    return Stream(tokens=tokens, piece_tokens=pieces, piece_bytes=pieces * 3 + 1, is_target=None, read=read)


SHAPE = {"sequence_length": T, "micro_batch_size": 2, "accumulation": 1, "rank": 0, "world": 1, "seed": 0}


def load(stream, *, world=1, accumulation=1, num_workers=0):
    """Return the global batches of five steps, with rows in reading order: (5, 36, T)."""
    shape = SHAPE | {"micro_batch_size": 36 // world // accumulation, "accumulation": accumulation, "world": world}
    shape |= {"num_steps": 5, "num_workers": num_workers}
    ranks = [build_loader(stream, **shape | {"rank": rank}) for rank in range(world)]
    parts = [torch.cat([batch["input_ids"] for batch in batches]) for batches in zip(*ranks, strict=True)]
    return torch.cat(parts).reshape(5, 36, T)


def test_each_epoch_reads_each_block_once_in_a_new_order():
    steps = [block_starts(1, 10 * step + np.arange(10), 67, T) for step in range(67)]  # 10 epochs; steps straddle them
    epochs = np.concatenate(steps).reshape(10, 67)
    assert all(sorted(epoch // T) == list(range(67)) for epoch in epochs)
    assert len({tuple(epoch // T) for epoch in epochs}) == 10
    assert not np.array_equal(block_starts(2, np.arange(10), 67, T), block_starts(1, np.arange(10), 67, T))
    assert block_starts(None, np.arange(12), 5, T).tolist() == [0, 8, 16, 24, 32, 0, 8, 16, 24, 32, 0, 8]  # sequential


def test_each_later_epoch_cuts_the_stream_at_new_offsets():
    offsets = [set(block_starts(1, 67 * epoch + np.arange(67), 67, 1000) % 1000) for epoch in range(20)]
    assert offsets[0] == {0} and all(len(of_epoch) == 1 for of_epoch in offsets)
    assert len(set.union(*offsets)) > 15


def test_last_block_wraps_around_the_stream():
    stream = stream_of(np.array([20]))
    assert gather(stream, np.array([0, 15]), 8).tolist() == [[*range(9)], [15, 16, 17, 18, 19, 0, 1, 2, 3]]
    starts = block_starts(seed=3, positions=np.array([8, 9]), num_blocks=2, sequence_length=8)  # the fifth epoch
    assert sorted(gather(stream, starts, 8)[:, 1:].flatten().tolist()) == sorted((min(starts) + 1 + np.arange(16)) % 20)


def test_order_never_changes_between_versions():
    starts = block_starts(1337, 18 + np.arange(6), 20, T)
    assert starts.tolist() == block_starts(1337, np.arange(24), 20, T)[18:].tolist() == [0, 8, 156, 68, 132, 148]
    assert sample_hash(np.array([0, 8, 16])) == -7048235507364828473


def test_block_needs_one_more_token_than_its_inputs():
    assert [num_blocks(num_tokens, T) for num_tokens in (9, 16, 17, 24, 25)] == [1, 1, 2, 2, 3]
    with pytest.raises(UserError, match=r"8 tokens.*sequence_length 4 or less"):
        num_blocks(T, T)
    with pytest.raises(UserError, match=r"3 tokens.*sequence_length 2 or less"):
        num_blocks(3, T)
    with pytest.raises(UserError, match=r"2 tokens.*and the one after; add text\.$"):
        num_blocks(2, T)


def test_excluded_blocks_are_skipped_and_all_others_read_once_in_order():
    excluded = [[3, 5], [5, 6], [9, 11]]
    assert stream_positions(0, 8, excluded).tolist() == [0, 1, 2, 6, 7, 8, 11, 12]
    assert stream_positions(4, 3, excluded).tolist() == [7, 8, 11]
    assert as_ranges(stream_positions(0, 8, excluded)) == [[0, 3], [6, 9], [11, 13]]
    assert as_ranges(np.array([], np.int64)) == []


SEGMENTED = Segments(length=2, blocks=100)  # the first epoch of 67 blocks, and 33 of the second


def test_segments_of_an_epoch_are_drawn_from_all_of_it_none_twice():
    for epoch, num_segmented in ((0, 67), (1, 33)):
        first = 67 * epoch
        starts, length = part_starts(1, first + np.arange(num_segmented), 67, T, SEGMENTED)
        offset = block_starts(1, first + np.arange(67), 67, T).min()
        numbers, remainders = np.divmod(starts - offset, 2)
        assert length == 2 and not remainders.any() and len({*numbers}) == len(numbers) == 4 * num_segmented
        assert numbers.min() >= 0 and numbers.max() < 4 * 67
        assert len({*(numbers // 4)}) > 0.7 * 67, "segments of few blocks"
        assert (np.diff(numbers) == 1).sum() < 6, "text as it lies"


def test_blocks_after_the_segmented_ones_are_those_of_an_order_without_segments():
    positions = np.arange(100, 300)
    starts = part_starts(1, positions, 67, T, SEGMENTED)[0]
    assert (starts.reshape(200, 4) == block_starts(1, positions, 67, T)[:, None] + [0, 2, 4, 6]).all()
    for read in (positions[:0], np.arange(100, 101)):
        assert part_starts(1, read, 67, T, None)[0].tolist() == block_starts(1, read, 67, T).tolist()


def test_order_of_segments_never_changes_between_versions_and_does_not_depend_on_how_it_is_read():
    starts = part_starts(1337, np.arange(120), 67, T, SEGMENTED)[0].reshape(120, 4)
    singly = [part_starts(1337, np.array([position]), 67, T, SEGMENTED)[0].tolist() for position in range(120)]
    assert starts.tolist() == singly
    expected = [[338, 366, 260, 238], [437, 183, 235, 531], [37, 273, 415, 403], [237, 239, 241, 243]]
    assert starts[[66, 67, 99, 100]].tolist() == expected


def test_segmented_sequences_join_segments_with_their_targets(stream):
    stream.is_target = (stream.tokens % 3 == 0).astype(np.uint8)
    positions = np.array([5, 99, 100])
    dataset = MicroBatches(stream, T, 7, SEGMENTED)
    batch = dataset[positions]
    starts = part_starts(7, positions, 67, T, SEGMENTED)[0].reshape(3, 4)
    inputs = (starts[:, :, None] + [0, 1]).reshape(3, T) % len(stream)
    targets = (inputs + 1) % len(stream)
    assert batch["input_ids"].tolist() == inputs.tolist()
    assert batch["shift_labels"].tolist() == np.where(targets % 3 == 0, targets, IGNORED).tolist()
    assert batch["sample_hash"] == sample_hash(starts.ravel())
    assert dataset.num_targets(positions) == (targets % 3 == 0).sum()
    assert {batch[name].stride() for name in ("input_ids", "shift_labels")} == {(T, 1)}


def test_all_blocks_are_segmented_without_a_limit(stream):
    for_ever, for_long = (MicroBatches(stream, T, 7, Segments(4, blocks)) for blocks in (None, 10**9))
    for positions in (np.arange(9), 10**6 + np.arange(9)):
        assert torch.equal(for_ever[positions]["input_ids"], for_long[positions]["input_ids"])
        assert (for_ever[positions]["input_ids"].diff() != 1).any(1).sum() >= 7


def test_loader_continues_after_the_last_block_read_with_another_batch_size(stream):
    """Two steps of 36 blocks, then steps of 12: no block is read twice or skipped."""
    shape = SHAPE | {"micro_batch_size": 6, "accumulation": 2, "seed": 7}
    small = build_loader(stream, **shape, num_steps=6, blocks_read=72, excluded=[[80, 83]])
    read = torch.cat([batch["input_ids"] for batch in small])
    starts = block_starts(7, np.array([*range(72, 80), *range(83, 147)]), num_blocks(len(stream.tokens), T), T)
    assert torch.equal(read, gather(stream, starts, T)[:, :-1])


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_targets_are_the_inputs_one_token_ahead(stream, micro_batch_size):
    for batch in build_loader(stream, **SHAPE | {"micro_batch_size": micro_batch_size}, num_steps=40):
        for name in ("input_ids", "shift_labels"):
            assert batch[name].shape == (micro_batch_size, T) and batch[name].dtype == torch.int64
            assert batch[name].stride() == (T, 1), "torch would recompile the model"
        assert torch.equal(batch["shift_labels"], (batch["input_ids"] + 1) % len(stream.tokens))  # token i is i


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_mean_over_micro_batches_is_the_mean_over_the_targets_of_a_step(world, accumulation):
    """Also if only the last half of a step has targets (1), or only its first block (2), or none (0 and 3)."""
    stream = stream_of(np.array([1000]))
    stream.is_target = ((stream.tokens % 3 == 0) & (stream.tokens > 288) & (stream.tokens <= 392)).astype(np.uint8)
    options = {"sequence_length": T, "micro_batch_size": 24 // world // accumulation, "accumulation": accumulation}
    loaders = [build_loader(stream, **options, rank=rank, world=world, seed=None, num_steps=4) for rank in range(world)]
    batches = [batch for of_ranks in zip(*loaders, strict=True) for batch in of_ranks]
    for step, num_targets in enumerate([0, 32, 2, 0]):
        of_step = batches[step * world * accumulation : (step + 1) * world * accumulation]
        targets = np.arange(step * 24 * T + 1, (step + 1) * 24 * T + 1)
        targets = targets[stream.is_target[targets] == 1]
        assert len(targets) == num_targets
        labels = torch.cat([batch["shift_labels"].flatten() for batch in of_step])
        assert labels[labels != IGNORED].tolist() == targets.tolist()
        sums = [batch["shift_labels"].clamp(min=0).sum() / batch["num_items_in_batch"] for batch in of_step]
        assert np.mean(sums) == pytest.approx(targets.mean() if len(targets) else 0, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_global_batches_do_not_depend_on_processes_or_accumulation(stream, world, accumulation):
    assert torch.equal(load(stream, world=world, accumulation=accumulation), load(stream))


def test_workers_give_the_same_batches(stream):
    assert torch.equal(load(stream, accumulation=2, num_workers=2), load(stream))


_END_WITHOUT_CLOSING = """
import numpy as np
from hfgolf.data.batches import build_loader
tokens = np.arange(1000, dtype=np.uint16)
class Stream:
    read, is_target = tokens.take, None
    def __len__(self):
        return len(tokens)
stream = Stream()
shape = dict(sequence_length=8, micro_batch_size=2, accumulation=1, rank=0, world=1, seed=0, num_steps=50)
batches = iter(build_loader(stream, num_workers=2, **shape))
next(batches)
raise ValueError("a mistake in a step")
"""


@pytest.mark.distributed
def test_workers_do_not_keep_a_failed_process_alive():
    command = [sys.executable, "-c", _END_WITHOUT_CLOSING]
    process = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "ValueError: a mistake in a step"


def test_prefetch_preserves_order_and_count(stream):
    plain = [batch["input_ids"].tolist() for batch in build_loader(stream, **SHAPE, num_steps=5)]
    loader = build_loader(stream, **SHAPE, num_steps=5)
    assert [batch["input_ids"].tolist() for batch in device_prefetch(loader, "cpu")] == plain
    moved = list(device_prefetch(loader, "meta"))  # uses the accelerator's path
    assert len(moved) == 5 and all(batch["input_ids"].device.type == "meta" for batch in moved)
    assert list(device_prefetch([], "meta")) == []


def batches_that_tell(made, count=5):
    """Yield batches; made[i] is set once batch i is there."""
    for i in range(count):
        made[i].set()
        yield {"input_ids": torch.full((2,), i)}


def test_a_thread_makes_the_next_batches_of_an_accelerator():
    made = [threading.Event() for _ in range(5)]
    batches = device_prefetch(batches_that_tell(made), "meta")
    next(batches)
    assert made[2].wait(10), "it waits until it is asked"
    assert not made[4].is_set()
    del batches
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_an_error_in_the_thread_is_raised_at_its_batch():
    def fail():
        yield {"input_ids": torch.zeros(1)}
        yield {"input_ids": torch.zeros(1)}
        raise UserError("the stream is damaged")

    batches = device_prefetch(fail(), "meta")
    next(batches)
    with pytest.raises(UserError, match="the stream is damaged"):
        next(batches)


def test_a_cpu_reads_without_a_thread_because_it_has_no_time_to_spare():
    made = [threading.Event() for _ in range(5)]
    next(device_prefetch(batches_that_tell(made), "cpu"))
    assert not made[1].is_set()


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_batches_for_a_gpu_are_pinned_and_copied_without_waiting(stream, monkeypatch, device, is_pinned):
    loader = build_loader(stream, **SHAPE, num_steps=2, device=device)
    assert loader.pin_memory is is_pinned
    waits = []

    class Pinned:
        def to(self, device, non_blocking=False):
            waits.append(not non_blocking)
            return self

    list(device_prefetch([{"input_ids": Pinned()}], device))
    assert waits == ([False] if is_pinned else [])


def test_run_passes_its_device_and_workers_to_the_loader(tiny_run, monkeypatch):
    options = {"data__num_workers": 2}
    asked = {}
    monkeypatch.setattr(feed, "build_loader", lambda *_, **settings: asked.update(settings) or [])
    monkeypatch.setattr(feed, "device_prefetch", lambda loader, device: loader)
    state = SimpleNamespace(step=0, blocks=0, excluded_blocks=())
    run = SimpleNamespace(tokens=SimpleNamespace(train=None), state=state, step_limit=6)
    run.config, run.micro_batch_size, run.accumulation_steps = load_config(tiny_run(**options)).config, 8, 1
    run.accelerator = SimpleNamespace(device=torch.device("cuda"), process_index=0, num_processes=1)
    feed.start_batches(run)
    assert asked["device"] == torch.device("cuda") and asked["num_workers"] == 2


def test_workers_survive_epoch_boundaries(stream):
    others = set(multiprocessing.active_children())  # of earlier tests
    batches = iter(build_loader(stream, **SHAPE, num_steps=200, num_workers=1))  # six epochs
    next(batches)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 1 and sum(1 for _ in batches) == 199
    assert not set(multiprocessing.active_children()) - others - workers


@pytest.mark.slow
def test_killed_worker_is_one_line(stream):
    loader = build_loader(stream, **SHAPE, num_steps=10**6, num_workers=1)
    loader.timeout = 5
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise torch's handler may raise in the next test
    worker.kill()
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as raised:
        for _ in batches:
            pass
    error = explain_worker(raised.value)
    del raised, batches
    signal.signal(signal.SIGCHLD, handler)
    assert isinstance(error, UserError) and "\n" not in str(error)
    assert "Set data.num_workers 0" in str(error) and "shm" in str(error)


def test_waiting_for_a_stuck_worker_is_bounded(stream):
    loader = build_loader(stream, **SHAPE, num_steps=5, num_workers=1)
    assert 60 <= loader.timeout <= 300
    loader.timeout = 0.1
    stream.read = lambda indices: time.sleep(0.3)
    batches = iter(loader)
    with pytest.raises(RuntimeError) as raised:
        next(batches)
    assert "timed out after 0.1 seconds" in str(explain_worker(raised.value))
    del raised, batches  # ends the worker now, not in a later test


def test_other_errors_are_not_translated():
    for error in (RuntimeError("CUDA error"), ValueError("DataLoader"), UserError("one line"), KeyboardInterrupt()):
        assert explain_worker(error) is error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_prefetch_to_a_gpu(stream):
    loader = build_loader(stream, **SHAPE, num_steps=50, device="cuda")
    for there, here in zip(device_prefetch(loader, "cuda"), loader, strict=True):
        assert there["input_ids"].is_cuda and torch.equal(there["input_ids"].cpu(), here["input_ids"])


def test_evaluation_covers_whole_pieces_within_the_budget(stream):
    extents = {budget: evaluation_extent(stream, budget) for budget in (1, 99, 100, 149, 348, 349, 539, None)}
    pieces = {1: 1, 99: 1, 100: 2, 149: 3, 348: 3, 349: 4, 539: 5, None: 5}
    num_tokens, num_bytes = np.cumsum(stream.piece_tokens), np.cumsum(stream.piece_bytes)
    assert extents == {budget: (num_tokens[n - 1] - 1, num_bytes[n - 1]) for budget, n in pieces.items()}
