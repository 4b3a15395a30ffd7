"""The memory that a run predicts, compared with the peak that `top` would show for its process.

    python benchmarks/memory_prediction.py --output benchmarks/results/memory_prediction_cpu.json
    python benchmarks/memory_prediction.py --output benchmarks/results/memory_prediction_gpu.json   # on a GPU

Each case is a complete run of scripts/train.py in a separate process: some steps, the evaluation, a sample, the export.
"predicted" is what the run prints before its first step, and "training" is the part of it for live tensors. "measured"
is the peak that the run prints at its end. On a CPU, the JSON also has the kernel's own figure (ru_maxrss). Memory does
not depend on other programs, so a busy machine is fine; ignore the times of these runs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import build_parser, write

ROOT = Path(__file__).parents[1]
FP32, BF16 = "--train.mixed_precision=no", "--train.mixed_precision=bf16"
CHECKPOINTING = "--model.gradient_checkpointing=true"
SMALL = ["--config=configs/small.yaml", "--train.max_steps=20"]
# with other text, because its own would need a download
CHARACTERS = ["--config=configs/shakespeare_char.yaml", "--data.files=hfgolf/**/*.py", "--train.max_steps=20"]
LARGE = [
    "--config=configs/fineweb_124m.yaml",
    "--data.source=python_stdlib",
    "--data.val_fraction=0.002",
    "--tokenizer.kind=bpe",
    "--tokenizer.vocab_size=50257",
    "--batch.tokens_per_step=4096",
    "--train.max_steps=2",
]
CASES = {
    "small, fp32": [*SMALL, FP32],
    "small, bf16": [*SMALL, BF16],
    "small, fp32, checkpointing": [*SMALL, FP32, CHECKPOINTING],
    "small, bf16, compiled": [*SMALL, BF16, "--train.compile=true"],
    "shakespeare_char, fp32": [*CHARACTERS, FP32],
    "shakespeare_char, bf16": [*CHARACTERS, BF16],
    "shakespeare_char, bf16, compiled": [*CHARACTERS, BF16, "--train.compile=true"],
    "124M, fp32": [*LARGE, FP32],
    "124M, bf16": [*LARGE, BF16],
    "124M, bf16, checkpointing": [*LARGE, BF16, CHECKPOINTING],
}


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    rows = []
    print(f"{'MB':<34}{'training':>10}{'predicted':>11}{'measured':>10}{'predicted/measured':>20}")
    for name in arguments.cases:
        row = measure(name)
        rows.append(row)
        print(describe(row), flush=True)
    write(arguments.output, ["torch"], c_library=" ".join(platform.libc_ver()), cases=rows)


def describe(row: dict[str, Any]) -> str:
    training, predicted, measured = (f"{row[key] / 1e6:,.0f}" for key in ("training", "predicted", "measured"))
    return f"{row['case']:<34}{training:>10}{predicted:>11}{measured:>10}{row['predicted'] / row['measured']:>20.2f}"


def measure(name: str) -> dict[str, Any]:
    """Run a case and return the bytes that the run predicted and used."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--train.compile=false", *CASES[name], "--train.max_minutes=null", "--train.eval_tokens=20000"]
        options += ["--train.save_every_steps=null", f"--run.output_dir={folder}", "--run.name=case"]
        command = [sys.executable, "scripts/train.py", *options, "--train.cpu_threads=1"]  # the machine may be shared
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.stdout
        printed = run.stdout.read()
        _, status, usage = os.wait4(run.pid, 0)
        if status:
            raise SystemExit(f"{name} failed:\n{printed}")
        summary = json.loads((Path(folder) / "case" / "summary.json").read_text())
    training = re.search(r"([\d.]+) GB for training", printed)
    return {
        "case": name,
        "device": summary["device"],
        "steps": summary["steps"],
        "training": round(float(training[1]) * 1e9) if training else summary["predicted_memory_bytes"],
        "predicted": summary["predicted_memory_bytes"],
        "measured": summary["peak_memory_bytes"],
        "process": usage.ru_maxrss * 1024,
        "printed": [line for line in printed.splitlines() if line.startswith(("memory", "attention:"))],
    }


if __name__ == "__main__":
    main()
