"""Time and memory of training, compared with transformers' Trainer with GPT2LMHeadModel, and with litgpt if installed.

    python benchmarks/train_throughput.py --output benchmarks/results/train_throughput_cpu.json
    python benchmarks/train_throughput.py --device cuda --output benchmarks/results/train_throughput_gpu.json

Each arm is a separate process with its own loop: hfgolf's train_step() on a prepared run, Trainer.train(), or a short
version of litgpt's fit(). They train on the same tokens in the same order, with AdamW, dropout 0 and clipping, and
arms with the same model start from the same weights. They do not log, evaluate or save. The arms take turns, a few
steps each, so that a drift in the machine's speed affects all of them. "faster" compares with Trainer's fastest arm (or
with the first arm if there is no Trainer) in the same round, as the median over rounds. Equal losses show that the arms
do the same work. Memory is the peak after the warmup: of the whole process on a CPU (Linux), of torch's allocator on a
GPU.

On a CPU with --threads 1, time is process time: other programs only affect it through the shared caches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, peak_bytes, reset_peak, write


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    context: int
    sequences: int
    """Per step."""
    tokenizer: str
    """hfgolf's tokenizer.kind; it is trained on this interpreter's standard library."""
    vocabulary: int
    arms: tuple[str, ...] = ()
    """The default arms, if not all fit in memory at once; empty means all."""


@dataclass(frozen=True)
class Arm:
    program: str
    precision: str = "bf16"
    """no or bf16, with autocast."""
    is_compiled: bool = True
    optimizer: str = "adamw"
    is_gpt2: bool = True
    """Whether the model is GPT-2, like Trainer's."""
    options: dict[str, str] = field(default_factory=dict)
    """More of hfgolf's settings."""
    inductor: dict[str, bool] = field(default_factory=dict)
    """Compiler settings, by their names in torch._inductor.config."""
    uses_tf32: bool = False
    only_on_gpu: bool = False


ARMS = {
    "trainer_fp32": Arm("trainer", "no", is_compiled=False),
    "trainer_bf16": Arm("trainer", is_compiled=False),
    "trainer_bf16_compiled": Arm("trainer"),
    "hfgolf_fp32": Arm("hfgolf", "no", is_compiled=False),
    "hfgolf_bf16": Arm("hfgolf", is_compiled=False),
    "hfgolf_bf16_compiled": Arm("hfgolf"),
    "hfgolf_muon": Arm("hfgolf", optimizer="muon"),
    "hfgolf_muon_every_2": Arm("hfgolf", optimizer="muon", options={"optim.muon_every_steps": "2"}),
    "hfgolf_own_block": Arm("hfgolf", is_gpt2=False),
    "hfgolf_own_block_muon": Arm("hfgolf", optimizer="muon", is_gpt2=False),
    "hfgolf_checkpointing": Arm("hfgolf", options={"model.gradient_checkpointing": "true"}),
    "hfgolf_low_memory": Arm("hfgolf", options={"train.low_memory": "true"}),
    "hfgolf_tf32": Arm("hfgolf", "no", is_compiled=False, uses_tf32=True, only_on_gpu=True),
    "hfgolf_max_autotune": Arm("hfgolf", inductor={"max_autotune": True}, only_on_gpu=True),
    "hfgolf_cuda_graphs": Arm("hfgolf", inductor={"triton.cudagraphs": True}, only_on_gpu=True),
    "litgpt": Arm("litgpt", is_gpt2=False),
}
LARGEST_ON_CPU = ("trainer_bf16_compiled", "hfgolf_bf16_compiled", "hfgolf_low_memory")
LARGE_ON_CPU = ("trainer_bf16", *LARGEST_ON_CPU, "hfgolf_muon", "hfgolf_muon_every_2")
WITH_TRAINER = ("trainer_bf16_compiled", "hfgolf_bf16_compiled", "hfgolf_muon", "hfgolf_own_block_muon", "litgpt")
SETTINGS = ("hfgolf_fp32", *(name for name, arm in ARMS.items() if arm.only_on_gpu), "hfgolf_bf16")
SETTINGS += ("hfgolf_bf16_compiled", "hfgolf_checkpointing")
SHAPES = {
    "cpu": {
        "characters": Shape(6, 384, 6, 256, 16, "byte", 257),
        "small": Shape(5, 256, 4, 256, 16, "bpe", 4096),
        "gpt2_124m": Shape(12, 768, 12, 1024, 1, "bpe", 50_257, LARGE_ON_CPU),
        "gpt2_124m_x4": Shape(12, 768, 12, 1024, 4, "bpe", 50_257, LARGEST_ON_CPU),
    },
    "cuda": {
        "characters": Shape(6, 384, 6, 256, 16, "byte", 257),
        "small": Shape(5, 256, 4, 256, 16, "bpe", 4096),
        "gpt2_124m": Shape(12, 768, 12, 1024, 16, "bpe", 50_257, WITH_TRAINER),
        "gpt2_350m": Shape(24, 1024, 16, 1024, 8, "bpe", 50_257, WITH_TRAINER[:-1]),
        "gpt2_124m_settings": Shape(12, 768, 12, 1024, 8, "bpe", 50_257, SETTINGS),
    },
}
GPT2_BLOCK = {
    "norm": "layernorm",
    "position_embedding": "learned",
    "activation": "gelu_new",
    "use_bias": "true",
    "qk_norm": "false",
    "embedding_norm": "false",
}
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.0  # Trainer would also decay the embeddings
MAX_GRAD_NORM = 1.0
# The largest allowed difference between the first losses of arms with the same model and optimizer, in nats per token:
# in fp32, and if one of them uses bf16 or TF32. A step changes the loss by more than this.
TOLERANCES = {"no": 2e-3, "bf16": 5e-2}


