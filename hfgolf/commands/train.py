"""Train a GPT from text: hfgolf train my.txt"""

import logging
import os
import sys

from hfgolf.commands.options import Answer
from hfgolf.config.parse import load_config
from hfgolf.system.signals import Signals


def main() -> Answer:
    """Train the run of the command line, unless it is already complete."""
    from hfgolf.train.console import console, quiet_libraries, start_log

    with Signals() as signals, console:  # before the slow imports
        arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
        resolved = load_config(arguments, verb="train")  # before torch, so that --help and errors come at once
        from hfgolf.data.files import require_paths
        from hfgolf.run.find_model import find_model
        from hfgolf.run.folder import run_folder
        from hfgolf.system.wording import labeled

        folder, logger = run_folder(resolved.config), logging.getLogger("hfgolf")
        if os.environ.get("WORLD_SIZE", "1") == "1" and not folder.path.exists():
            require_paths(resolved.config.data)
            if (weights := resolved.config.model.init_from) is not None:
                find_model(weights, "model.init_from", is_final=True)
        is_main_process = os.environ.get("RANK", "0") == "0"
        start_log(is_main_process, is_verbose="--verbose" in sys.argv)
        is_named = "run.name" in resolved.sources or resolved.config.train.resume not in (None, "auto")
        if is_named or not folder.config.exists():  # else train_once says which folder it is
            logger.info("%s", labeled("run", str(folder.path)))
        if is_main_process:
            console.open()
        console.now("loading torch")

        from hfgolf.api import train_once

        quiet_libraries()
        return Answer(train_once(resolved, signals=signals))
