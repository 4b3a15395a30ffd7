"""Plan a run before starting it: hfgolf plan --config small

Prints the model's parameters and FLOPs, the memory that training needs and whether it fits, steps, tokens, time and
cost. With a budget (--dollars, --minutes), also prints how many steps and tokens it pays for.
Trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

from hfgolf.commands.options import ScriptParser, within
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.system.errors import UserError
from hfgolf.system.wording import duration

if TYPE_CHECKING:
    from hfgolf.commands.needs import Length, Machine, Needs, Speed, TokenCounts
    from hfgolf.config.sections import RunConfig

ITEMS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "ema": "average of the weights",
    "buckets": "DDP's buckets",
    "casts": "16-bit weights",
    "activations": "activations",
    "loss": "loss, in chunks of logits",
    "backward": "backward pass",
    "update": "update",
    "peak": "peak",
}


def main() -> None:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE --section.key value. For several processes:\n"
        "accelerate launch --num_processes 8 -m hfgolf plan --config ...\n"
        "With accelerate's --config_file configs/accelerate/fsdp2.yaml, it plans for FSDP2.",
    )
    parser.add_argument("--device", help="a GPU to plan for instead of this machine, such as H100")
    parser.add_argument(
        "--tokens_per_second", type=within(1e-6, 1e12), help="speed of all processes together, as in a log line"
    )
    parser.add_argument("--measure", action="store_true", help="measure the speed: a few steps on random tokens")
    parser.add_argument("--mfu", type=within(1e-6, 1.0), help="fraction of the device's peak to assume as speed (0.4)")
    parser.add_argument("--dollars", type=within(1e-6, 1e12), help="budget in dollars; needs a price")
    parser.add_argument("--minutes", type=within(1e-6, 1e12), help="budget in minutes")
    parser.add_argument(
        "--price_per_hour",
        type=within(1e-6, 1e12),
        help="dollars per hour for the whole machine (default: run.price_per_hour)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, run_options = parser.parse_known_args()
    _check(options)
    resolved = load_config(run_options)

    from hfgolf.commands.needs import affordable_steps, count_tokens, find_needs, meta_model, run_length
    from hfgolf.train.console import show_log
    from hfgolf.train.init_from import take_architecture

    show_log(is_main_process=False)  # warnings only
    resolved = take_architecture(resolved)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    config, machine = find_machine(resolved, options.device, processes)
    price = options.price_per_hour or config.run.price_per_hour
    budget = find_budget(options.dollars, options.minutes, price)
    data = count_tokens(config)
    needs = find_needs(config, meta_model(config, data.vocabulary, machine.device), machine)
    speed = choose_speed(options, config, data, needs, machine)
    steps, note = planned_steps(config, data, speed)
    length = None if steps is None else run_length(config, data, speed, steps, price)
    affordable = None
    if budget is not None:
        stated, seconds = budget
        if needs.largest_micro_batch is None:
            raise UserError(f"{stated}: {needs.problem}")
        steps = affordable_steps(config, data, speed, seconds, stated)
        affordable = run_length(config, data, speed, steps, price)
    if os.environ.get("RANK", "0") != "0":
        return
    if options.json:
        print(as_json(config, needs, data, machine, speed, length, affordable))
        return
    print("\n".join(describe_needs(config, needs, data, machine, speed)))
    print("\n".join(describe_length(length, sum(needs.parameters.values()), price, note)))
    if affordable is not None:
        print(describe_budget(affordable, length, stated, seconds))


def _check(options: argparse.Namespace) -> None:
    speeds = [f"--{name}" for name in ("tokens_per_second", "measure", "mfu") if getattr(options, name)]
    if len(speeds) > 1:
        raise UserError(f"{' and '.join(speeds)} each set the speed; use only one.")
    if options.measure and options.device:
        raise UserError("--measure: only this machine can be measured; remove --device, or set --mfu.")


def find_machine(resolved: ResolvedConfig, name: str | None, processes: int) -> tuple[RunConfig, Machine]:
    """Return the config with its precision decided, and the machine to plan for, sharded as accelerate was told."""
    import torch

    from hfgolf.commands.needs import machine_with, this_machine
    from hfgolf.train.decisions import choose_precision
    from hfgolf.train.launched import check_settings
    from hfgolf.train.process import share_of_cores, tune_memory

    if name is None:
        precision, threads = choose_precision(resolved)[0], resolved.config.train.cpu_threads
        config = resolved.config.replace(train__mixed_precision=precision)
        # same as the run, before anything is measured
        torch.set_num_threads(threads if isinstance(threads, int) else share_of_cores(processes))
        tune_memory(config)
        machine = this_machine(precision, processes)
    else:
        machine, usual = machine_with(name, resolved.config.train.mixed_precision, processes)
        config = resolved.config.replace(train__mixed_precision=usual)
    return config, dataclasses.replace(machine, is_sharded=check_settings(os.environ))


def choose_speed(
    options: argparse.Namespace, config: RunConfig, data: TokenCounts, needs: Needs, machine: Machine
) -> Speed:
    """Return the stated, measured or assumed speed."""
    import torch

    from hfgolf.commands.needs import ASSUMED_MFU, Speed, assumed_speed, measured_speed

    if options.tokens_per_second:
        return Speed(options.tokens_per_second, "stated")
    if options.measure:
        torch.manual_seed(config.run.seed)
        return measured_speed(config, data.vocabulary, needs.micro_batch_size, machine)
    return assumed_speed(needs.flops, machine, options.mfu or ASSUMED_MFU, config.model.gradient_checkpointing)


def find_budget(dollars: float | None, minutes: float | None, price: float | None) -> tuple[str, float] | None:
    """Return the tighter budget as (option, seconds it pays for); None if there is no budget."""
    budgets = []
    if dollars is not None:
        if not price:
            raise UserError("--dollars: the price is not known; set --price_per_hour.")
        budgets.append((3600 * dollars / price, f"--dollars {dollars:g} at {price:g} per hour"))
    if minutes is not None:
        budgets.append((60 * minutes, f"--minutes {minutes:g}"))
    return min(((stated, seconds) for seconds, stated in budgets), key=lambda b: b[1]) if budgets else None


def planned_steps(config: RunConfig, data: TokenCounts, speed: Speed) -> tuple[int | None, str]:
    """Return the steps of the run (None if unknown) and a note about them."""
    from hfgolf.data.batches import num_blocks
    from hfgolf.train.clock import step_limit

    train, batch = config.train, config.batch
    if train.max_epochs and data.train_tokens is None:
        return None, "train.max_epochs needs the number of tokens"
    blocks = num_blocks(data.train_tokens, batch.sequence_length) if train.max_epochs and data.train_tokens else 0
    by_steps = step_limit(train, batch, blocks)
    by_clock = 60 * (train.max_minutes or math.inf) * speed.tokens_per_second / batch.tokens_per_step
    if by_clock < by_steps:
        return max(1, int(by_clock)), "limited by train.max_minutes, which also counts evaluations and compiling"
    return int(by_steps), ""


def describe_needs(config: RunConfig, needs: Needs, data: TokenCounts, machine: Machine, speed: Speed) -> list[str]:
    """Return the lines of a plan."""
    from hfgolf.measure.memory import fragmented_bytes

    batch, flops, total = config.batch, needs.flops, sum(needs.parameters.values())
    precision = {"no": "fp32"}.get(str(config.train.mixed_precision), config.train.mixed_precision)
    lines = [f"{config.run.name}: {total:,} parameters, vocabulary {data.vocabulary:,}"]
    lines += columns((part, f"{count:,}", f"{count / total:.1%}") for part, count in needs.parameters.items())
    lines += columns(
        (f"updated by {rule}", f"{count:,}", f"{count / total:.1%}") for rule, count in needs.rules.items()
    )
    lines += ["", f"{scaled(flops.useful)}FLOPs per token, forward and backward"]
    spent = {"matrices": flops.matrices, "attention": flops.attention, "head": flops.head}
    lines += columns((name, f"{scaled(count)}FLOPs", f"{count / flops.useful:.1%}") for name, count in spent.items())
    recomputed = "recomputed in addition" if config.model.gradient_checkpointing else "checkpointing would add"
    more = f"{flops.recomputation / flops.useful:.1%}"
    lines += columns([(recomputed, f"{scaled(flops.recomputation)}FLOPs", more)])
    lines += [
        "",
        f"memory, {precision}, {needs.micro_batch_size} x {batch.sequence_length} tokens x {needs.accumulation_steps}"
        f" accumulation steps x {machine.processes} process{'es' if machine.processes > 1 else ''}"
        f"{', FSDP2' if machine.is_sharded else ''}, uncompiled",
    ]
    stated = [
        dataclasses.asdict(needs.memory_without_checkpointing),
        dataclasses.asdict(needs.memory_with_checkpointing),
    ]
    names = ITEMS | {"buckets": "gathered by FSDP2"} if machine.is_sharded else ITEMS
    rows = [(name, *(gb(memory[item]) for memory in stated)) for item, name in names.items() if stated[0][item]]
    lines += columns([("checkpointing", "no", "yes"), *rows])
    if machine.device == "cpu":
        lost = gb(fragmented_bytes(needs.memory))
        lines.append(
            f"  the peak counts tensors only; `top` also shows {lost} of heap fragmentation, and Python itself"
        )
    lines.append(describe_fit(needs, machine))
    if data.train_tokens is None:
        lines += ["", f"data: not counted ({data.note})"]
    else:
        lines += ["", f"data: {data.train_tokens:,} train tokens, {data.val_tokens:,} validation tokens"]
    return [*lines, f"speed: {speed.tokens_per_second:,.0f} tokens/s ({speed.source})"]


def describe_fit(needs: Needs, machine: Machine) -> str:
    """Describe whether the run fits, and the largest micro-batch that would."""
    from hfgolf.measure.memory import MAX_CPU_TOKENS, USABLE_SHARE

    if needs.largest_micro_batch is None:
        return f"  does not fit: {needs.problem}"
    usable = f"{gb(needs.usable_bytes)} usable ({USABLE_SHARE:.0%} of the free memory on {machine.name})"
    largest = f"the largest micro-batch that fits is {needs.largest_micro_batch}"
    if machine.device == "cpu":
        largest += f" (a CPU is slower with more than {MAX_CPU_TOKENS:,} tokens)"
    return f"  {'fits' if needs.fits else 'does not fit'} into {usable}; {largest}"


def describe_length(length: Length | None, parameters: int, price: float | None, note: str) -> list[str]:
    """Return the lines on steps, time and cost. note: a remark about the steps."""
    if length is None:
        return [f"run: number of steps unknown ({note})"]
    parts = [
        f"{length.steps:,} steps",
        f"{length.tokens:,} tokens",
        f"{length.tokens / parameters:.3g} per parameter",
    ]
    if length.epochs is not None:
        parts.append(f"{length.epochs:.3g} epochs")
    lines = [f"run: {', '.join(parts)}{f' ({note})' if note else ''}"]
    known = length.evaluation_seconds is not None
    evaluations = f"about {duration(length.evaluation_seconds or 0.0)} of evaluations" if known else "evaluations"
    lines.append(f"time: {duration(length.seconds)} of steps, plus {evaluations}, startup, compiling and saves")
    if length.dollars is not None:
        lines.append(f"cost: ${length.dollars:,.2f} at ${price:g} per hour")
    return lines


def describe_budget(affordable: Length, length: Length | None, stated: str, seconds: float) -> str:
    """Describe what the budget pays for, and whether the config's run is within it."""
    epochs = "" if affordable.epochs is None else f", {affordable.epochs:.3g} epochs"
    pays_for = f"{affordable.steps:,} steps, {affordable.tokens:,} tokens{epochs}"
    answer = f"\nbudget: {stated} ({duration(seconds)}) pays for {pays_for}"
    if length is None:
        return answer
    if length.steps > affordable.steps:
        return (
            f"{answer}; the config's {length.steps:,} steps do not fit, but --train.max_steps {affordable.steps} does"
        )
    return f"{answer}; the config's {length.steps:,} steps fit"


def as_json(
    config: RunConfig,
    needs: Needs,
    data: TokenCounts,
    machine: Machine,
    speed: Speed,
    length: Length | None,
    affordable: Length | None,
) -> str:
    """Return everything as JSON; null means unknown or not requested."""
    parts: dict[str, Any] = {"data": data, "machine": machine, "speed": speed, "length": length, "budget": affordable}
    numbers: dict[str, Any] = {"run": config.run.name, "precision": config.train.mixed_precision}
    numbers |= dataclasses.asdict(needs) | {"fits": needs.fits}
    numbers |= {name: part and dataclasses.asdict(part) for name, part in parts.items()}
    return json.dumps(numbers, indent=1)


def columns(rows: Any) -> list[str]:
    """Format rows of a name and figures as lines with columns."""
    return [f"  {name:<26}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in rows]


def scaled(number: float) -> str:
    """Format a number with three digits and an SI prefix: "1.23 G"."""
    power = max(0, min(4, int(math.log10(max(number, 1.0)) // 3)))
    return f"{number / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}"


def gb(num_bytes: int) -> str:
    """Format bytes in GB, or in MB below one GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
