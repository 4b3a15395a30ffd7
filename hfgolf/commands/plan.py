"""Plan a run before starting it: hfgolf plan --config small

Prints the model's parameters and FLOPs, the memory that training needs and whether it fits, steps, tokens, time and
cost. With --minutes or --dollars, also how many steps and tokens they pay for, and of a text without a config what
training would choose, after a few timed steps. Trains nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from hfgolf.commands.options import Answer, ScriptParser, bounded
from hfgolf.config.parse import ResolvedConfig, load_config
from hfgolf.system.errors import UserError
from hfgolf.system.wording import count_of, dollars, duration, epochs

if TYPE_CHECKING:
    from hfgolf.commands.needs import Length, Machine, Needs, TokenCounts
    from hfgolf.config.sections import RunConfig

ITEMS = {  # of TrainingMemory, whose other items are named as they are
    "optimizer": "optimizer state",
    "ema": "average of the weights",
    "buckets": "DDP's buckets",
    "casts": "16-bit weights",
    "loss": "loss, in chunks of logits",
    "backward": "backward pass",
}


def main() -> Answer:
    parser = ScriptParser(
        __doc__,
        "Also takes the options of hfgolf train: --config FILE --section.key value. For several processes:\n"
        "accelerate launch --num_processes 8 -m hfgolf plan --config ...\n"
        "With accelerate's --config_file configs/accelerate/fsdp2.yaml, it plans for FSDP2.",
    )
    parser.add_argument("--device", help="a GPU to plan for instead of this machine, such as H100")
    text = "speed of all processes together, as in a log line or from hfgolf profile (default: 0.4 of the peak)"
    parser.add_argument("--tokens_per_second", **bounded(1e-6, 1e12, text))
    options, run_options = parser.parse_known_args()
    resolved = load_config(run_options)
    if resolved.sources.get("data.files") == "command line" and not options.device:
        from hfgolf.data.files import require_paths

        require_paths(resolved.config.data)

    from hfgolf.commands import needs
    from hfgolf.measure.memory import fragmented_bytes
    from hfgolf.train.autopilot import choose
    from hfgolf.train.console import show_log
    from hfgolf.train.init_from import named_by_weights, take_architecture
    from hfgolf.train.process import processes as accelerate_processes

    show_log(is_main_process=False)  # warnings only
    resolved = take_architecture(resolved)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    config, machine = find_machine(resolved, options.device, processes)
    chosen = None
    if resolved.is_open:
        for option in ("device", "tokens_per_second"):
            if getattr(options, option):
                how = "the minutes choose by steps that are timed here; leave it out, or add --config small"
                raise UserError(f"--{option}: {how}.")
        device, may_teach = accelerate_processes().device, processes == 1
        chosen = choose(ResolvedConfig(config, resolved.sources), device, processes, may_teach)
        config = config.replace(**chosen.values)
    price, minutes = config.run.price_per_hour, config.train.max_minutes
    with named_by_weights(resolved):
        data = needs.count_tokens(config)
    needed = needs.find_needs(config, needs.meta_model(config, data.vocabulary, machine.device), machine)
    recomputes, teachers = config.model.gradient_checkpointing, len(config.train.distill_from)
    assumed = needs.assumed_speed(needed.flops, machine, recomputes, teachers)
    speed = options.tokens_per_second or (chosen.tokens_per_second if chosen else assumed)
    source = "stated" if options.tokens_per_second else "timed" if chosen else machine.assumed()
    steps, note = planned_steps(config, data, speed)
    length = None if steps is None else needs.run_length(config, data, speed, steps, price)
    affordable = None
    if minutes is not None and resolved.sources["train.max_minutes"] == "command line":
        if needed.largest_micro_batch is None:
            raise UserError(f"train.max_minutes: {needed.problem}")
        steps = needs.affordable_steps(config, data, speed, 60 * minutes)
        affordable = needs.run_length(config, data, speed, steps, price)
        length = affordable if length and note else length  # if the minutes end the run, they say how long it is
    milestones = needs.milestone_steps(config, data)
    parts: dict[str, Any] = {"data": data, "machine": machine, "length": length, "budget": affordable}
    numbers: dict[str, Any] = {"run": config.run.name, "precision": config.train.mixed_precision}
    numbers |= dataclasses.asdict(needed) | {"fits": needed.fits}
    numbers["fragmented_bytes"] = fragmented_bytes(needed.memory) if machine.device == "cpu" else 0
    numbers |= {name: part and dataclasses.asdict(part) for name, part in parts.items()}  # None: unknown
    numbers["note"] = note or None
    numbers["milestones"] = milestones
    numbers["chosen"] = chosen and chosen.values
    numbers["speed"] = {"tokens_per_second": speed, "source": source}
    lines = [*chosen.lines, ""] if chosen else []
    lines += [*describe_needs(config, needed, data, machine), f"speed: {speed:,.0f} tokens/s ({source})"]
    lines += describe_length(length, sum(needed.parameters.values()), price, note)
    if milestones:
        last = math.inf if length is None else length.steps
        lines += ["milestones:", *columns((name, describe_due(step, last)) for name, step in milestones.items())]
    if affordable is not None and minutes is not None:
        read = "" if affordable.epochs is None else f", {epochs(affordable.epochs)}"
        paid = f"{count_of(affordable.steps, 'step')}, {affordable.tokens:,} tokens{read}"
        fit, limit = "", config.train.max_steps
        if limit is not None:
            over = f" do not fit, but --train.max_steps {affordable.steps} does"
            fit = f"; the config's {limit:,} steps{over if limit > affordable.steps else ' fit'}"
        money = "" if price is None else f", {dollars(minutes / 60 * price)} at ${price:g} per hour,"
        lines.append(f"\nbudget: {duration(60 * minutes)}{money} pay for {paid}{fit}")
    return Answer(numbers, "\n".join(lines))


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


def planned_steps(config: RunConfig, data: TokenCounts, tokens_per_second: float) -> tuple[int | None, str]:
    """Return the steps of the run (None if unknown) and a note about them."""
    from hfgolf.data.batches import num_blocks
    from hfgolf.train.clock import step_limit

    train, batch = config.train, config.batch
    if train.max_epochs and data.train_tokens is None:
        return None, "train.max_epochs needs the number of tokens"
    blocks = num_blocks(data.train_tokens, batch.sequence_length) if train.max_epochs and data.train_tokens else 0
    by_steps = step_limit(train, batch, blocks)
    by_clock = 60 * (train.max_minutes or math.inf) * tokens_per_second / batch.tokens_per_step
    if by_clock < by_steps:
        return max(1, int(by_clock)), "limited by train.max_minutes, which also counts evaluations and compiling"
    return int(by_steps), ""


def describe_needs(config: RunConfig, needs: Needs, data: TokenCounts, machine: Machine) -> list[str]:
    """Return the lines of a plan."""
    from hfgolf.measure.memory import MAX_CPU_TOKENS, USABLE_SHARE, fragmented_bytes

    batch, flops, total = config.batch, needs.flops, sum(needs.parameters.values())
    precision = {"no": "fp32"}.get(str(config.train.mixed_precision), config.train.mixed_precision)
    lines = [f"{config.run.name}: {total:,} parameters, vocabulary {data.vocabulary:,}"]
    parts = {part: count for part, count in needs.parameters.items() if count or part != "frozen"}
    lines += columns((part, f"{count:,}", f"{count / total:.1%}") for part, count in parts.items())
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
    without, with_ = map(dataclasses.asdict, (needs.memory_without_checkpointing, needs.memory_with_checkpointing))
    names = ITEMS | {"buckets": "gathered by FSDP2"} if machine.is_sharded else ITEMS
    rows = [(names.get(item, item), gb(count), gb(with_[item])) for item, count in without.items() if count]
    lines += columns([("checkpointing", "no", "yes"), *rows])
    if machine.device == "cpu":
        lost = gb(fragmented_bytes(needs.memory))
        lines.append(
            f"  the peak counts tensors only; `top` also shows {lost} of heap fragmentation, and Python itself"
        )
    if needs.largest_micro_batch is None:
        lines.append(f"  does not fit: {needs.problem}")
    else:
        slow = f" (a CPU is slower with more than {MAX_CPU_TOKENS:,} tokens)" if machine.device == "cpu" else ""
        lines.append(
            f"  {'fits' if needs.fits else 'does not fit'} into {gb(needs.usable_bytes)} usable ({USABLE_SHARE:.0%} of"
            f" the free memory on {machine.name}); the largest micro-batch that fits is"
            f" {needs.largest_micro_batch}{slow}"
        )
    if data.train_tokens is None:
        lines += ["", f"data: not counted ({data.note})"]
    else:
        lines += ["", f"data: {data.train_tokens:,} train tokens, {data.val_tokens:,} validation tokens"]
    return lines


def describe_length(length: Length | None, parameters: int, price: float | None, note: str) -> list[str]:
    """Return the lines on steps, time and cost. note: a remark about the steps."""
    if length is None:
        return [f"run: number of steps unknown ({note})"]
    each = f"{length.tokens / parameters:.3g} per parameter"
    read = "" if length.epochs is None else f", {epochs(length.epochs)}"
    counted, rest = f"{duration(length.seconds)} of steps", "evaluations, startup"
    if length.evaluation_seconds is not None:
        counted, rest = f"{counted} and {duration(length.evaluation_seconds)} of evaluations", "startup"
    remark = f" ({note})" if note else ""
    lines = [
        f"run: {count_of(length.steps, 'step')}, {length.tokens:,} tokens, {each}{read}{remark}",
        f"time: about {counted}; {rest}, compiling and saves are not counted",
    ]
    if length.dollars is not None:
        lines.append(f"cost: {dollars(length.dollars)} at ${price:g} per hour")
    return lines


def describe_due(step: int | None, last_step: float) -> str:
    """Return the step of a milestone, or why none is known."""
    if step is None:
        return "unknown until the text is tokenized"
    return f"step {step:,}{' (not reached)' if step > last_step else ''}"


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
