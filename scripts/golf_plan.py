"""What to train for a number of bytes: python scripts/golf_plan.py --budget_bytes 500000 --minutes 10

Tries every shape and gives each the bits per weight that fill the budget; prints the ten that should score best, what
their bytes go to, and the options to train the first. --runs fits the prediction to your own finished runs.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, within

if TYPE_CHECKING:
    from hfgolf.compare.outcome import Outcome
    from hfgolf.tools.golf_plan import Candidate, Throughput


def main() -> None:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget_bytes", type=within(1, 10**12), required=True, help="bytes of the artifact and its code"
    )
    training = parser.add_mutually_exclusive_group(required=True)
    training.add_argument("--minutes", type=within(1e-6, 1e9), help="minutes of training")
    training.add_argument("--tokens", type=within(1, 10**15), help="tokens of training, if time does not matter")
    parser.add_argument("--runs", nargs="+", type=Path, help="six or more finished runs to fit loss and speed to")
    parser.add_argument("--device", help="a GPU to plan for instead of this machine, such as H100")
    parser.add_argument("--processes", type=within(1, 65536), default=1, help="devices that train together (1)")
    parser.add_argument("--mfu", type=within(1e-6, 1.0), help="fraction of the peak to assume as speed (0.4)")
    parser.add_argument("--sequence_length", type=within(1, 2**24), default=256, help="tokens of context (256)")
    parser.add_argument(
        "--bytes_per_token",
        nargs="+",
        metavar="ENTRIES=BYTES",
        help="vocabularies to consider, and the bytes of your text per token, such as 257=1 4096=3.27; see"
        " vocabulary_study.py (default: those of English web text)",
    )
    parser.add_argument(
        "--code_bytes", type=within(0, 10**9), default=10_000, help="bytes of the packed program (10000)"
    )
    parser.add_argument("--count", type=within(1, 1000), default=10, help="shapes to print (10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()

    from hfgolf.tools.golf_plan import (
        BYTES_PER_TOKEN,
        DEFAULT_SCALING,
        Budget,
        best_shapes,
        fit_scaling,
        read_runs,
    )

    runs = read_runs(arguments.runs) if arguments.runs else []
    scaling = fit_scaling(runs) if runs else DEFAULT_SCALING
    speed = None if arguments.tokens else find_speed(arguments, runs)
    vocabularies = parse_vocabularies(arguments.bytes_per_token) if arguments.bytes_per_token else BYTES_PER_TOKEN
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    budget = Budget(arguments.budget_bytes, seconds, arguments.tokens, arguments.code_bytes)
    found, more_bytes, more_training = (
        best_shapes(each, scaling, speed, vocabularies, arguments.sequence_length, arguments.count)
        for each in (budget, budget.scaled(num_bytes=1.1), budget.scaled(training=1.1))
    )
    gains = [found[0].bits_per_byte - other[0].bits_per_byte for other in (more_bytes, more_training)]
    if arguments.json:
        figures = [dataclasses.asdict(candidate) | {"options": candidate.shape.options()} for candidate in found]
        gain = dict(zip(("bytes", "training"), gains, strict=True))
        sources = {"loss": scaling.source, "speed": speed and speed.source}
        print(json.dumps({"candidates": figures, "gain_of_10_percent_more": gain, "sources": sources}))
        return
    print_plan(found, gains)
    print(f"loss: {scaling.source}")
    if len(vocabularies) > 1:
        print("vocabularies: told apart by their weights and their bytes per token only; train the best of each")
    if speed is not None:
        print(f"speed: {speed.source}")
    print(f"\n{found[0].shape.options()} --golf.budget_bytes {arguments.budget_bytes}")


def find_speed(arguments: argparse.Namespace, runs: "Sequence[Outcome]") -> "Throughput":
    """Return the speed that runs had, or that is assumed of a device."""
    from hfgolf.commands.needs import ASSUMED_MFU, machine_with, this_machine
    from hfgolf.hardware import DEVICES, find_device
    from hfgolf.tools.golf_plan import Throughput, fit_throughput

    if runs and arguments.device:
        raise UserError("--device: --runs have a speed of their own; leave one out.")
    if runs:
        return fit_throughput(runs)
    mfu = arguments.mfu or ASSUMED_MFU
    if arguments.device is None:
        machine = this_machine("bf16", arguments.processes)
    elif device := find_device(arguments.device):
        machine = machine_with(device, "bf16" if device.has_bf16 else "fp16", arguments.processes)
    else:
        known = ", ".join(device.name for device in DEVICES)
        raise UserError(f"--device: {arguments.device} is not in the table; known: {known}.")
    source = f"assumed: {mfu:.0%} of the peak of {machine.name}, {machine.peak_flops / 1e12:,.4g} TFLOP/s"
    return Throughput(mfu * machine.peak_flops, 0.0, source)


def parse_vocabularies(texts: Sequence[str]) -> dict[int, float]:
    """Return {entries: bytes per token}."""
    found = {}
    for text in texts:
        entries, _, num_bytes = text.partition("=")
        try:
            found[int(entries)] = float(num_bytes)
            if int(entries) < 257 or not 0 < float(num_bytes) < math.inf:
                raise ValueError
        except ValueError:
            raise UserError(
                f"--bytes_per_token: {text!r} is not ENTRIES=BYTES, such as 4096=3.27; allowed: 257 entries or more."
            ) from None
    return found


def print_plan(found: "Sequence[Candidate]", gains: Sequence[float]) -> None:
    """Print the candidates, the bytes of the first, and what more bytes or more training would gain."""
    print(f"{'bits/byte':>9} {'(gap)':>8} {'entries':>8} {'width':>6} {'layers':>6} {'mlp':>4} {'kv':>6}", end=" ")
    print(f"{'weights':>12} {'bits':>6} {'tokens':>15}")
    for each in found:
        shape = each.shape
        heads = f"{shape.num_key_value_heads}/{shape.num_attention_heads}"
        print(
            f"{each.bits_per_byte:>9.4f} {each.gap:>8.4f} {shape.vocab_size:>8,} {shape.hidden_size:>6}"
            f" {shape.num_hidden_layers:>6} {shape.mlp_ratio:>3}x {heads:>6} {shape.parameters:>12,} {each.bits:>6.2f}"
            f" {each.tokens:>15,.0f}"
        )
    best = found[0]
    print(f"\nbytes of the first: {', '.join(f'{part} {size:,}' for part, size in best.num_bytes.items())}", end="")
    print(f"; {sum(best.num_bytes.values()):,} in all, {best.embedding_bits:.2f} bits per weight of the embedding")
    binds = "bytes" if gains[0] > gains[1] else "training"
    print(f"10 % more bytes: -{gains[0]:.4f}; 10 % more training: -{gains[1]:.4f} bits per byte; what binds is {binds}")


if __name__ == "__main__":
    run_command(main)