@dataclass(frozen=True)
class Job:
    """The work of an arm's process."""

    arm: Arm
    shape: Shape
    device: str
    threads: int
    tokens: Path
    """NumPy file of (N, T + 1) int64 tokens: the sequences in training order."""


class Turns:
    """An arm's end of the pipe. The arm only makes steps while measure() waits for them."""

    def __init__(self, connection: Connection, device: str, threads: int) -> None:
        self._connection = connection
        self._on_gpu = device == "cuda"
        self._clock: Callable[[], float] = time.perf_counter if self._on_gpu or threads > 1 else time.process_time
        self._losses: list[Any] = []
        self._steps = 0
        self._started_at = 0.0
        self.are_over = False

    def begin(self, **what: Any) -> None:
        """Report that the arm is ready, and wait for its first turn."""
        self._connection.send(what)
        self._wait()

    def made_step(self, loss: Any) -> None:
        """Count a step. After the last step of a turn, report its figures and wait for the next turn.

        loss: a number, or a scalar on the device, in nats per token.
        """
        self._losses.append(loss)
        if len(self._losses) < self._steps:
            return
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        seconds = (self._clock() - self._started_at) / self._steps
        losses = [float(loss) for loss in self._losses]
        self._connection.send({"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes(self._on_gpu)})
        self._wait()

    def _wait(self) -> None:
        self._losses = []
        self._steps, should_reset_peak = self._connection.recv()
        self.are_over = self._steps == 0
        if should_reset_peak:
            reset_peak(self._on_gpu)
        self._started_at = self._clock()


def run_arm(job: Job, connection: Connection) -> None:
    """Run an arm in this process, from its imports to its last step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch

        torch.set_num_threads(job.threads)
        if job.arm.uses_tf32:
            torch.set_float32_matmul_precision("high")
        if job.arm.inductor:
            from torch._inductor import config

            config.load_config(job.arm.inductor)
        turns = Turns(connection, job.device, job.threads)
        {"hfgolf": train_hfgolf, "trainer": train_trainer, "litgpt": train_litgpt}[job.arm.program](job, turns)
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def build_gpt2(shape: Shape) -> Any:
    """Return GPT-2 with random weights that are the same in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_positions": shape.context,
    }
    # hfgolf's epsilon, which has no config key
    options: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-6}
    config = GPT2Config(
        vocab_size=shape.vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **options
    )
    return GPT2LMHeadModel(config)


