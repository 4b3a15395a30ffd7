"""The command `hfgolf`: one verb per script, which runs as if started by its path.

Knows the verbs and nothing of what they do. A script is loaded when its verb is used, so that `hfgolf --help` is quick.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from hfgolf.command_line import SCRIPTS, run_command
from hfgolf.errors import UserError
from hfgolf.wording import close_match

VERBS = {
    "train": ("train", "train a GPT: hfgolf train my.txt, or hfgolf train --config small"),
    "generate": ("generate", "write text with a model"),
    "chat": ("chat", "talk with a model, line by line"),
    "evaluate": ("evaluate", "the loss and bits per byte of a model on text, or its results on tasks"),
    "report": ("make_report", "the page of one run, or of several side by side"),
    "watch": ("watch", "a run's page in the browser while it trains"),
    "doctor": ("doctor", "what is wrong with a run, why, and what to change"),
    "compare": ("compare_runs", "configs over several seeds, with p-values"),
    "export": ("export", "a checkpoint as a model; a model for transformers or llama.cpp"),
    "push": ("push_to_hub", "put a run's model on the Hub"),
    "plan": ("plan", "parameters, memory, time and cost of a run, before it starts"),
    "prepare": ("prepare_data", "tokenize the text of a config before training"),
    "find_lr": ("find_lr", "learning rates for a config"),
    "schedule": ("show_schedule", "the learning rate and all else that follows a schedule"),
    "vocabulary": ("vocabulary_study", "what the size of a vocabulary costs and buys on your text"),
    "profile": ("profile_step", "where the time of a step goes"),
    "roofline": ("roofline", "what this machine can compute, and what a step reaches"),
    "verify_resume": ("verify_resume", "proof that a run survives kill -9 on this machine"),
    "golf plan": ("golf_plan", "which shape to train for a number of bytes and minutes"),
    "golf export": ("golf_export", "fit a model into a number of bytes"),
    "golf score": ("golf_score", "score such an export once more, from the bytes on disk"),
    "golf record": ("golf_record", "whether runs beat a record by more than their noise"),
}
"""{verb: (script, what it is for)}."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `hfgolf VERB ...` and exit. arguments: None for those of the process."""
    run_command(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int | None:
    words = 2 if arguments[:1] == ["golf"] else 1
    verb = " ".join(arguments[:words])
    if verb in ("", "-h", "--help", "golf", "golf -h", "golf --help"):
        print(_help(verb.split(" ")[0] if verb.startswith("golf") else ""))
        return 0
    if verb == "--version":
        from hfgolf import __version__

        print(f"hfgolf {__version__}")
        return 0
    if verb not in VERBS:
        meant = f"train {verb}" if os.path.exists(verb) else close_match(verb, VERBS)
        advice = f"did you mean {meant}?" if meant else "`hfgolf --help` lists the commands."
        raise UserError(f"hfgolf: there is no command {verb}; {advice}")
    script, _ = VERBS[verb]
    sys.argv = [f"hfgolf {verb}", *arguments[words:]]  # usage texts and the record of a run show it
    return _main_of(script)()


def _main_of(script: str) -> Callable[[], int | None]:
    """Return the main() of a script."""
    spec = importlib.util.spec_from_file_location(f"hfgolf.scripts.{script}", SCRIPTS / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main


def _help(prefix: str) -> str:
    verbs = {verb: text for verb, (_, text) in VERBS.items() if verb.startswith(prefix)}
    width = max(map(len, verbs))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in verbs.items()]
    usage = "Train a small GPT from text. Usage: hfgolf COMMAND ...; hfgolf COMMAND --help shows its options."
    return "\n".join([usage, "", *lines])
