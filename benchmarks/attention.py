"""Time of causal attention on a CPU: torch's SDPA, plain products, and hfgolf/model/causal_blocks.py.

    python benchmarks/attention.py --output benchmarks/results/attention_cpu.json

Forward and backward over 4,096 tokens of 4 heads of 64, compiled, as when training a small model; the repetitions are
interleaved in one process and the ratios are those of the pairs. It shows why setup.py trains in bf16 on a CPU with
blocks, and from which length on it leaves that to SDPA.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

TOKENS, HEADS, HEAD_SIZE = 4096, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON with all measurements")
    arguments = parser.parse_args()

    import torch

    from hfgolf.train.environment import git_commit, hardware

    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for length in arguments.lengths:
            seconds = measure(length, dtype, arguments.repetitions)
            ratios = {
                name: median(a / b for a, b in zip(seconds["sdpa"], times, strict=True))
                for name, times in seconds.items()
            }
            results.append({"length": length, "dtype": str(dtype), "seconds": seconds, "ratios": ratios})
            shown = "".join(
                f"{name:>16} {median(times) * 1e3:6.1f} ms {ratios[name]:5.2f}x" for name, times in seconds.items()
            )
            print(f"{str(dtype).removeprefix('torch.'):<10}{length:>6}{shown}", flush=True)
    if arguments.output:
        about = {"hardware": hardware(), "versions": {"torch": torch.__version__, "hfgolf": git_commit()}}
        arguments.output.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


def measure(length: int, dtype: Any, repetitions: int) -> dict[str, list[float]]:
    import torch
    from torch.nn import functional as F

    from hfgolf.model.causal_blocks import causal_blocks

    def plain(query: Any, key: Any, value: Any) -> Any:
        scores = (query @ key.mT).float() * HEAD_SIZE**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1).to(value.dtype) @ value

    kernels = {
        "sdpa": lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        "plain": plain,
        "causal_blocks": lambda *qkv: causal_blocks(*qkv, HEAD_SIZE**-0.5),
    }
    torch.manual_seed(0)
    shape = (TOKENS // length, length, HEADS, HEAD_SIZE)
    qkv = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape).to(dtype).transpose(1, 2)
    torch._dynamo.reset()
    compiled = {name: torch.compile(kernel, dynamic=False) for name, kernel in kernels.items()}
    expected = compiled["sdpa"](*qkv)
    for kernel in compiled.values():
        torch.testing.assert_close(kernel(*qkv), expected, atol=2e-2, rtol=2e-2)
        kernel(*qkv).backward(gradient)
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repetitions):
        for name, kernel in compiled.items():
            started_at = time.perf_counter()
            kernel(*qkv).backward(gradient)
            seconds[name].append(time.perf_counter() - started_at)
    return seconds


if __name__ == "__main__":
    main()
