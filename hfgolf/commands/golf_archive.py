"""Write a text as one file that decodes itself: hfgolf golf archive runs/small/golf --files val.txt

The file is a Python program with the model of an export and the text, coded by the model's probabilities. Its size is
a score that needs no trust: `python text.pyz > val.txt`, with torch and numpy, writes the text again, byte for byte, on
any machine. It is written only if a clean process decodes it to exactly this text.
"""

import shlex
import sys
from pathlib import Path

from hfgolf.commands.options import Answer, ScriptParser, check_output


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of an export, such as runs/small/golf")
    parser.add_argument("--files", nargs="+", required=True, help="UTF-8 text, as in data.files; several become one")
    parser.add_argument("--output", type=Path, help="the archive (default: FOLDER/text.pyz)")
    arguments = parser.parse_args()
    output = check_output("--output", arguments.output or arguments.folder / "text.pyz", ["pyz"])

    from hfgolf.golf.archive import archive
    from hfgolf.system.signals import Signals
    from hfgolf.system.wording import duration
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    with Signals("before the end; nothing was written"):
        figures = archive(arguments.folder, arguments.files, output, lambda line: print(line, file=sys.stderr))
    parts = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in figures["parts"].items())
    seconds = [duration(figures[f"{work}_seconds"]) for work in ("encode", "decode")]
    rows = {
        "text": f"{figures['text_bytes']:,} bytes, {figures['num_tokens']:,} tokens",
        "archive": f"{figures['bytes']:,} bytes: {parts}",
        "bits per byte": f"{figures['bits_per_byte']:.4f}, everything counted",
        "coded text": f"{figures['gap']:+.3%} of the model's own bits, {figures['ideal_bytes']:,.1f} bytes",
        "lanes": f"{figures['lanes']}, each beginning without context, which costs {figures['lanes_bytes']:,.1f} bytes",
        "round trip": f"the same text in a clean process, sha256 {figures['sha256'][:16]}",
        "time": f"{seconds[0]} to encode, {seconds[1]} to decode",
        "file": f"{output}; `python {shlex.quote(str(output))} > text` writes the text again",
    }
    return Answer(figures, "\n".join(f"{name:<15}{value}" for name, value in rows.items()))
