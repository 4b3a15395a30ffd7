"""Words for people: figures with their units, lists, values and the errors of libraries. Imports nothing of hfgolf."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def duration(seconds: float) -> str:
    """Return "26 ms", "0.4 s", "12 s", "4 min 59 s" or "7 h 02 min"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def clock_time(seconds: float) -> str:
    """Return the local time in so many seconds: "14:32", with the day if it is another one: "Tue 14:32"."""
    now, then = datetime.now(), datetime.now() + timedelta(seconds=min(seconds, 1e9))
    if then.date() == now.date():
        return f"{then:%H:%M}"
    return f"{then:%a %H:%M}" if then - now < timedelta(days=6) else f"{then:%Y-%m-%d %H:%M}"


def rounded(number: float) -> str:
    """Return "614,400", "81 million" or "2.5 billion"."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:,.3g} {name}"
    return f"{number:,.0f}"


def count_of(number: int, noun: str) -> str:
    """Return "1 step" or "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def every(number: int, noun: str) -> str:
    """Return "every step" or "every 1,200 steps"."""
    return f"every {noun}" if number == 1 else f"every {number:,} {noun}s"


def epochs(count: float) -> str:
    """Return "2.04 epochs" or "1,529 epochs"."""
    return f"{count:.3g} epochs" if count < 999.5 else f"{count:,.0f} epochs"


def labeled(label: str, text: str, width: int = 8) -> str:
    """Return one of several lines whose texts begin in the same column. The text has one line, whatever is in it."""
    return f"{label:<{width}} {' '.join(text.splitlines())}"


def size(num_bytes: float) -> str:
    """Return "1.1 GB" or "640 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 0.95e9 else f"{num_bytes / 1e6:.0f} MB"


def gigabytes(num_bytes: float) -> str:
    """Return "1.08 GB"."""
    return f"{num_bytes / 1e9:.2f} GB"


def dollars(amount: float) -> str:
    """Return "$12.34"; four decimals below ten cents."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.4f}"


def join_words(words: Iterable[Any], last: str = ", ", maximum: int | None = None) -> str:
    """Join words into a list in prose: "a, b or c" with last=" or "; beyond the maximum, "a, b and 4 more"."""
    texts = [str(word) for word in words]
    if maximum is not None and len(texts) > maximum:
        return f"{', '.join(texts[:maximum])} and {len(texts) - maximum} more"
    return last.join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def describe_overlap(summary: Mapping[str, Any]) -> str | None:
    """Return one sentence if validation documents train, too, else None. summary: with what `count_overlap` returns."""
    if not summary.get("val_documents_in_train"):
        return None
    number, of, share = (
        summary.get(f"val_{key}") or 0 for key in ("documents_in_train", "documents", "share_in_train")
    )
    return (
        f"{number:,} of {count_of(of, 'validation document')} ({share:.1%} of the bytes) also train, word for word; the"
        " validation figures flatter the model"
    )


def describe_texts(summary: Mapping[str, Any]) -> list[str]:
    """Return a line on each text of a mixture: how good the model is on it, and what the run read of it."""
    names = [key.removeprefix("epochs/") for key in summary if key.startswith("epochs/")]
    keys = ("val_bits_per_byte", "val_bytes", "tokens", "bytes", "epochs")
    found = [(name, *(summary.get(f"{key}/{name}") or 0 for key in keys)) for name in names]
    return [
        f"{name}: {score:.4f} over {val_bytes:,} bytes; trained on {tokens:,} tokens"
        f"{f' ({num_bytes:,} bytes)' if num_bytes else ''}, {epochs(float(read))}"
        for name, score, val_bytes, tokens, num_bytes, read in found
    ]


def shortened(value: object) -> str:
    """Return a value's repr for an error message, on one line, shortened in the middle if it is long."""
    return " ".join(_SHORT.repr(value).split())


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the word that a user who typed `word` probably meant."""
    return difflib.get_close_matches(word, words, n=1, cutoff=0.0)[0]


def close_match(word: str, words: Iterable[str], likeness: float = 0.7) -> str | None:
    """Return the word that a user who typed `word` meant, or None if nothing is near enough to guess."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=likeness)), None)


def one_line(error: object) -> str:
    """Return a message on one line, without its final period."""
    return " ".join(str(error).split()).rstrip(".")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def aligned(lines: list[list[str]], sides: str) -> str:
    """Return columns of text. sides: l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    )
