"""Predict the speed of a run on any number of GPUs: what the passes, the network, the optimizer and the loader take.

Owns the model of a step's time. Knows no GPU but what it is told; only the loader's speed is measured, on this CPU.

P parameters, N processes (one per GPU), B bandwidth. A ring sends 2 (N - 1) / N of its bytes from each process for an
all-reduce, and (N - 1) / N for an all-gather, at the bandwidth of its slowest link ("bus bandwidth" in
nccl-tests/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hfgolf.config import RunConfig
from hfgolf.data.batches import Batch, build_loader
from hfgolf.data.token_stream import open_stream, stream_path
from hfgolf.optim.groups import parameter_groups
from hfgolf.optim.layout import layout
from hfgolf.optim.matrices import bucket_by_shape, matrix_views
from hfgolf.optim.muon import DEFAULT_MAX_BUCKET_ELEMENTS
from hfgolf.optim.orthogonalize import orthogonalize
from hfgolf.tools.plan import Machine, Plan
from hfgolf.tools.roofline import ADAMW_BYTES
from hfgolf.train.setup import bucket_megabytes
from hfgolf.wording import join_words

# Bytes per fp32 parameter that an update reads and writes, each tensor once per operation: norm 4, clipping 8; Muon's
# momentum 12, weight decay 8, widening the 16-bit update 6, adding it 12; SGD's momentum and step 20.
CLIP_BYTES = 12
RULE_BYTES = {"muon": 38, "adamw": ADAMW_BYTES, "sgd": 20}
# On the rank that orthogonalizes it: Nesterov's interpolation 12, narrowing it 6, dividing it by its norm 6.
OWN_BYTES = 24
BINDS = 0.1  # a part that takes more than this share of a step is named
LOADER_TOKENS = 50_000_000  # more than the caches of a CPU hold
LOADER_REPEATS, LOADER_SECONDS = 5, 0.2


@dataclass(frozen=True)
class Cluster:
    """What is assumed of the machines. Bandwidths are bytes per second, in one direction."""

    mfu: float
    """The share of the peak that passes and Newton-Schulz reach."""
    newton_schulz_flops: float
    """A GPU's peak in the dtype of Newton-Schulz, FLOP/s."""
    update_bytes: int
    """Bytes per element of that dtype."""
    gpus_per_machine: int
    link_bandwidth: float
    """From one GPU to the others of its machine."""
    network_bandwidth: float
    """From one machine to the others."""
    memory_bandwidth: float
    """Of a GPU's memory."""
    loader_tokens_per_second: float
    """Of one process."""

    def bandwidth(self, gpus: int) -> float:
        """Return that of the slowest link between so many GPUs."""
        if gpus <= self.gpus_per_machine:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.network_bandwidth)


@dataclass(frozen=True)
class Update:
    """What the optimizer does in a step. Bytes and FLOPs are of one GPU."""

    flops: float
    """Newton-Schulz of this rank's share of the matrices."""
    memory_bytes: float
    gathered_bytes: float
    """The updates of all ranks together, with the padding that makes the shares equal."""


