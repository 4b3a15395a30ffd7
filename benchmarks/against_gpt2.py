"""Time and memory of one training step, compared with transformers' GPT2LMHeadModel with the same weights.

    python benchmarks/against_gpt2.py --output benchmarks/results/against_gpt2_cpu.json

Both run uncompiled, in the same precision, on the same batch, with interleaved repetitions in one process. Peak memory
is measured in a separate process for each. The printed losses show that both do the same work.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

from machine import build_parser, held_bytes, peak_bytes, reset_peak, write

SHAPES = {
    "characters": {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 257, "n_positions": 256, "batch": 16},
    "small": {"n_embd": 256, "n_layer": 5, "n_head": 4, "vocab_size": 4096, "n_positions": 256, "batch": 8},
    "gpt2_2_layers": {"n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50257, "n_positions": 1024, "batch": 2},
}

HEADS = f"{'shape':<16}{'transformers':>14}{'hfgolf':>10}{'ratio':>8}{'memory of a step (MB)':>24}"


def build(shape: dict[str, int], device: str) -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from hfgolf.publish.native import from_native

    torch.manual_seed(0)
    options: dict[str, Any] = {key: value for key, value in shape.items() if key != "batch"}
    gpt2 = GPT2LMHeadModel(
        GPT2Config(**options, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).train()
    models = {"transformers": gpt2, "hfgolf": from_native(gpt2).train()}
    return {name: model.to(device) for name, model in models.items()}


def make_step(model: Any, shape: dict[str, int], device: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape["vocab_size"], (shape["batch"], shape["n_positions"]), generator=generator).to(device)

    def step() -> float:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return loss.item()  # waits for a GPU

    return step


def step_bytes(name: str, shape: str, device: str) -> int:
    command = [sys.executable, __file__, "--child", name, "--shape", shape, "--device", device]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def child(name: str, shape: dict[str, int], device: str) -> int:
    """Return the peak memory that three steps add in a process that already holds the models, in bytes."""
    on_gpu = device == "cuda"
    step = make_step(build(shape, device)[name], shape, device)
    reset_peak(on_gpu)
    before = held_bytes(on_gpu)
    for _ in range(3):
        step()
    return peak_bytes(on_gpu) - before


def row(result: dict[str, Any]) -> str:
    """Return the printed lines for one shape."""
    theirs, ours = (statistics.median(result["seconds"][who]) for who in ("transformers", "hfgolf"))
    megabytes = "{transformers:,.0f} / {hfgolf:,.0f}".format(**{k: v / 1e6 for k, v in result["bytes"].items()})
    return (
        f"{result['shape']:<16}{theirs:>12.3f} s{ours:>8.3f} s{result['ratio']:>8.2f}{megabytes:>24}\n"
        f"{'':<16}loss {result['losses']['transformers']:.6f} and {result['losses']['hfgolf']:.6f}"
    )


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(child(arguments.child, SHAPES[arguments.shape], arguments.device))
        return

    import torch

    results = []
    print(HEADS)
    for name in [arguments.shape] if arguments.shape else SHAPES:
        shape = SHAPES[name]
        steps = {
            who: make_step(model, shape, arguments.device) for who, model in build(shape, arguments.device).items()
        }
        losses = {who: step() for who, step in steps.items()}  # also the warmup
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        for _ in range(arguments.repetitions):
            for who, step in steps.items():
                started_at = time.perf_counter()
                step()
                seconds[who].append(time.perf_counter() - started_at)
        ratio = statistics.median(a / b for a, b in zip(seconds["transformers"], seconds["hfgolf"], strict=True))
        memory = {who: step_bytes(who, name, arguments.device) for who in steps}
        results.append({"shape": name, **shape, "losses": losses, "seconds": seconds, "ratio": ratio, "bytes": memory})
        print(row(results[-1]))
    write(arguments.output, ["torch", "transformers"], threads=torch.get_num_threads(), results=results)


if __name__ == "__main__":
    main()
