"""The command `hfgolf`: one verb per file of hfgolf/commands, loaded when it is used, so that `--help` is quick."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from hfgolf.system.command import run_command
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact_values
from hfgolf.system.wording import close_match

VERBS = {
    "train": "train a GPT: hfgolf train my.txt, or hfgolf train --config small",
    "generate": "write text with a model",
    "chat": "talk with a model, line by line",
    "evaluate": "the loss and bits per byte of a model on text, or its results on tasks",
    "report": "the page of one run, or of several side by side",
    "doctor": "what is wrong with a run, why, and what to change",
    "compare": "configs over several seeds, with p-values",
    "export": "a checkpoint as a model; a model for transformers or llama.cpp",
    "push": "put a run's model on the Hub",
    "plan": "parameters, memory, time and cost of a run, before it starts",
    "prepare": "tokenize the text of a config before training",
    "find_lr": "learning rates for a config",
    "schedule": "the learning rate and all else that follows a schedule",
    "profile": "where the time of a step goes",
    "verify_resume": "proof that a run survives kill -9 on this machine, also one of another trainer",
    "golf plan": "which shape to train for a number of bytes and minutes",
    "golf export": "fit a model into a number of bytes",
    "golf score": "score such an export once more, from the bytes on disk",
    "golf archive": "a text as one file that decodes itself, coded by an export's model",
    "golf unarchive": "the text of such a file",
    "golf record": "whether runs beat a record by more than their noise",
}
"""{verb: what it is for}. The verb's file has its name, with _ for a space."""
JSON_HELP = "With --json, each of them but chat prints one JSON object instead, and its log goes to stderr."


def main(arguments: Sequence[str] | None = None, *, verb: str = "") -> None:
    """Run `hfgolf VERB ...` and exit. arguments: None for those of the process. verb: goes in front of them."""
    run_command(lambda: _run([*verb.split(), *(sys.argv[1:] if arguments is None else arguments)]))


def _run(arguments: list[str]) -> int | None:
    words = 2 if arguments[:1] == ["golf"] else 1
    verb = " ".join(arguments[:words])
    if verb in ("", "-h", "--help", "golf", "golf -h", "golf --help"):
        shown = {name: text for name, text in VERBS.items() if name.startswith("golf ") or not verb.startswith("golf")}
        width = max(map(len, shown))
        print("Train a small GPT from text. Usage: hfgolf COMMAND ...; hfgolf COMMAND --help shows its options.\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in shown.items()))
        print(f"\n{JSON_HELP}")
        return 0
    if verb == "--version":
        from hfgolf import __version__

        print(f"hfgolf {__version__}")
        return 0
    if verb not in VERBS:
        meant = f"train {verb}" if os.path.exists(verb) else close_match(verb, VERBS)
        advice = f"did you mean `hfgolf {meant}`?" if meant else "`hfgolf --help` lists the commands."
        raise UserError(f"hfgolf: there is no command {verb}; {advice}")
    as_json = "--json" in arguments
    if as_json and verb == "chat":
        raise UserError("--json: chat is a conversation; `hfgolf generate --json` writes one text.")
    # usage texts and the record of a run show it
    sys.argv = [f"hfgolf {verb}", *(word for word in arguments[words:] if word != "--json")]
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # the log, too
            answer = importlib.import_module(f"hfgolf.commands.{verb.replace(' ', '_')}").main()
    except UserError as error:
        from hfgolf.config.parse import as_typed

        error.args = as_typed(error.args, arguments)
        raise
    if answer is None or os.environ.get("RANK", "0") != "0":  # None: the verb has said it all
        return 0
    text = answer.text
    if as_json:  # which has no NaN and no infinity
        figures = json.loads(json.dumps(answer.figures, default=str), parse_constant=lambda constant: None)
        text = json.dumps(redact_values(figures), indent=1)
    if text:
        print(text)
    for problem in answer.problems:
        print(UserError(problem).shown(), file=sys.stderr)
    return answer.status or int(bool(answer.problems))
