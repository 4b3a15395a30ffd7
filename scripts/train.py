"""Train a GPT from text: accelerate launch scripts/train.py --config configs/small.yaml"""

import logging
import os
import sys

from hfgolf.command_line import load_config, run_command
from hfgolf.errors import UserError
from hfgolf.train.signals import Signals

_DESCRIPTION = "Train a GPT from text. With --verbose, also print each detail of the start, such as parameter groups."


def main() -> None:
    from hfgolf.train.console import console

    with Signals() as signals, console:  # before the slow imports
        train_once(signals)


def train_once(signals: Signals) -> None:
    """Train the run of the command line, unless it is already complete."""
    if len(sys.argv) == 1:
        command = sys.argv[0] if sys.argv[0].startswith("hfgolf ") else f"python {sys.argv[0]}"
        raise UserError(
            f"name your text, a config, or both, and any values:\n  {command} my.txt\n"
            f"  {command} --config small --train.max_minutes 5"
        )
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    resolved = load_config(arguments, _DESCRIPTION)  # before importing torch, so that --help and errors come at once
    from hfgolf.data.files import require_paths
    from hfgolf.run.folder import run_folder
    from hfgolf.train.console import console, quiet_libraries, start_log
    from hfgolf.wording import labeled

    folder, logger = run_folder(resolved.config), logging.getLogger("hfgolf")
    if os.environ.get("WORLD_SIZE", "1") == "1" and not folder.path.exists():
        require_paths(resolved.config.data)
    is_main_process = os.environ.get("RANK", "0") == "0"
    start_log(is_main_process, is_verbose="--verbose" in sys.argv)
    logger.info("%s", labeled("run", str(folder.path)))
    if is_main_process:
        console.open()
    console.now("loading torch")

    from hfgolf.ranks import decide, together
    from hfgolf.train.claim import changed_text, completed, damage
    from hfgolf.train.finish import show_summary
    from hfgolf.train.loop import train
    from hfgolf.train.process import processes, resolve_precision

    quiet_libraries()
    resolved = resolve_precision(resolved)  # decide it now, to compare it with that of a complete run
    with together(processes().num_processes):
        summary = decide(lambda: completed(folder, resolved))
        if summary:
            logger.info("%s is complete; to train again, choose another --run.name or delete that folder", folder.path)
            changes = changed_text(folder, resolved.config) if is_main_process else []
            if changes:
                logger.warning("the text has changed since it was trained (%s)", ", ".join(changes))
            show_summary(summary)
            return
        damaged = decide(lambda: damage(folder, resolved))
        if damaged:
            logger.warning("%s: %s; rebuilding it from the checkpoints", folder.path, damaged)
            resolved = resolved.resolve("auto", train__resume="auto")
        train(resolved, signals)


if __name__ == "__main__":
    run_command(main)
