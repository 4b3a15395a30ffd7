"""The memory that training takes, as it is predicted and as it is measured.

    python benchmarks/memory_prediction.py --output benchmarks/results/memory_prediction_cpu.json
    python benchmarks/memory_prediction.py --output benchmarks/results/memory_prediction_gpu.json   # on a GPU

Two optimizer steps of two micro-batches each, on random tokens, for the model of configs/small.yaml and for two of
GPT-2's size: its own block, and the modern one. Each case has a process of its own. Measured is, on a GPU, what torch's
allocator gave out; on a CPU (Linux) the private memory of the process beyond that before the model was built. "by
default" is the same peak where glibc keeps freed blocks of less than 32 MB, as it does unless MALLOC_MMAP_THRESHOLD_ is
set: memory that no tensor holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
from pathlib import Path
from typing import Any

from machine import about, forget_peak, held_bytes, peak_bytes, write

from hfgolf.command_line import load_config

ROOT = Path(__file__).parents[1]
SMALL = ["--config", str(ROOT / "configs" / "small.yaml")]
LARGE = ["--config", str(ROOT / "configs" / "fineweb_124m.yaml")]
GPT2 = [
    *LARGE,
    "--model.norm=layernorm",
    "--model.position_embedding=learned",
    "--model.activation=gelu_new",
    "--model.use_bias=true",
    "--model.qk_norm=false",
    "--model.embedding_norm=false",
]
CHECKPOINTING = "--model.gradient_checkpointing=true"
CASES = {  # name: (vocabulary, sequences at once on a CPU, and on a GPU, options)
    "small, fp32": (4096, 8, 64, [*SMALL, "--train.mixed_precision=no"]),
    "small, bf16": (4096, 8, 64, [*SMALL, "--train.mixed_precision=bf16"]),
    "small, fp32, checkpointing": (4096, 8, 64, [*SMALL, "--train.mixed_precision=no", CHECKPOINTING]),
    "124M, bf16": (50_257, 2, 16, [*LARGE, "--train.mixed_precision=bf16"]),
    "124M, bf16, checkpointing": (50_257, 2, 16, [*LARGE, "--train.mixed_precision=bf16", CHECKPOINTING]),
    "GPT-2, fp32": (50_257, 1, 8, [*GPT2, "--train.mixed_precision=no", "--optim.name=adamw"]),
    "GPT-2, bf16": (50_257, 2, 16, [*GPT2, "--train.mixed_precision=bf16", "--optim.name=adamw"]),
}
COLUMNS = ("weights", "optimizer", "gradients", "activations", "peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, help="JSON with all measurements")
    arguments = parser.parse_args()
    rows = []
    print(f"{'MiB, measured (predicted)':<28}" + "".join(f"{column:>15}" for column in COLUMNS) + "  ratio  by default")
    for name in arguments.cases:
        row = in_a_process(name, {"MALLOC_MMAP_THRESHOLD_": "65536"})
        if row["device"] == "cpu":
            row["measured"]["peak_by_default"] = in_a_process(name, {})["measured"]["peak"]
        rows.append(row)
        print(describe(row), flush=True)
    if arguments.output:
        write(arguments.output, about("torch"), cases=rows)


def in_a_process(name: str, variables: dict[str, str]) -> dict[str, Any]:
    os.environ.update(variables)
    with multiprocessing.get_context("spawn").Pool(1) as process:
        row: dict[str, Any] = process.apply(measure, (name,))
    for variable in variables:
        del os.environ[variable]
    return row


def describe(row: dict[str, Any]) -> str:
    measured, predicted = row["measured"], row["predicted"]
    cells = (f"{measured[column] / 2**20:,.0f} ({predicted[column] / 2**20:,.0f})" for column in COLUMNS)
    by_default = f"{measured['peak_by_default'] / 2**20:,.0f}" if "peak_by_default" in measured else ""
    ratio = predicted["peak"] / measured["peak"]
    return f"{row['case']:<28}" + "".join(f"{cell:>15}" for cell in cells) + f"{ratio:7.2f}{by_default:>12}"


def measure(name: str) -> dict[str, Any]:
    """Train for two steps and return the bytes of each item, measured and predicted."""
    import torch

    from hfgolf.measure.memory import run_memory
    from hfgolf.model.build import build_golf
    from hfgolf.optim.groups import build_optimizer

    vocabulary, on_cpu, on_gpu, options = CASES[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = on_gpu if device.type == "cuda" else on_cpu
    config = load_config(options).config
    sequence, precision = config.batch.sequence_length, config.train.mixed_precision
    config = config.replace(batch__micro_batch_size=batch, batch__tokens_per_step=2 * batch * sequence)
    a = torch.randn(512, 512, device=device, dtype=torch.float32 if precision == "no" else torch.bfloat16)
    (a @ a).sum().item()  # the libraries' own memory
    meter = Meter(device.type == "cuda")

    with device:
        model = build_golf(config, vocabulary, device.type).train()
    measured = {"weights": meter.grown()}
    optimizer = build_optimizer(model.named_parameters(), config.optim, model.fused_projections())
    optimizer.create_state()
    measured["optimizer"] = meter.grown()
    ids = torch.randint(0, vocabulary, (batch, sequence), device=device)
    for _ in range(2):
        for _ in range(2):
            meter.grown()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision != "no"):
                loss = model(input_ids=ids, shift_labels=ids.clone()).loss
            measured["activations"] = meter.grown()
            loss.backward()
            del loss
            measured.setdefault("gradients", measured["activations"] + meter.grown())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    measured["peak"] = meter.peak()

    predicted = dataclasses.asdict(run_memory(config, model, batch, 1, device.type))
    predicted["activations"] += 4 * vocabulary * config.model.hidden_size  # the head's gradient, which the loss keeps
    if not config.model.gradient_checkpointing:
        predicted["activations"] += predicted["casts"]
    return {
        "case": name,
        "device": device.type,
        "batch": batch,
        "sequence": sequence,
        "attention": model.config._attn_implementation,
        "measured": measured,
        "predicted": predicted,
    }


class Meter:
    """Bytes that the process took on its device since the meter was built; on a CPU those it shares with no other."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        forget_peak(on_gpu)  # what importing took for a while is no peak of training
        self._before = self._last = self._private(held_bytes(on_gpu))

    def grown(self) -> int:
        """Return the bytes since the last time."""
        before, self._last = self._last, self._private(held_bytes(self._on_gpu))
        return self._last - before

    def peak(self) -> int:
        """Return the most bytes there ever were."""
        return self._private(peak_bytes(self._on_gpu)) - self._before

    def _private(self, num_bytes: int) -> int:
        import psutil

        return num_bytes if self._on_gpu else num_bytes - psutil.Process().memory_info().shared


if __name__ == "__main__":
    main()
