"""Seconds to write and load a checkpoint, compared with torch.save (with fsync) and torch.load of the same tensors.

    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint_cpu.json
    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint_gpu.json    # on a machine with a GPU

Uses the models, optimizers and averages of two configs, with full optimizer state and no data. A save is the blocking
one at the end of a run: files, hashes, fsync, rename, and the deletion of the checkpoint before. (saving.py measures
the cost of a background save.) A load is that of train.resume, which checks the hashes first. torch.save writes model
and optimizer to one file. "torch.save" deletes its last file first, and a kill leaves nothing. "replaced" keeps it
until the next one is on disk, as hfgolf does. Both sides load into model and optimizer. "its hashes" is the SHA-256 of
the checkpoint's files alone. Repetitions are interleaved in one process, and ratios are medians over pairs. Loaded
files were just written, so they come from the page cache, not the disk.

A virtual machine may return free memory to its host after seconds, and whoever writes next waits for it: up to 1.3 s a
gigabyte on ours. So before each call, a scratch file of the same size is written and deleted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, write

from hfgolf.config.parse import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = {"small": ("small.yaml", 4096), "124m": ("fineweb_124m.yaml", 50257)}
"""{name: (config, vocabulary size of its run)}."""


def measure(model: str, folder: Path, repetitions: int) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator

    from hfgolf.checkpoint.contents import Checkpointer
    from hfgolf.checkpoint.state import TrainState
    from hfgolf.checkpoint.store import choose_checkpoint, newest_first
    from hfgolf.model.modeling_golf import GolfForCausalLM
    from hfgolf.optim.ema import Ema
    from hfgolf.optim.groups import build_optimizer
    from hfgolf.train.build import golf_config

    name, vocabulary = MODELS[model]
    config = load_config(["--config", str(CONFIGS / name)]).config
    torch.manual_seed(0)
    golf = GolfForCausalLM(golf_config(config, vocabulary))
    accelerator = Accelerator()
    built = build_optimizer(golf, config.optim)
    prepared, optimizer = accelerator.prepare(golf, built)
    optimizer.optimizer.create_state()
    decay = config.optim.ema_decay
    ema = None if decay is None else Ema(golf.named_parameters(), decay)
    state = TrainState()
    checkpoints = Checkpointer(
        accelerator,
        folder / "checkpoints",
        golf,
        optimizer,
        state,
        ema,
        keep_last=1,
        identity={"config": {}, "corpus": {}},
        supporting_files={},
    )
    plain = folder / "plain.pt"

    def write() -> None:
        state.step += 1  # otherwise the folder of the save already exists
        checkpoints.save(is_best=False)
        checkpoints.wait()

    def load() -> None:
        checkpoint = choose_checkpoint(checkpoints.folder, "latest")
        assert checkpoint is not None
        checkpoints.load(checkpoint)

    def torch_save() -> None:
        plain.unlink(missing_ok=True)
        write_plain(plain)

    def torch_save_replacing() -> None:
        write_plain(plain.with_name("partial.pt"))
        plain.with_name("partial.pt").replace(plain)

    def write_plain(path: Path) -> None:
        content = {"model": golf.state_dict(), "optimizer": optimizer.state_dict()}
        if ema is not None:
            content["ema"] = ema.state_dict()
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load() -> None:
        content = torch.load(plain, map_location="cpu", weights_only=True)
        golf.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        if ema is not None:
            ema.load_state_dict(content["ema"])

    def free_memory() -> None:
        """Write a file of the same size and delete it: the page cache then takes memory that was just in use."""
        scratch = folder / "scratch"
        with scratch.open("wb") as file:
            for _ in range(plain.stat().st_size // 2**24 + 1):
                file.write(bytes(2**24))
        scratch.unlink()

    def hashes() -> None:
        for path in newest_first(folder / "checkpoints")[0].iterdir():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")

    checkpoints.reserve()
    calls = {
        "write": write,
        "torch.save": torch_save,
        "replaced": torch_save_replacing,
        "load": load,
        "torch.load": torch_load,
        "its hashes": hashes,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            if plain.exists():
                free_memory()
            took = timed(call, accelerator.device.type == "cuda")
            if repetition:  # the first one is the warmup
                seconds[name].append(took)
    failures = checkpoints.failures()
    if failures:
        raise SystemExit(f"error: {failures[0]}")
    assert sum(p.numel() for p in prepared.parameters()) == golf.num_parameters()
    return {
        "model": model,
        "parameters": golf.num_parameters(),
        "checkpoint_bytes": sum(path.stat().st_size for path in newest_first(folder / "checkpoints")[0].iterdir()),
        "plain_bytes": plain.stat().st_size,
        "seconds": seconds,
    }


def timed(call: Callable[[], None], on_gpu: bool) -> float:
    started_at = time.perf_counter()
    call()
    if on_gpu:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - started_at


def show(measured: dict[str, Any]) -> None:
    seconds = measured["seconds"]
    print(f"{measured['model']}: {measured['parameters']:,} parameters", end=", ")
    print(f"{measured['checkpoint_bytes'] / 1e6:,.1f} MB; torch.save {measured['plain_bytes'] / 1e6:,.1f} MB")
    print(f"{'':<14}{'median':>12}{'from':>12}{'to':>12}{'MB/s':>10}{'of torch':>10}{'replaced':>10}")
    for name, times in seconds.items():
        by_torch = name.startswith("torch.") or name == "replaced"
        num_bytes = measured["plain_bytes" if by_torch else "checkpoint_bytes"]
        line = f"{name:<14}" + "".join(f"{1e3 * t:>9,.1f} ms" for t in (median(times), min(times), max(times)))
        line += f"{num_bytes / 1e6 / median(times):>10,.0f}"
        for theirs in {"write": ("torch.save", "replaced"), "load": ("torch.load",)}.get(name, ()):
            line += f"{median(a / b for a, b in zip(times, seconds[theirs], strict=True)):>9.2f}x"
        print(line)


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; a temporary folder is made in it")
    arguments = parser.parse_args()

    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    results = []
    for model in [arguments.model] if arguments.model else MODELS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            results.append(measure(model, Path(folder), arguments.repetitions))
        show(results[-1])
    write(arguments.output, ["torch"], results=results)


if __name__ == "__main__":
    main()
