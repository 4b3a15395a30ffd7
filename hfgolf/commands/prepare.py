"""Tokenize the text of a config before training: hfgolf prepare --config configs/small.yaml

Training then finds the tokens in the cache. Verifies the hashes of an existing cache. Builds no model and needs no GPU.
With --executor datatrove, many tasks share the files, on this machine or on a cluster with SLURM; the same command goes
on with the tasks that did not finish. The tokens are the same in every case.
"""

import dataclasses
import time
from importlib.util import find_spec

from hfgolf.command_line import load_config
from hfgolf.commands.options import ScriptParser, within
from hfgolf.errors import UserError


def main() -> None:
    parser = ScriptParser(__doc__, "Also takes the options of hfgolf train: --config FILE --section.key value.")
    parser.add_argument(
        "--executor", choices=["local", "datatrove"], default="local", help="who tokenizes: this process, or tasks"
    )
    parser.add_argument(
        "--tasks", type=within(1, 10**5), help="how many tasks (one for each GB, and at least one per worker)"
    )
    parser.add_argument(
        "--workers",
        type=within(1, 10**5),
        help="tasks at once (one per core; with --slurm no limit)",
    )
    parser.add_argument(
        "--slurm",
        nargs="+",
        metavar="KEY=VALUE",
        help="submit the tasks to SLURM: partition=cpu time=04:00:00, and if wanted cpus_per_task, mem_per_cpu_gb, qos,"
        " or any option of sbatch such as account",
    )
    arguments, run_options = parser.parse_known_args()
    if arguments.executor == "local" and (arguments.tasks or arguments.workers or arguments.slurm):
        raise UserError("--tasks, --workers and --slurm need --executor datatrove.")
    if arguments.executor == "datatrove" and find_spec("datatrove") is None:
        raise UserError("--executor datatrove needs the package datatrove; run `pip install datatrove`.")
    resolved = load_config(run_options, needs_limit=False)
    from hfgolf.data.files import require_paths

    require_paths(resolved.config.data)  # before loading torch
    from hfgolf.data.token_cache import load_tokens
    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    config = resolved.config
    if config.model.init_from is not None:
        from hfgolf.train.init_from import take_architecture  # late: it imports models

        config = take_architecture(resolved).config
    started_at = time.perf_counter()
    is_built: bool | None = False
    if arguments.executor == "datatrove":
        from hfgolf.data.datatrove_tasks import parse_slurm, tokenize_in_tasks

        slurm = parse_slurm(arguments.slurm)
        is_built = tokenize_in_tasks(config.data, config.tokenizer, arguments.tasks, arguments.workers, slurm)
        if is_built is None:
            return  # the jobs go on
    # memory-mapped: there is no training here that would need them in RAM
    tokens = load_tokens(dataclasses.replace(config.data, in_memory=False), config.tokenizer)
    tokens.check(wait=True)
    seconds = time.perf_counter() - started_at
    for name, stream in (("train", tokens.train), ("val", tokens.val)):
        num_bytes = stream.num_bytes
        counted = f" {num_bytes:>18,} bytes {num_bytes / len(stream):>6.2f} bytes per token" if num_bytes else ""
        if stream.is_target is not None:
            counted = f" {int(stream.is_target.sum()):>18,} of the assistant ({num_bytes:,} bytes of its text)"
        print(f"{name:<6}{len(stream):>16,} tokens{counted}")
    megabytes = (tokens.train.num_bytes + tokens.val.num_bytes) / 1e6
    is_built = is_built or not tokens.is_hit
    speed = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s" if is_built else "already cached"
    print(f"{tokens.path}: {speed}")
