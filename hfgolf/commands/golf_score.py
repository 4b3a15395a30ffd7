"""Score once more what hfgolf golf export wrote: hfgolf golf score runs/small/golf --files val.txt

Checks every file against the ledger, the bytes against the budget, and tokens, bytes and certificate against the raw
text, then runs score.py on the files in a process that sees nothing of hfgolf, if it is the program that hfgolf writes.
Exits with 1 if anything differs. Without --files, which text was scored is the folder's own word.
"""

from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, bounded
from hfgolf.system.errors import UserError


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of an export, such as runs/small/golf")
    parser.add_argument("--files", nargs="+", default=[], help="the raw text that was scored, as in data.files")
    parser.add_argument("--evaluation", choices=("flat", "sliding", "documents"), help="default: that of the ledger")
    parser.add_argument("--stride", **bounded(1, 2**24, "tokens that a window scores; default: that of the ledger"))
    parser.add_argument("--adapt_rate", **bounded(0.0, 1.0, "of test-time training; default: that of the ledger"))
    arguments = parser.parse_args()

    if (arguments.folder / "unpack.py").is_file():  # a model that only its own library can run
        raise UserError(
            f"{arguments.folder}: its program, unpack.py, reads the weights but scores nothing; use hfgolf evaluate"
            f" {arguments.folder / 'model'} FILES."
        )

    from hfgolf.golf.ledger import rescore_folder
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    stated = {name: getattr(arguments, name) for name in ("evaluation", "stride", "adapt_rate")}
    figures, problems = rescore_folder(arguments.folder, arguments.files, stated)
    rows = {}
    if figures:
        own_word = "the folder's own word, and its bytes too; --files compares them with the raw text"
        sha256 = f"sha256 {figures['text_sha256'][:16]}"
        counted, everything = figures["counted_bytes"], f"{figures['all_bytes']:,} counting everything"
        everything += "" if figures["has_config"] else "; the config that trains it is not there, so not counted"
        rows = {
            "bytes": f"{counted:,} of {figures['budget_bytes']:,} ({everything})",
            "text": f"that of --files, {sha256}" if figures["is_text_checked"] else f"{sha256}, {own_word}",
            "evaluation": f"{figures['mode']}, {figures['tokens']:,} tokens, {figures['bytes']:,} bytes",
            "loss": f"{figures['nats'] / figures['tokens']:.4f} nats per token",
            "bits per byte": f"{figures['bpb']:.4f}",
        }
    text = "\n".join(f"{name:<15}{value}" for name, value in rows.items())
    return Answer(figures | {"problems": problems}, text, problems=problems)
