"""Write the text of an archive again: hfgolf golf unarchive text.pyz --output val.txt

For an archive that may be somebody else's: it is run, in a clean process, only if it is exactly what hfgolf writes for
the model in it. `python text.pyz > val.txt` does the same for one that you trust, without hfgolf.
"""

from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, check_output
from hfgolf.system.errors import UserError


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("archive", type=Path, help="a file that `hfgolf golf archive` wrote")
    parser.add_argument("--output", type=Path, required=True, help="the text")
    arguments = parser.parse_args()
    if arguments.output.exists():
        raise UserError(f"--output: {arguments.output} exists; name a new file.")
    check_output("--output", arguments.output.parent)

    from hfgolf.golf.archive import unarchive

    num_bytes = unarchive(arguments.archive, arguments.output)
    return Answer({"text": arguments.output, "bytes": num_bytes}, f"{arguments.output}: {num_bytes:,} bytes")