def hfgolf_options(shape: Shape, arm: Arm, threads: int) -> list[str]:
    """Return hfgolf's command line for an arm."""
    tokens = shape.sequences * shape.context
    options: dict[str, Any] = {
        "tokenizer.kind": shape.tokenizer,
        "model.num_hidden_layers": shape.layers,
        "model.hidden_size": shape.width,
        "model.num_attention_heads": shape.heads,
        "batch.sequence_length": shape.context,
        "batch.tokens_per_step": tokens,
        "batch.micro_batch_size": shape.sequences,
        "schedule.name": "constant",
        "train.max_steps": 10**6,
        "train.max_grad_norm": MAX_GRAD_NORM,
        "train.mixed_precision": arm.precision,
        "train.compile": str(arm.is_compiled).lower(),
        "train.cpu_threads": threads,
        "optim.name": arm.optimizer,
        "optim.weight_decay": WEIGHT_DECAY,
    }
    if shape.tokenizer == "bpe":
        options["tokenizer.vocab_size"] = shape.vocabulary
    if arm.optimizer == "adamw":
        options["optim.learning_rate"] = LEARNING_RATE
    if arm.is_gpt2:
        options |= {f"model.{key}": value for key, value in GPT2_BLOCK.items()}
    return [f"--{key}={value}" for key, value in (options | arm.options).items()]


def train_hfgolf(job: Job, turns: Turns) -> None:
    from hfgolf.commands.scratch import scratch_run
    from hfgolf.config.parse import load_config
    from hfgolf.publish.native import from_native
    from hfgolf.train.console import quiet_libraries
    from hfgolf.train.loop import train_step

    quiet_libraries()
    with scratch_run(load_config(hfgolf_options(job.shape, job.arm, job.threads)), "benchmark") as run:
        if job.arm.is_gpt2:
            run.raw_model.load_state_dict(from_native(build_gpt2(job.shape)).state_dict())
        flops = run.meter.flops_per_second_of_peak
        turns.begin(parameters=run.raw_model.num_parameters(), flops_per_second_of_peak=flops)
        while not turns.are_over:
            result = train_step(run, math.inf)
            run.state.step += 1
            turns.made_step(result.loss)


