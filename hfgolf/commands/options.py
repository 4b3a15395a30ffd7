"""What the options of all commands share: bounds, --output checked before any work, one line per mistake.

The options of a config are parse.py's. Imports nothing heavy before it is needed.
"""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hfgolf.run.find_model import is_run
from hfgolf.system.errors import UserError
from hfgolf.system.wording import close_match, shortened


@dataclass(frozen=True)
class Answer:
    """What a verb answers, printed by hfgolf/cli.py."""

    figures: Mapping[str, Any]
    """What --json prints."""
    text: str = ""
    """What a person reads instead; empty: the log has said it."""
    status: int = 0
    problems: Sequence[str] = ()
    """Lines for stderr; if there are any, the exit status is 1."""


class ScriptParser(argparse.ArgumentParser):
    """Parse a command's options. A mistake raises UserError, one line without argparse's usage text.

    description: the command's docstring. epilog: says that it also takes the options of hfgolf train, which must then
    not be mistaken for abbreviations of its own. has_json: whether --json, which cli.py takes, is among its options.
    """

    def __init__(self, description: str | None, epilog: str | None = None, *, has_json: bool = True) -> None:
        text = "\n".join(filter(None, (epilog, "With --json, prints one JSON object instead." if has_json else "")))
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, epilog=text, allow_abbrev=epilog is None, formatter_class=as_written)

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):  # about a value, and it says what is allowed
            raise UserError(f"{message.removeprefix('argument ')}.")
        words = [word for word in message.split() if word.startswith("--")]
        meant = close_match(words[0], self._option_string_actions) if "unrecognized" in message and words else None
        advice = f"did you mean {meant}?" if meant else f"`{self.prog} --help` shows what it takes."
        raise UserError(f"{message}; {advice}")


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


def bounded(minimum: float, maximum: float, text: str, default: float | None = None) -> dict[str, Any]:
    """Return the settings of an option for a number from minimum to maximum. The help ends in the default."""
    text = text if default is None else f"{text} ({default})"
    return {"type": within(minimum, maximum), "default": default, "help": text}


def bounded_bytes(minimum: int, maximum: int, text: str, default: int | None = None) -> dict[str, Any]:
    """Return the settings of an option for a number of bytes, which may have a unit: 60000 or 60kB."""
    from hfgolf.config.sections import as_bytes

    parse = within(minimum, maximum)
    settings = bounded(minimum, maximum, f"{text}; also with a unit, as in 60kB or 64KiB", default)
    return settings | {"type": lambda size: parse(str(as_bytes(size))), "metavar": "BYTES"}


def _temperature(text: str) -> float:
    value = within(0.0, 1e6)(text)
    if 0 < value < 1e-3:  # dividing the logits by it would overflow
        raise argparse.ArgumentTypeError(f"{value} is out of range; allowed: 0, or 0.001 to 1000000")
    return value


SAMPLING: dict[str, tuple[Callable[[str], float], float, str]] = {
    "max_new_tokens": (within(1, 10**9), 200, "maximum number of tokens to generate"),
    "temperature": (_temperature, 0.8, "sampling temperature; 0: greedy"),
    "top_k": (within(0, 10**9), 50, "sample from the K most likely tokens; 0: all"),
    "top_p": (within(1e-9, 1.0), 1.0, "sample from the most likely tokens with this total probability"),
    "seed": (within(0, 2**63 - 1), 0, "seed of the first text; each further text has the next one"),
}
"""{option of sampling: (its type, its default, what it is)}."""


def add_sampling(parser: argparse.ArgumentParser) -> None:
    for name, (kind, default, text) in SAMPLING.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})")


