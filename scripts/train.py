"""Train a GPT from text: accelerate launch scripts/train.py --config configs/small.yaml"""

import logging
import os

from hfgolf.command_line import load_config, run_command
from hfgolf.train.signals import Signals


def main() -> None:
    with Signals() as signals:  # before the imports, which take seconds
        train_once(signals)


def train_once(signals: Signals) -> None:
    """Train as the command line says, unless that run is complete already."""
    resolved = load_config()  # before torch is imported, so that --help and a wrong key answer at once
    from hfgolf.run.folder import run_folder
    from hfgolf.train.claim import changed_text, completed, damage
    from hfgolf.train.console import show_log
    from hfgolf.train.finish import show_summary
    from hfgolf.train.loop import train
    from hfgolf.train.process import resolve_precision

    is_main_process = os.environ.get("RANK", "0") == "0"
    show_log(is_main_process)
    resolved = resolve_precision(resolved)  # decided, it can be compared with that of a run that is complete
    folder, logger = run_folder(resolved.config), logging.getLogger("hfgolf")
    summary = completed(folder, resolved)
    if summary:
        logger.info("%s is complete; another --run.name, or no such folder, trains anew", folder.path)
        changes = changed_text(folder, resolved.config) if is_main_process else []
        if changes:
            logger.warning("it was trained on other text than there is now (%s)", ", ".join(changes))
        show_summary(summary)
        return
    damaged = damage(folder, resolved)
    if damaged:
        logger.warning("%s: %s; making it again from the checkpoints", folder.path, damaged)
        resolved = resolved.resolve("auto", train__resume="auto")
    train(resolved, signals)


if __name__ == "__main__":
    run_command(main)
