"""Measure the roofline of this machine: python benchmarks/roofline.py --config configs/small.yaml

Measures how fast the device computes (large matrix products in bf16 and fp32) and moves data (arrays larger than the
caches), each main operation of a training step alone, and the whole step. Writes roofline.png and roofline.json and
prints a table. Run it on an idle machine: other load lowers the ceilings.

The FLOPs and bytes of an operation follow from its shapes; both ceilings are measured (Williams, Waterman and Patterson
2009, Roofline, CACM 52:4). Shapes: N = B * T tokens of a micro-batch, H heads, K key-value heads, D head size,
C channels, I of the MLP, V vocabulary, L layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from transformers.integrations.sdpa_attention import repeat_kv

from hfgolf import palette
from hfgolf.commands.options import ScriptParser, check_output
from hfgolf.commands.profile_step import timed_steps
from hfgolf.commands.scratch import scratch_run
from hfgolf.config.parse import load_config
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.model.causal_blocks import NAME as CAUSAL_BLOCKS
from hfgolf.model.causal_blocks import causal_blocks
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.run.provenance import run_metadata
from hfgolf.system.command import run_command
from hfgolf.system.durable import write_text
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import (
    accelerator_name,
    fast_product_dtype,
    free_memory_bytes,
    measured_peak_flops,
)
from hfgolf.train.console import show_log

DEFAULT = Path(__file__).parents[1] / "configs" / "small.yaml"
MARKERS = "os^Dvhpd"
STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Per parameter of an AdamW update. FLOPs: decay 1, first moment 3, second moment 4, root, correction and epsilon 3,
# step 3. Bytes in fp32: read weight, gradient and both moments; write all except the gradient.
ADAMW_FLOPS, ADAMW_BYTES = 14, 28
NORM_FLOPS = 4  # per element: square, add, multiply by the inverse root, multiply by the weight
PRODUCT_SIZES = {"cpu": (512, 1024, 2048)}
PRODUCT_SIZES_ELSEWHERE = (4096, 8192)
MAX_STREAM_ELEMENTS = 2**26  # three fp32 arrays of 256 MiB each: larger than any cache
MIN_SECONDS = 0.3  # each operation is repeated for at least this long


def main() -> None:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE (configs/small.yaml) --section.key value.\n"
        "The step is not compiled unless you set train.compile.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/roofline"), help="folder to write to (runs/roofline)")
    arguments, run_options = parser.parse_known_args()
    if not any(option.split("=")[0] == "--config" for option in run_options):
        run_options = ["--config", str(DEFAULT), *run_options]
    resolved = load_config(run_options)
    if "train.compile" not in resolved.sources:
        resolved = resolved.resolve("roofline", train__compile=False)

    show_log(True)
    folder = arguments.output
    check_output("--output", folder, besides=[folder / "roofline.json", folder / "roofline.png"])
    with scratch_run(resolved, "roofline") as run:
        if run.accelerator.num_processes > 1:
            raise UserError("roofline.py measures one device; start it with python, not accelerate launch.")
        device, config = run.accelerator.device, run.config
        precision = "fp32" if config.train.mixed_precision == "no" else str(config.train.mixed_precision)
        step_seconds = min(timed_steps(run, STEPS))
        flops = training_flops_per_token(run.raw_model, config.batch.sequence_length) * config.batch.tokens_per_step
        shape = (run.golf_model.config, run.micro_batch_size, config.batch.sequence_length)
    roofline = measure_roofline(device)
    rows = [place(operation, roofline) for operation in step_operations(*shape, precision, device)]
    step = {"precision": precision, "flops": flops, "seconds": step_seconds, "flops_per_second": flops / step_seconds}
    record = {
        "peak_flops": roofline.peak_flops,
        "bytes_per_second": roofline.bytes_per_second,
        "operations": rows,
        "step": step,
        "threads": torch.get_num_threads(),
        "metadata": run_metadata(run.resolved),
    }
    write_text(folder / "roofline.json", json.dumps(record, indent=1))
    draw(roofline, rows, step, f"{config.run.name} on {accelerator_name()}", folder / "roofline.png")
    print(f"\n{table(roofline, rows, step)}\nwrote {folder / 'roofline.png'} and {folder / 'roofline.json'}")


def table(roofline: Roofline, rows: Sequence[dict[str, Any]], step: dict[str, Any]) -> str:
    """Return the ceilings and one row per operation: what it reaches of what is attainable."""
    peaks = ", ".join(f"{name} {flops / 1e9:,.0f} GFLOP/s" for name, flops in roofline.peak_flops.items())
    lines = [
        f"ceilings: {peaks}; {roofline.bytes_per_second / 1e9:,.1f} GB/s",
        f"{'operation':<24}{'precision':<11}{'FLOP/byte':>10}{'GFLOP/s':>10}{'of':>10}{'reached':>9}  bound by",
    ]
    for row in rows:
        gigaflops, attainable = row["flops_per_second"] / 1e9, row["attainable_flops_per_second"] / 1e9
        lines.append(
            f"{row['operation']:<24}{row['precision']:<11}{row['intensity']:>10,.1f}{gigaflops:>10,.1f}{attainable:>10,.1f}"
            f"{row['reached']:>9.0%}  {row['bound_by']}"
        )
    gigaflops, peak = step["flops_per_second"] / 1e9, roofline.peak_flops[step["precision"]] / 1e9
    lines.append(
        f"{'the step':<24}{step['precision']:<11}{'':>10}{gigaflops:>10,.1f}{peak:>10,.1f}{gigaflops / peak:>9.0%}"
    )
    if any(row["reached"] > 1 for row in rows):
        lines.append(
            "above 100 %: the operands stay in the caches, which they may not in a real step, or the machine multiplies"
            " this shape faster than the square matrices that measured the ceiling"
        )
    return "\n".join(lines)


@palette.style()
def draw(roofline: Roofline, rows: Sequence[dict[str, Any]], step: dict[str, Any], title: str, path: Path) -> None:
    """Write the picture: logarithmic axes, one roof per precision, one point per operation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    ridges = [peak / roofline.bytes_per_second for peak in roofline.peak_flops.values()]
    left = min([row["intensity"] for row in rows]) / 3
    right = max([*ridges, *(row["intensity"] for row in rows)]) * 3
    for (name, peak), ridge, style in zip(roofline.peak_flops.items(), ridges, ("-", "--", ":"), strict=False):
        floor = left * roofline.bytes_per_second
        label = f"{name}: {peak / 1e9:,.0f} GFLOP/s"
        axes.plot([left, ridge, right], [floor, peak, peak], style, color=palette.INK, linewidth=1.5, label=label)
    axes.plot([], [], " ", label=f"memory: {roofline.bytes_per_second / 1e9:,.1f} GB/s")
    share = step["flops_per_second"] / roofline.peak_flops[step["precision"]]
    axes.axhline(
        step["flops_per_second"],
        color=palette.GREY,
        linestyle="-.",
        label=f"the whole step: {step['flops_per_second'] / 1e9:,.0f} GFLOP/s, {share:.0%} of {step['precision']}",
    )
    for row, color, marker in zip(rows, palette.LINES, MARKERS, strict=True):
        label = f"{row['operation']} ({row['precision']}): {row['reached']:.0%} of its roof"
        point = row["intensity"], row["flops_per_second"]
        # hollow markers, because the products often overlap
        axes.plot(*point, marker, color=color, markersize=10, markerfacecolor="none", markeredgewidth=2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    figure.legend(loc="outside right upper", fontsize="small")
    palette.save(figure, path)


@dataclass(frozen=True)
class Operation:
    """The FLOPs of an operation, and the bytes it must move between memory and processor: operands and result once."""

    name: str
    precision: str
    flops: float
    num_bytes: float
    run: Callable[[], object]
    """Runs the operation on the device of its operands."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class Roofline:
    """The measured limits of a device."""

    peak_flops: dict[str, float]
    """{precision: FLOP/s of a large matrix product}."""
    bytes_per_second: float
    """Memory bandwidth, measured with arrays larger than the caches."""

    def attainable_flops(self, intensity: float, precision: str) -> float:
        """Return the maximal FLOP/s at an intensity (FLOPs per byte), if the operands are not in a cache."""
        return min(self.peak_flops[precision], intensity * self.bytes_per_second)


def measure_roofline(device: torch.device) -> Roofline:
    """Measure both ceilings of a device with all of torch's threads; takes a few seconds."""
    names = ("bf16", "fp16", "fp32") if device.type == "cuda" else ("bf16", "fp32")
    sizes = PRODUCT_SIZES.get(device.type, PRODUCT_SIZES_ELSEWHERE)
    peaks = {name: max(measured_peak_flops(device, DTYPES[name], size) for size in sizes) for name in names}
    return Roofline(peaks, measured_bandwidth(device))


def measured_bandwidth(device: torch.device, num_elements: int | None = None) -> float:
    """Return the bytes/s of the fastest of several triads a = b + s c (McCalpin's STREAM): 12 bytes per fp32 element.

    A CPU that reads a before overwriting it moves 16 bytes; as in STREAM, these extra bytes do not count.
    """
    num_elements = num_elements or min(MAX_STREAM_ELEMENTS, free_memory_bytes(device) // 64)
    a, b, c = (torch.zeros(num_elements, device=device) for _ in range(3))
    return 12 * num_elements / best_seconds(lambda: torch.add(b, c, alpha=3.0, out=a))


def best_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest call, of several over at least MIN_SECONDS; waits for a GPU."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    timer.timeit(2)  # warms up
    return min(timer.blocked_autorange(min_run_time=MIN_SECONDS).times)


def place(operation: Operation, roofline: Roofline) -> dict[str, Any]:
    """Measure an operation alone; return what it reaches and what is attainable."""
    seconds = best_seconds(operation.run)
    attainable = roofline.attainable_flops(operation.intensity, operation.precision)
    return {
        "operation": operation.name,
        "precision": operation.precision,
        "flops": operation.flops,
        "bytes": operation.num_bytes,
        "intensity": operation.intensity,
        "seconds": seconds,
        "flops_per_second": operation.flops / seconds,
        "attainable_flops_per_second": attainable,
        "reached": operation.flops / seconds / attainable,
        "bound_by": "compute" if attainable == roofline.peak_flops[operation.precision] else "memory",
    }


def step_operations(
    config: GolfConfig, batch: int, sequence: int, precision: str, device: torch.device
) -> list[Operation]:
    """Return the main operations of a step, of the forward pass and of the optimizer, with operands of their shapes.

    batch, sequence: of a micro-batch. precision: bf16, fp16 or fp32, of what autocast casts.
    """
    dtype = DTYPES[precision]
    tokens, width, inner = batch * sequence, config.hidden_size, config.intermediate_size
    projected = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim

    def product(name: str, fan_in: int, fan_out: int) -> Operation:
        x, weight = _random((tokens, fan_in), dtype, device), _random((fan_out, fan_in), dtype, device)
        num_bytes = dtype.itemsize * (tokens * fan_in + fan_in * fan_out + tokens * fan_out)
        return Operation(name, precision, 2.0 * tokens * fan_in * fan_out, num_bytes, lambda: F.linear(x, weight))

    return [
        product("qkv projection", width, projected),
        _attention(config, batch, sequence, precision, device),
        product("MLP up", width, inner),
        product("MLP down", inner, width),
        product("head", width, config.vocab_size),
        _norm(tokens, width, precision, device),
        _gram(config.num_hidden_layers, min(width, inner), max(width, inner), precision, device),
        _adamw(config.vocab_size * width, device),
    ]


def _attention(config: GolfConfig, batch: int, sequence: int, precision: str, device: torch.device) -> Operation:
    """The causal half of both products; queries, keys, values and outputs pass once, scores never."""
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    dtype = DTYPES[precision]
    query = _random((batch, heads, sequence, size), dtype, device)
    key, value = (_random((batch, key_heads, sequence, size), dtype, device) for _ in range(2))

    def run() -> Tensor:
        if config._attn_implementation == CAUSAL_BLOCKS:
            groups = heads // key_heads
            return causal_blocks(query, repeat_kv(key, groups), repeat_kv(value, groups), size**-0.5)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)

    num_bytes = dtype.itemsize * batch * sequence * size * (2 * heads + 2 * key_heads)
    return Operation("attention", precision, 2.0 * batch * heads * sequence**2 * size, num_bytes, run)


def _norm(tokens: int, width: int, precision: str, device: torch.device) -> Operation:
    x, weight = (_random(shape, DTYPES[precision], device) for shape in ((tokens, width), (width,)))
    num_bytes = DTYPES[precision].itemsize * (2 * tokens * width + width)
    return Operation(
        "norm", precision, NORM_FLOPS * tokens * width, num_bytes, lambda: F.rms_norm(x, (width,), weight, 1e-6)
    )


def _gram(layers: int, short: int, long: int, of_run: str, device: torch.device) -> Operation:
    """X X^T of the MLP's matrices, the first product of a Newton-Schulz iteration. of_run: the run's precision."""
    is_bf16 = of_run != "fp32" and fast_product_dtype(device) == torch.bfloat16
    precision = "bf16" if is_bf16 else "fp32"
    dtype = DTYPES[precision]
    x = _random((layers, short, long), dtype, device)
    num_bytes = dtype.itemsize * layers * (short * long + short**2)
    return Operation(
        "Newton-Schulz product", precision, 2.0 * layers * short**2 * long, num_bytes, lambda: torch.bmm(x, x.mT)
    )


def _adamw(num_parameters: int, device: torch.device) -> Operation:
    parameter = torch.nn.Parameter(_random((num_parameters,), torch.float32, device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return Operation("AdamW update", "fp32", ADAMW_FLOPS * num_parameters, ADAMW_BYTES * num_parameters, optimizer.step)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)  # leaves the global generator alone
    return torch.randn(shape, device=device, generator=generator).to(dtype)


if __name__ == "__main__":
    run_command(main)
