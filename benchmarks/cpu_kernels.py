"""Time of the model's own CPU kernels, compared with torch's: causal attention and dropout.

    python benchmarks/cpu_kernels.py --output benchmarks/results/cpu_kernels_cpu.json

Forward and backward over 4,096 tokens with 4 heads of size 64, compiled, as in training a small model. Repetitions are
interleaved in one process, and ratios are medians over pairs. Attention: SDPA, plain matmuls, and
hfgolf/model/causal_blocks.py, which training uses for bf16 on a CPU. Dropout: torch's, and layers_golf.py's, which
uses one random byte per element.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from machine import build_parser, write

TOKENS, HEADS, HEAD_SIZE = 4096, 4, 64


def main() -> None:
    parser = build_parser(__doc__, repetitions=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    arguments = parser.parse_args()

    import torch

    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for work, length in [("dropout", 0), *(("attention", length) for length in arguments.lengths)]:
            kernels, operands = dropout(dtype) if work == "dropout" else attention(length, dtype)
            seconds = interleave(kernels, operands, arguments.repetitions)
            first = next(iter(seconds.values()))  # torch's
            ratios = {n: median(a / b for a, b in zip(first, t, strict=True)) for n, t in seconds.items()}
            name = str(dtype).removeprefix("torch.")
            results.append({"work": work, "length": length, "dtype": name, "seconds": seconds, "ratios": ratios})
            shown = "".join(f"{n:>15} {median(t) * 1e3:6.1f} ms {ratios[n]:5.2f}x" for n, t in seconds.items())
            print(f"{name:<9} {work} {length or '':<5}{shown}", flush=True)
    write(arguments.output, ["torch"], results=results)


def attention(length: int, dtype: Any) -> tuple[dict[str, Callable], list[Any]]:
    """Return the kernels and their operands, (B, H, T, D) each, after checking the kernels against each other."""
    import torch
    from torch.nn import functional as F

    from hfgolf.model.causal_blocks import causal_blocks

    def plain(query: Any, key: Any, value: Any) -> Any:
        scores = (query @ key.mT).float() * HEAD_SIZE**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1).to(value.dtype) @ value

    kernels: dict[str, Callable] = {
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "plain": plain,
        "causal_blocks": lambda q, k, v: causal_blocks(q, k, v, HEAD_SIZE**-0.5),
    }
    torch.manual_seed(0)
    shape = (TOKENS // length, length, HEADS, HEAD_SIZE)
    qkv = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    expected = kernels["sdpa"](*qkv)
    for kernel in kernels.values():
        torch.testing.assert_close(kernel(*qkv), expected, atol=2e-2, rtol=2e-2)
    return kernels, qkv


def dropout(dtype: Any) -> tuple[dict[str, Callable], list[Any]]:
    """Return both kinds of dropout and their operand, a residual stream."""
    import torch
    from torch.nn import functional as F

    from hfgolf.model.layers_golf import apply_dropout

    kernels = {"torch": lambda x: F.dropout(x, 0.1), "bytes": lambda x: apply_dropout(x, 0.1)}
    return kernels, [torch.randn(TOKENS, HEADS * HEAD_SIZE).to(dtype).requires_grad_()]


def interleave(kernels: dict[str, Callable], operands: list[Any], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each compiled kernel, forward and backward."""
    import torch

    torch._dynamo.reset()
    compiled = {name: torch.compile(kernel, dynamic=False) for name, kernel in kernels.items()}
    gradient = torch.ones_like(next(iter(compiled.values()))(*operands))
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for repetition in range(repetitions + 1):  # the first one compiles
        for name, kernel in compiled.items():
            started_at = time.perf_counter()
            kernel(*operands).backward(gradient)
            if repetition:
                seconds[name].append(time.perf_counter() - started_at)
    return seconds


if __name__ == "__main__":
    main()