def add_model(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --model, which `take_words` also takes from the words without an option. others: what follows it there."""
    parser.add_argument("words", nargs="*", metavar=" ".join(("MODEL", *others)), help="the same without --model")
    parser.add_argument("--model", help="run, such as runs/small, checkpoint, exported model, or name on the Hub")


def take_words(arguments: argparse.Namespace, *options: str) -> list[str]:
    """Fill options that are not set from the words without an option, in order, and --model first; return the rest.

    Raises UserError if there is no model.
    """
    words = arguments.words
    for option in ("model", *options):
        if not getattr(arguments, option) and words:
            setattr(arguments, option, words.pop(0))
    if not arguments.model:
        raise UserError("MODEL: name a run, such as runs/small, a checkpoint, an exported model or a name on the Hub.")
    return list(words)


def add_source(parser: argparse.ArgumentParser, run: str, model: str) -> None:
    """Add --run and --model, for which `take_source` also takes a word without an option. run, model: their help."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "source", nargs="?", type=Path, metavar="RUN", help="a run or model that is here, without --run or --model"
    )
    source.add_argument("--run", type=Path, help=run)
    source.add_argument("--model", help=model)


def take_source(arguments: argparse.Namespace) -> None:
    """Fill --run or --model from the word without an option. What does not exist was meant as a run."""
    source = arguments.source
    if source is not None:
        is_model = source.exists() and not is_run(source)
        setattr(arguments, "model" if is_model else "run", str(source) if is_model else source)


def read_utf8(where: str, text: str | bytes) -> str:
    """Return a text from the command line or a stream; raise UserError if it has other bytes than UTF-8."""
    try:
        return (os.fsencode(text) if isinstance(text, str) else text).decode()
    except UnicodeError:
        raise UserError(f"{where}: not UTF-8; convert it, or set the terminal to UTF-8.") from None


MARK = "<!-- written by hfgolf -->"
# of other kinds, files that name hfgolf are hfgolf's
_MARKS = {".md": MARK.encode(), ".html": MARK.encode(), ".pyz": b"restore(data["}
_MARKED_BYTES = 1 << 20  # at either end of a file


def check_output(option: str, path: Path, kinds: Collection[str] = (), besides: Collection[Path] = ()) -> Path:
    """Return the path of an output option, after making missing folders; raise UserError if it can't be written.

    Folders that it made and that are empty at the end, as of a command that is refused, are removed then.

    Call it before any work. kinds: allowed suffixes of a file, such as "html"; if empty, the path is a folder. besides:
    other files that will be written. Raises UserError, too, if one of the files exists and is not hfgolf's.
    """
    if kinds and path.suffix[1:] not in kinds:
        raise UserError(f"{option}: {path} can't be written; allowed: a name that ends in .{', .'.join(kinds)}.")
    if kinds and path.is_dir():
        raise UserError(f"{option}: {path} is a folder; name a file.")
    foreign = next(filter(_is_foreign, [*([path] if kinds else []), *besides]), None)
    if foreign is not None:
        raise UserError(f"{option}: {foreign} exists and hfgolf did not write it; move it, or choose another name.")
    folder = path.absolute().parent if kinds else path
    if os.environ.get("RANK", "0") == "0":  # which writes
        atexit.register(_remove_empty, [one for one in (folder, *folder.parents) if not one.exists()])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise UserError(f"{option}: cannot write to {folder} ({error.strerror}); choose another folder.") from None


def _remove_empty(folders: Collection[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _is_foreign(path: Path) -> bool:
    """Return whether a file has content, and not the mark of what hfgolf writes."""
    try:
        if not path.is_file() or not (size := path.stat().st_size):
            return False
        with path.open("rb") as file:
            content = file.read(_MARKED_BYTES)
            file.seek(max(0, size - _MARKED_BYTES))
            return _MARKS.get(path.suffix, b"hfgolf") not in content + file.read()
    except OSError:
        return True


def check_picture(option: str, path: Path, besides: Collection[Path] = ()) -> Path:
    """Do the same as `check_output` for a picture, in any format of matplotlib's."""
    from matplotlib.backend_bases import FigureCanvasBase

    return check_output(option, path, sorted(FigureCanvasBase.get_supported_filetypes()), besides)
