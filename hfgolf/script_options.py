"""What the options of all scripts have in common: bounds, --output checked before any work, one line for a mistake.

Does not know any script, nor the options of a config (command_line.py). Imports nothing heavy before it is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from hfgolf.config import shortened
from hfgolf.errors import UserError


class ScriptParser(argparse.ArgumentParser):
    """Parse a script's options; a mistake is a UserError, one line without argparse's page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}.")


def within(least: float, most: float) -> Callable[[str], float]:
    """Return an option's `type`: a number from least to most, a whole one if both bounds are ints."""
    kind = int if isinstance(least, int) and isinstance(most, int) else float
    allowed = f"allowed: {least} to {most}" if kind is int else f"allowed: {least:g} to {most:g}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {what}; {allowed}") from None
        if not least <= value <= most:  # nan is not either
            raise argparse.ArgumentTypeError(f"{shortened(value)} is out of range; {allowed}")
        return value

    return parse


def check_output(option: str, path: Path, kinds: Collection[str] = ()) -> Path:
    """Raise UserError, before any work, if what an option names can't be written; make the folders that are missing.

    kinds: suffixes that a file may have, such as "html"; none: path is a folder. Returns the path.
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
    """Do what `check_output` does for a picture, whose suffix says which kind of matplotlib's it is."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(f"{option}: matplotlib, which draws it, is not installed; pip install matplotlib.") from None
    return check_output(option, path, sorted(FigureCanvasBase.get_supported_filetypes()))
