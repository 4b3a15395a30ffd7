"""Time and memory of one optimizer step, compared with torch.optim.Muon and torch.optim.AdamW(fused=True).

    python benchmarks/optimizer_step.py --output benchmarks/results/optimizer_step_cpu.json
    python benchmarks/optimizer_step.py --device cuda --compiled --output benchmarks/results/optimizer_step_gpu.json

Uses the matrices of GPT-2 124M and of configs/small.yaml: fused, as torch.optim.Muon takes them, and with q, k and v
apart, as hfgolf trains them. 5 classic iterations in bf16. Repetitions are interleaved in one process, and ratios are
medians over pairs. "products alone" replays only the matmuls of a step on the same tensors, a lower bound for any step
that computes them. The memory that a step adds is its peak in a separate process, without optimizer state.

--compiled also measures "with q, k and v apart" with Newton-Schulz compiled, and compiled as CUDA graphs, one for each
shape: only a GPU can show whether the optimizer should do that.

On a CPU with --threads 1, time is process time: other programs only affect it through the shared caches.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from machine import build_parser, held_bytes, peak_bytes, reset_peak, write

MODELS = {"small": {"width": 256, "layers": 5}, "gpt2_124m": {"width": 768, "layers": 12}}
MUON = {
    "torch.optim.Muon": "its products alone",
    "hfgolf": "hfgolf's products alone",
    "hfgolf, q k v apart": "those with q k v apart",
}
COMPILED = {"apart, compiled": None, "apart, CUDA graphs": "reduce-overhead"}
"""{name: mode of torch.compile}."""
WARMUPS = 3  # a CUDA graph is recorded in the second step
ADAMW = ("torch.optim.AdamW", "hfgolf AdamW")


def build(name: str, width: int, layers: int, device: str) -> Any:
    """Return an optimizer whose matrices have gradients."""
    import torch

    from hfgolf.optim.muon import Muon

    generator = torch.Generator().manual_seed(0)
    params, splits = [], []
    for _ in range(layers):
        for shape in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            param = torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device))
            param.grad = torch.randn(shape, generator=generator).to(device)
            params.append(param)
            splits.append((width,) * 3 if name.endswith("apart") and shape[0] == 3 * width else None)
    numbers: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    if name == "torch.optim.Muon":
        return torch.optim.Muon(params, **numbers)
    if name == "torch.optim.AdamW":
        return torch.optim.AdamW(params, fused=True, **numbers)
    if name == "hfgolf AdamW":
        return Muon(params, rule="adamw", **numbers)
    classic: dict[str, Any] = {"newton_schulz_coefficients": "classic", "newton_schulz_dtype": "bf16"}
    return Muon([{"params": params, "splits": splits}], **numbers, **classic)


def compiled_step(optimizer: Any, mode: str | None) -> Callable[[], None]:
    """Return a function that takes a step with Newton-Schulz compiled for each shape."""
    import torch

    from hfgolf.optim import muon

    compiled = torch.compile(muon.orthogonalize, dynamic=False, mode=mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with mock.patch.object(muon, "orthogonalize", compiled):
            optimizer.step()

    return step


def products_of(optimizer: Any) -> tuple[Callable[[], None], int]:
    """Return a function that repeats the matmuls of one step, and their FLOPs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
                calls.append((function, arguments, options or {}))
            return function(*arguments, **(options or {}))

    with Recorder():
        optimizer.step()
    with FlopCounterMode(display=False) as counter:
        optimizer.step()

    @torch.no_grad()
    def replay() -> None:
        for function, arguments, options in calls:
            function(*arguments, **options)

    return replay, counter.get_total_flops()


