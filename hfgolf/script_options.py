"""What all scripts' options share: bounds, --output checked before any work, one line per mistake.

Does not know any script, or the options of a config (command_line.py). Imports nothing heavy before it is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from hfgolf.errors import UserError
from hfgolf.wording import shortened


class ScriptParser(argparse.ArgumentParser):
    """Parse a script's options. A mistake raises UserError, one line without argparse's usage text.

    description: the script's docstring. epilog: says how the script also takes train.py's options, which must then not
    be mistaken for abbreviations of its own.
    """

    def __init__(self, description: str | None, epilog: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, epilog=epilog, allow_abbrev=epilog is None, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}.")


def within(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argparse `type` for numbers from minimum to maximum; whole numbers if both bounds are ints."""
    kind = int if isinstance(minimum, int) and isinstance(maximum, int) else float
    allowed = f"allowed: {minimum} to {maximum}" if kind is int else f"allowed: {minimum:g} to {maximum:g}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {what}; {allowed}") from None
        if not minimum <= value <= maximum:  # also rejects nan
            raise argparse.ArgumentTypeError(f"{shortened(value)} is out of range; {allowed}")
        return value

    return parse


def check_output(option: str, path: Path, kinds: Collection[str] = ()) -> Path:
    """Return the path of an output option, after making missing folders; raise UserError if it can't be written.

    Call it before any work. kinds: allowed suffixes of a file, such as "html"; if empty, the path is a folder.
    """
    if kinds and path.suffix[1:] not in kinds:
        raise UserError(f"{option}: {path} can't be written; allowed: a name that ends in .{', .'.join(kinds)}.")
    if kinds and path.is_dir():
        raise UserError(f"{option}: {path} is a folder; name a file.")
    folder = path.absolute().parent if kinds else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise UserError(f"{option}: cannot write to {folder} ({error.strerror}); choose another folder.") from None


def check_picture(option: str, path: Path) -> Path:
    """Do the same as `check_output` for a picture, in any format of matplotlib's."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(f"{option}: drawing needs matplotlib; run `pip install matplotlib`.") from None
    return check_output(option, path, sorted(FigureCanvasBase.get_supported_filetypes()))
