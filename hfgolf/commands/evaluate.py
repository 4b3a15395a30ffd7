"""Evaluate a model on text: hfgolf evaluate runs/small "texts/*.txt"

Or on tasks of lm-eval (pip install lm-eval). Their results are recorded in the run and in the model's card:

    hfgolf evaluate --model runs/small --tasks hellaswag my_task.yaml
"""

import itertools
import sys
from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, add_model, bounded, check_output, take_words
from hfgolf.data.files import find_paths, is_url
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError
from hfgolf.system.signals import Signals
from hfgolf.train.console import quiet_libraries

_FOR_TASKS = ("model", "tasks", "batch_size", "sequence_length", "mixed_precision")


def main() -> Answer | None:
    parser = ScriptParser(__doc__)
    add_model(parser, "FILES")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--files", nargs="+", help="paths, folders, globs or URLs, as in data.files")
    what.add_argument("--tasks", nargs="+", help="tasks of lm-eval: names, patterns, groups or YAML files")
    parser.add_argument("--text_column", default="text", help="column of tables, as in data.text_column (text)")
    parser.add_argument("--sequence_length", **bounded(1, 2**24, "tokens of context (default: the model's own)"))
    parser.add_argument(
        "--batch_size", **bounded(1, 2**16, "sequences per forward pass (default: what suits this machine)")
    )
    parser.add_argument(
        "--evaluation",
        choices=("flat", "sliding", "documents"),
        default="flat",
        help="flat: rows end to end (default); sliding: overlapping windows, so that each token has context; documents:"
        " sliding windows that never cross a separator",
    )
    parser.add_argument(
        "--stride", **bounded(1, 2**24, "tokens that each window scores (default: half of --sequence_length)")
    )
    parser.add_argument("--drop_tail", action="store_true", help="flat: leave out the last row if it is not full")
    parser.add_argument("--skip_separators", action="store_true", help="documents: do not score separators")
    parser.add_argument(
        "--per_document",
        action="store_true",
        help="as lm-eval scores text: each document by itself, in windows of --sequence_length, separators not scored",
    )
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16"), help="default: what a run on this machine would use"
    )
    trust = parser.add_argument_group(
        "what a score rests on; if it fails, no score is printed and the exit status is 1"
    )
    trust.add_argument("--certificate", type=Path, help="JSON file for the proof that the bytes are those of the text")
    trust.add_argument("--train_files", nargs="+", help="training text: the certificate says whether --files is in it")
    trust.add_argument(
        "--check_legality",
        action="store_true",
        help="score under guard: that no token helps to predict itself is checked at a secret place in each pass",
    )
    parser.add_argument(
        "--adapt_rate",
        **bounded(0.0, 1.0, "test-time training: learn from each window once scored, at this rate, such as 2e-4", 0.0),
    )
    parsed = parser.parse_intermixed_args()
    files = take_words(parsed)
    if bool(files) + bool(parsed.files) + bool(parsed.tasks) != 1:
        raise UserError("name what to evaluate on: FILES after MODEL, or --files, or --tasks; one of them.")
    parsed.files = parsed.files or files or None
    find_model(parsed.model)
    arguments = {name: value for name, value in vars(parsed).items() if name != "words"}
    if arguments["tasks"] is not None:
        others = [name for name, value in arguments.items() if value != parser.get_default(name)]
        for name in set(others).difference(_FOR_TASKS):
            raise UserError(f"--{name}: is for --files; lm-eval's tasks say themselves how they are scored.")
        from hfgolf.commands.evaluate_tasks import evaluate_tasks, record

        quiet_libraries()
        with Signals("before the end; nothing was written"):
            model, results, table = evaluate_tasks(**{name: arguments[name] for name in _FOR_TASKS})
        if written := record(model, results):
            print(f"recorded in {' and '.join(map(str, written))}", file=sys.stderr)
        return Answer(results, table)
    del arguments["tasks"]
    if parsed.certificate is not None:
        check_output("--certificate", parsed.certificate, ["json"])
    for option, names in (("--files", parsed.files), ("--train_files", parsed.train_files)):
        for name in itertools.filterfalse(is_url, names or ()):
            find_paths(name, option)  # before loading torch

    from hfgolf.commands.evaluate_text import EvaluationOptions, evaluate_text

    options = EvaluationOptions(**arguments)
    quiet_libraries()
    with Signals("before the end; nothing was written"):
        return evaluate_text(options)