def state_bytes(optimizer: Any) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def step_bytes(name: str, model: str, device: str) -> int:
    command = [sys.executable, __file__, "--child", name, "--model", model, "--device", device]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def child(name: str, model: str, device: str) -> int:
    """Return the peak memory that a step adds in a process that already holds parameters, gradients and state."""
    import torch

    torch.zeros(31 * 2**18)  # as in measure()
    optimizer = build(name, **MODELS[model], device=device)
    small = build(name, width=8, layers=1, device=device)
    small.step()  # loads libraries and kernels
    for group in optimizer.param_groups:  # a step without gradients creates the state, but uses no temporary memory
        for param in group["params"]:
            param.grad, param.kept = None, param.grad
    optimizer.step()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.kept
    on_gpu = device == "cuda"
    reset_peak(on_gpu)
    before, already = held_bytes(on_gpu), state_bytes(optimizer)
    optimizer.step()
    return max(0, peak_bytes(on_gpu) - before - (state_bytes(optimizer) - already))


def measure(model: str, device: str, repetitions: int, compiled: bool) -> dict[str, Any]:
    import torch

    torch.zeros(31 * 2**18)  # makes malloc keep the memory of a step, as it does with a model's activations around
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    optimizers = {name: build(name, **MODELS[model], device=device) for name in (*MUON, *ADAMW)}
    steps: dict[str, Callable[[], Any]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    flops = {}
    for name, products in MUON.items():
        steps[products], flops[name] = products_of(optimizers[name])
        flops[products] = flops[name]
    for name, mode in COMPILED.items() if compiled else ():
        steps[name] = compiled_step(build("hfgolf, q k v apart", **MODELS[model], device=device), mode)
        flops[name] = flops["hfgolf, q k v apart"]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions + WARMUPS):
        for name, step in steps.items():
            started_at = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if repetition >= WARMUPS:
                seconds[name].append(clock() - started_at)
    return {
        "model": model,
        **MODELS[model],
        "parameters": sum(param.numel() for param in optimizers["hfgolf"].param_groups[0]["params"]),
        "seconds": seconds,
        "flops": flops,
        "state_bytes": {name: state_bytes(optimizer) for name, optimizer in optimizers.items()},
        "step_bytes": {name: step_bytes(name, model, device) for name in optimizers},
    }


def show(measured: dict[str, Any]) -> None:
    print(f"{measured['model']}: {measured['parameters']:,} parameters in matrices")
    heads = ("median", 12), ("from", 12), ("to", 12), ("faster", 8), ("GFLOP", 8), ("GFLOP/s", 9), ("state", 9)
    print(" " * 26 + "".join(f"{head:>{width}}" for head, width in heads) + "  a step adds")
    compiled = [name for name in COMPILED if name in measured["seconds"]]
    for name in (*(line for pair in MUON.items() for line in pair), *compiled, *ADAMW):
        times, flops = measured["seconds"][name], measured["flops"].get(name)
        milliseconds = "".join(
            f"{1e3 * value:>9,.1f} ms" for value in (statistics.median(times), min(times), max(times))
        )
        theirs = measured["seconds"][ADAMW[0] if name in ADAMW else "torch.optim.Muon"]
        line = f"{name:<26}{milliseconds}{statistics.median(a / b for a, b in zip(theirs, times, strict=True)):>8.2f}"
        line += f"{flops / 1e9:>8,.0f}{flops / statistics.median(times) / 1e9:>9,.0f}" if flops else " " * 17
        if name in measured["state_bytes"]:
            line += f"{measured['state_bytes'][name] / 1e6:>6,.0f} MB{measured['step_bytes'][name] / 1e6:>10,.0f} MB"
        print(line)


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--compiled", action="store_true", help="also with Newton-Schulz compiled")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(child(arguments.child, arguments.model, arguments.device))
        return

    import torch

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = []
    for model in [arguments.model] if arguments.model else MODELS:
        results.append(measure(model, arguments.device, arguments.repetitions, arguments.compiled))
        show(results[-1])
    write(arguments.output, ["torch"], threads=torch.get_num_threads(), results=results)


if __name__ == "__main__":
    main()