@dataclass(frozen=True)
class Scale:
    """A step on a number of GPUs. Seconds and bytes are of one GPU."""

    gpus: int
    micro_batch_size: int
    accumulation_steps: int
    fits: bool
    is_sharded: bool
    """By FSDP2; its gathers of weights are not counted."""
    tokens_per_step: int
    pass_seconds: float
    """All passes, forward and backward."""
    gradient_seconds: float
    """Waiting for the gradients after the last backward pass."""
    gather_seconds: float
    """Muon's gather of its updates, behind which nothing runs."""
    optimizer_seconds: float
    """The optimizer without that."""
    loader_seconds: float
    """The loader, which runs while the GPU computes, and so is not part of the step unless it takes longer."""
    sent_bytes: float
    hiding_bandwidth: float
    """The bandwidth at which all gradients take as long as the backward pass of the last micro-batch; 0 for one GPU."""

    @property
    def network_seconds(self) -> float:
        return self.gradient_seconds + self.gather_seconds

    @property
    def step_seconds(self) -> float:
        return max(self.pass_seconds + self.network_seconds + self.optimizer_seconds, self.loader_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def shares(self) -> dict[str, float]:
        """The share of a step that each part takes."""
        parts = {"passes": self.pass_seconds, "network": self.network_seconds, "optimizer": self.optimizer_seconds}
        return {name: part / self.step_seconds for name, part in (parts | {"loader": self.loader_seconds}).items()}


def scale(config: RunConfig, model: PreTrainedModel, plan: Plan, machine: Machine, cluster: Cluster) -> Scale:
    """Predict a step on machine.processes GPUs. plan: of the same config, model and machine.

    Gradients are fp32. DDP reduces them in buckets while the last micro-batch's backward pass runs. The head's are
    computed with the loss, in the forward pass. Not counted: latency, small products that reach less of the peak,
    evaluations, saves.
    """
    gpus, flops = machine.processes, plan.flops
    peak = cluster.mfu * machine.peak_flops / gpus
    tokens = config.batch.tokens_per_step // gpus
    recomputed = flops.recomputation if config.model.gradient_checkpointing else 0.0
    backward = 2 / 3 * (flops.matrices + flops.attention) + recomputed
    backward_seconds = tokens / plan.accumulation_steps * backward / peak

    bandwidth, ring = cluster.bandwidth(gpus), (gpus - 1) / gpus
    buckets = gradient_buckets(model)
    sent = [2 * ring * num_bytes for num_bytes, _ in buckets]
    waiting = exposed_seconds([one / bandwidth for one in sent], [done * backward_seconds for _, done in buckets])
    update = optimizer_work(config, model, gpus, cluster.update_bytes)
    gathered = ring * update.gathered_bytes
    return Scale(
        gpus=gpus,
        micro_batch_size=plan.micro_batch_size,
        accumulation_steps=plan.accumulation_steps,
        fits=plan.fits,
        is_sharded=machine.is_sharded,
        tokens_per_step=config.batch.tokens_per_step,
        pass_seconds=tokens * (flops.useful + recomputed) / peak,
        gradient_seconds=waiting,
        gather_seconds=gathered / bandwidth,
        optimizer_seconds=update.flops / (cluster.mfu * cluster.newton_schulz_flops)
        + update.memory_bytes / cluster.memory_bandwidth,
        loader_seconds=tokens / cluster.loader_tokens_per_second,
        sent_bytes=sum(sent) + gathered,
        hiding_bandwidth=sum(sent) / backward_seconds,
    )


def gradient_buckets(model: PreTrainedModel) -> list[tuple[int, float]]:
    """Return DDP's buckets in the order in which it reduces them: (bytes, share of the backward pass until then).

    A bucket is closed once it reaches its size. The parameters come in reverse order, and the input embedding last: its
    gradient is complete only at the end. Without it and the head, the share is that of the parameters.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    last = embedding.weight
    ordered = [*(parameter for parameter in reversed(list(model.parameters())) if parameter is not last), last]
    is_idle = {id(last), *([] if head is None else [id(head.weight)])}
    in_pass = [0 if id(parameter) in is_idle else parameter.numel() for parameter in ordered]
    buckets, open_bytes, done = [], 0, 0
    for parameter, work in zip(ordered, in_pass, strict=True):
        open_bytes, done = open_bytes + 4 * parameter.numel(), done + work
        if open_bytes >= 2**20 * bucket_megabytes(model) or parameter is last:
            buckets.append((open_bytes, 1.0 if parameter is last else done / sum(in_pass)))
            open_bytes = 0
    return buckets


def exposed_seconds(exchanges: Sequence[float], ready_at: Sequence[float]) -> float:
    """Return how long the exchange of buckets goes on after the last is ready; each waits for the one before it."""
    ends_at = 0.0
    for seconds, start in zip(exchanges, ready_at, strict=True):
        ends_at = max(ends_at, start) + seconds
    return ends_at - ready_at[-1]


def optimizer_work(config: RunConfig, model: PreTrainedModel, gpus: int, update_bytes: int) -> Update:
    """Count what one update takes on each of so many GPUs, as Muon divides it. model: on the meta device.

    update_bytes: per element of an update as Newton-Schulz leaves it. Options of Muon that are off by default (NorMuon,
    row equilibration, cautious decay, muon_every_steps) are not counted.
    """
    optim, flops, own_bytes, gathered, num_bytes = config.optim, 0, 0.0, 0, 0.0
    for group in parameter_groups(model.named_parameters(), optim, **layout(model)):
        params = [parameter for _, parameter in group["params"]]
        num_bytes += sum(parameter.numel() for parameter in params) * (CLIP_BYTES + RULE_BYTES[group["rule"]])
        if group["rule"] != "muon":
            continue
        views = matrix_views(params, group["splits"], group["in_out"])
        for bucket in bucket_by_shape(tuple((v.shape, v.device) for v in views), DEFAULT_MAX_BUCKET_ELEMENTS, gpus):
            matrix, share = views[bucket[0]], math.ceil(len(bucket) / gpus)
            with FlopCounterMode(display=False) as counter:
                steps, coefficients = optim.newton_schulz_steps, optim.newton_schulz_coefficients
                orthogonalize(matrix.new_empty(share, *matrix.shape), steps, coefficients)
            flops += counter.get_total_flops()
            own_bytes += OWN_BYTES * share * matrix.numel()
            gathered += update_bytes * share * gpus * matrix.numel() if share < len(bucket) else 0
    return Update(flops=flops, memory_bytes=num_bytes + own_bytes, gathered_bytes=gathered)


def measured_loader(config: RunConfig, vocabulary: int, micro_batch_size: int) -> float:
    """Measure the tokens per second of one process's loader on one core of this CPU.

    Its tokens are random, in a memory map in the page cache. The median of LOADER_REPEATS."""
    from datasets import Dataset

    tokens = np.random.default_rng(0).integers(min(vocabulary, 2**16), size=LOADER_TOKENS, dtype=np.uint16)
    length = config.batch.sequence_length
    with tempfile.TemporaryDirectory() as folder:
        row = {"input_ids": [tokens], "num_bytes": np.array([len(tokens)], np.uint32)}
        Dataset.from_dict(row).save_to_disk(Path(folder) / "train", num_shards=1)
        path = stream_path(Path(folder), "train")
        batches = iter(
            build_loader(
                open_stream(path),
                sequence_length=length,
                micro_batch_size=micro_batch_size,
                accumulation=1,
                rank=0,
                world=1,
                seed=0,
                num_steps=10**9,
                num_workers=config.data.num_workers,
                prefetch_factor=config.data.prefetch_factor,
            )
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the processes of a machine share its cores
        try:
            next(batches)  # starts the workers and shuffles an epoch
            rates = [_batches_per_second(batches) for _ in range(LOADER_REPEATS)]
        finally:
            torch.set_num_threads(threads)
    return median(rates) * micro_batch_size * length


def _batches_per_second(batches: Iterator[Batch]) -> float:
    started_at, number = time.perf_counter(), 0
    while time.perf_counter() - started_at < LOADER_SECONDS:
        next(batches)
        number += 1
    return number / (time.perf_counter() - started_at)


def as_numbers(scales: Sequence[Scale]) -> list[dict[str, Any]]:
    """Return the rows of a table with what follows from them, for JSON."""
    return [
        asdict(one)
        | {"step_seconds": one.step_seconds, "tokens_per_second": one.tokens_per_second, "shares": one.shares}
        for one in scales
    ]


def table_of(scales: Sequence[Scale]) -> list[str]:
    """Return the lines of a table, one row per number of GPUs."""
    speed, parts = ("GPUs", "micro-batch", "tokens/s", "of linear", "ms/step"), tuple(scales[0].shares)
    rows: list[tuple[str, ...]] = [(*speed, *parts, "MB sent", "GB/s to hide")]
    for one in scales:
        of_linear = one.tokens_per_second / one.gpus / (scales[0].tokens_per_second / scales[0].gpus)
        rows.append(
            (
                str(one.gpus),
                f"{one.micro_batch_size} x {one.accumulation_steps}{_remark(one)}",
                f"{one.tokens_per_second:,.0f}",
                f"{of_linear:.0%}",
                f"{1e3 * one.step_seconds:,.1f}",
                *(f"{share:.1%}" for share in one.shares.values()),
                f"{one.sent_bytes / 1e6:,.0f}",
                f"{one.hiding_bandwidth / 1e9:,.1f}",
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _remark(one: Scale) -> str:
    if not one.fits:
        return ": does not fit"
    return ", FSDP2" if one.is_sharded else ""


def assumptions(model: PreTrainedModel, plan: Plan, machine: Machine, cluster: Cluster) -> list[str]:
    """Return the lines that say what a table rests on."""
    peak, last_bucket = machine.peak_flops / machine.processes / 1e12, gradient_buckets(model)[-1][0]
    gigabytes = (cluster.link_bandwidth, cluster.network_bandwidth, cluster.memory_bandwidth)
    link, network, memory = (f"{value / 1e9:,g} GB/s" for value in gigabytes)
    return [
        "predicted, not measured:",
        f"  passes at {cluster.mfu:.0%} of the peak of {machine.name}, {peak:,.4g} TFLOP/s; Newton-Schulz at as much of"
        f" {cluster.newton_schulz_flops / 1e12:,.4g}; memory at {memory}",
        f"  between {cluster.gpus_per_machine} GPUs of a machine {link} each, between machines {network}",
        f"  gradients: {4 * sum(plan.parameters.values()) / 1e6:,.0f} MB, hidden behind the last backward pass except"
        f" the last bucket of DDP, {last_bucket / 1e6:,.0f} MB; nothing hides Muon's gather",
        "  not counted: latency, smaller products that reach less of the peak, evaluations, saves",
        f"measured: the loader of one process on one core of this CPU, {cluster.loader_tokens_per_second:,.0f}"
        " tokens/s; it runs beside the step",
    ]


def about_fsdp2(scales: Sequence[Scale]) -> list[str]:
    """Return the line on rows that fit only in shards, if there are any."""
    if not any(one.is_sharded and one.fits for one in scales):
        return []
    return [
        "FSDP2: too large for a full copy on each GPU; start with configs/accelerate/fsdp2.yaml. Its gathers of"
        " weights are not counted"
    ]


def what_binds(scales: Sequence[Scale]) -> str:
    """Say from how many GPUs on each part but the passes takes more than BINDS of a step."""
    said = []
    for part in ("network", "optimizer", "loader"):
        over = [str(one.gpus) for one in scales if one.shares[part] > BINDS]
        said.append(f"{part} on {join_words(over)} GPUs" if over else f"{part} never")
    return f"over {BINDS:.0%} of a step: {'; '.join(said)}"