def train_trainer(job: Job, turns: Turns) -> None:
    import numpy as np
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    shape, arm = job.shape, job.arm
    tokens = torch.from_numpy(np.load(job.tokens))

    class Blocks(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6 * shape.sequences

        def __getitems__(self, places: list[int]) -> dict[str, torch.Tensor]:
            rows = tokens[[place % len(tokens) for place in places]]
            ids = rows[:, :-1].contiguous()
            return {"input_ids": ids, "labels": ids, "shift_labels": rows[:, 1:].contiguous()}

    def as_read(batch: Any) -> dict[str, Any]:
        return batch

    class KeepsLoss(Trainer):
        loss = torch.zeros(())

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **options)
            self.loss = loss.detach()
            return loss

    class InTurns(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            turns.begin(parameters=model.num_parameters())

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            turns.made_step(trainer.loss)
            control.should_training_stop = turns.are_over

    model = build_gpt2(shape)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=job.device == "cpu",
            max_steps=10**6,
            per_device_train_batch_size=shape.sequences,
            bf16=arm.precision == "bf16",
            torch_compile=arm.is_compiled,
            optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=job.device == "cuda",
            remove_unused_columns=False,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would wait for a GPU at every step
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = KeepsLoss(model, arguments, train_dataset=Blocks(), data_collator=as_read, callbacks=[InTurns()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def train_litgpt(job: Job, turns: Turns) -> None:
    """Do the step of litgpt 0.5's pretrain.fit() for a Pythia of this shape, with autocast like the others."""
    import numpy as np
    import torch
    from lightning import Fabric
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    shape = job.shape
    tokens = torch.from_numpy(np.load(job.tokens))
    fabric = Fabric(accelerator=job.device, devices=1, precision="bf16-mixed")
    sizes = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "block_size": shape.context}
    config = Config(name="pythia", vocab_size=shape.vocabulary, padded_vocab_size=shape.vocabulary, **sizes)
    with fabric.init_module():
        model = GPT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = fabric.setup(torch.compile(model))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    optimizer = fabric.setup_optimizers(optimizer)
    turns.begin(parameters=parameters)
    start = 0
    while not turns.are_over:
        rows = tokens[start : start + shape.sequences].to(fabric.device)
        start = (start + shape.sequences) % len(tokens)
        loss = chunked_cross_entropy(model(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        turns.made_step(loss.detach())


def write_tokens(shape: Shape, num_steps: int, path: Path) -> None:
    """Write the sequences that hfgolf's first steps read, in order."""
    import numpy as np

    from hfgolf.config.parse import load_config
    from hfgolf.data.batches import block_starts, gather, num_blocks
    from hfgolf.data.token_cache import load_tokens

    config = load_config(hfgolf_options(shape, Arm("hfgolf"), 1)).config
    tokens = load_tokens(config.data, config.tokenizer)
    if len(tokens.tokenizer) != shape.vocabulary:
        raise SystemExit(f"error: the tokenizer has {len(tokens.tokenizer)} entries, not {shape.vocabulary}.")
    blocks = num_blocks(len(tokens.train), shape.context)
    positions = np.arange(num_steps * shape.sequences).reshape(num_steps, shape.sequences)
    starts = [block_starts(config.run.seed, step, blocks, shape.context) for step in positions]
    np.save(path, gather(tokens.train, np.concatenate(starts), shape.context).numpy())


@contextmanager
def started(job: Job) -> Iterator[Connection]:
    """Start an arm's process, and stop it after the `with` block."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_arm, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        with suppress(OSError):
            ours.send((0, False))
        process.join(30)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def receive(connection: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = connection.recv()
        return message
    except EOFError:
        return {"error": "its process died, perhaps because memory ran out"}


def take_turns(
    connections: dict[str, Connection], warmup_steps: int, steps: int, repetitions: int
) -> dict[str, dict[str, Any]]:
    """Let the arms make their steps in turns, in reverse order in every second round.

    connections: of the arms that are ready. Returns for each arm its losses by step, its seconds per step by round, and
    its peak memory after the warmup in bytes. An arm that fails gets an "error" and skips the remaining rounds.
    """
    rows: dict[str, dict[str, Any]] = {name: {"losses": [], "seconds": []} for name in connections}
    for repetition in range(-1, repetitions):
        for name in list(connections) if repetition % 2 else reversed(connections):
            if "error" in rows[name]:
                continue
            with suppress(OSError):
                connections[name].send((warmup_steps if repetition < 0 else steps, repetition == 0))
            figures = receive(connections[name])
            if "error" in figures:
                rows[name] |= figures
                continue
            rows[name]["losses"] += figures["losses"]
            if repetition >= 0:
                rows[name]["seconds"].append(figures["seconds"])
                rows[name]["peak_bytes"] = figures["peak_bytes"]
    return rows


def compare(rows: dict[str, dict[str, Any]], warmup_steps: int) -> None:
    """Add "step_seconds", and "faster" and "memory" relative to Trainer's fastest arm (or the first arm), to each arm.

    Raises ValueError if arms with the same model and optimizer differ in their first losses, because then they do not
    do the same work.
    """
    ready = {name: row for name, row in rows.items() if "error" not in row}
    for row in ready.values():
        row["step_seconds"] = median(row["seconds"])
    theirs = [row for name, row in ready.items() if ARMS[name].program == "trainer"]
    if ready:
        best = min(theirs or [*ready.values()][:1], key=lambda row: row["step_seconds"])
        for row in ready.values():
            row["faster"] = median(a / b for a, b in zip(best["seconds"], row["seconds"], strict=True))
            row["memory"] = row["peak_bytes"] / best["peak_bytes"]
    same = [name for name in ready if ARMS[name].is_gpt2 and ARMS[name].optimizer == "adamw"]
    for name in same[1:]:
        pairs = zip(ready[name]["losses"][:warmup_steps], ready[same[0]]["losses"][:warmup_steps], strict=True)
        off_by = max(abs(loss - first) for loss, first in pairs)
        are_exact = all(ARMS[arm].precision == "no" and not ARMS[arm].uses_tf32 for arm in (name, same[0]))
        precision = "no" if are_exact else "bf16"
        if not off_by <= TOLERANCES[precision]:
            raise ValueError(f"{name}: its losses differ by {off_by:.4f} nats per token from those of {same[0]}")


def measure(
    shape: Shape, device: str, names: list[str], threads: int, warmup: int, steps: int, repetitions: int
) -> Any:
    """Return a row for each arm, in the order of names."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tokens = Path(folder) / "tokens.npy"
        write_tokens(shape, warmup + steps * repetitions, tokens)
        starting = {}
        for name in names:
            if ARMS[name].program == "litgpt" and importlib.util.find_spec("litgpt") is None:
                rows[name] = {"error": "not installed"}
                continue
            starting[name] = stack.enter_context(started(Job(ARMS[name], shape, device, threads, tokens)))
        rows |= {name: receive(connection) for name, connection in starting.items()}  # they get ready at once
        connections = {name: connection for name, connection in starting.items() if "error" not in rows[name]}
        for name, row in take_turns(connections, warmup, steps, repetitions).items():
            rows[name] |= row
    compare(rows, warmup)
    return rows


def show(rows: dict[str, dict[str, Any]], shape: Shape, device: str) -> None:
    tokens = shape.sequences * shape.context
    flops = next((row["flops_per_second_of_peak"] for row in rows.values() if "flops_per_second_of_peak" in row), 0.0)
    heads = ("ms/step", 11), ("from", 9), ("to", 9), ("tokens/s", 11), ("faster", 8), ("memory", 12), ("ratio", 7)
    print(" " * 23 + "".join(f"{head:>{width}}" for head, width in heads) + "   loss" + "    MFU" * (device == "cuda"))
    for name, row in rows.items():
        if "error" in row:
            print(f"{name:<23} skipped: {row['error']}")
            continue
        seconds, rate = row["step_seconds"], tokens / row["step_seconds"]
        line = f"{name:<23}{1e3 * seconds:>11,.1f}{1e3 * min(row['seconds']):>9,.1f}{1e3 * max(row['seconds']):>9,.1f}"
        line += f"{rate:>11,.0f}{row.get('faster', math.nan):>8.2f}{row['peak_bytes'] / 1e6:>9,.0f} MB"
        line += f"{row.get('memory', math.nan):>7.2f}{row['losses'][-1]:>7.3f}"
        if device == "cuda" and ARMS[name].program != "litgpt":  # its matmuls differ, so the FLOPs do not apply
            line += f"{rate * row.get('flops_per_second_of_peak', flops):>7.1%}"
        print(line + ("" if ARMS[name].is_gpt2 else "  another model"))


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--shapes", nargs="+", choices={*SHAPES["cpu"], *SHAPES["cuda"]}, help="only these")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these")
    parser.add_argument("--sequences", type=int, help="sequences per step, instead of the shape's")
    parser.add_argument("--steps", type=int, help="steps per arm and round (2; on a GPU 10)")
    parser.add_argument("--warmup_steps", type=int, default=3, help="steps before the rounds (3)")
    parser.add_argument("--threads", type=int, help="CPU threads (one per core)")
    arguments = parser.parse_args()

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # otherwise Trainer would split the batch over all GPUs
    device = arguments.device
    threads = arguments.threads or len(os.sched_getaffinity(0))
    steps = arguments.steps or (10 if device == "cuda" else 2)
    results = []
    for name in arguments.shapes or SHAPES[device]:
        shape = SHAPES[device][name]
        arms = arguments.arms or shape.arms or [arm for arm in ARMS if device == "cuda" or not ARMS[arm].only_on_gpu]
        shape = dataclasses.replace(shape, sequences=arguments.sequences or shape.sequences)
        rows = measure(shape, device, list(arms), threads, arguments.warmup_steps, steps, arguments.repetitions)
        print(f"\n{name}: {shape.sequences} x {shape.context} tokens per step, {threads} threads")
        show(rows, shape, device)
        results.append({"shape": name, **dataclasses.asdict(shape), "arms": rows})
    clock = "process time" if device == "cpu" and threads == 1 else "wall clock"
    packages = ["torch", "transformers", *(["litgpt"] if importlib.util.find_spec("litgpt") else [])]
    write(arguments.output, packages, threads=threads, steps=steps, clock=clock, results=results)


if __name__ == "__main__":
    main()
