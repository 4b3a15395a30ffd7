"""Score once more what hfgolf golf export wrote: hfgolf golf score runs/small/golf --files val.txt

Checks every file against the ledger, the bytes against the budget, and tokens, bytes and certificate against the raw
text, then runs score.py on the files in a process that sees nothing of hfgolf, if it is the program that hfgolf writes.
Exits with 1 if anything differs. Without --files, which text was scored is the folder's own word.
"""

import json
import sys
from pathlib import Path

from hfgolf.commands.options import ScriptParser, bounded
from hfgolf.system.errors import UserError


def main() -> int:
    parser = ScriptParser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of an export, such as runs/small/golf")
    parser.add_argument("--files", nargs="+", default=[], help="the raw text that was scored, as in data.files")
    parser.add_argument("--mode", choices=("flat", "sliding", "documents"), help="default: that of the ledger")
    parser.add_argument("--stride", **bounded(1, 2**24, "tokens between windows, if they overlap"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args()

    if (arguments.folder / "unpack.py").is_file():  # a model that only its own library can run
        raise UserError(
            f"{arguments.folder}: its program, unpack.py, reads the weights but scores nothing; use hfgolf evaluate"
            f" {arguments.folder / 'model'} FILES."
        )

    from hfgolf.golf.ledger import rescore_folder
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    figures, problems = rescore_folder(arguments.folder, arguments.mode, arguments.stride, arguments.files)
    if arguments.json:
        print(json.dumps(figures | {"problems": problems}))
    elif figures:
        print(f"{'bytes':<15}{figures['counted_bytes']:,} of {figures['budget_bytes']:,}")
        own_word = "the folder's own word, and its bytes too; --files compares them with the raw text"
        print(f"{'text':<15}{'that of --files' if figures['is_text_checked'] else own_word}")
        print(f"{'evaluation':<15}{figures['mode']}, {figures['tokens']:,} tokens, {figures['bytes']:,} bytes")
        print(f"{'loss':<15}{figures['nats'] / figures['tokens']:.4f} nats per token")
        print(f"{'bits per byte':<15}{figures['bpb']:.4f}")
    for problem in problems:
        print(UserError(problem).shown(), file=sys.stderr)
    return 1 if problems else 0
