"""The entries of data.mixture: their names, their weights, and the stages in which these hold.

Knows neither text nor tokens: sections.py makes a section of each entry, and data/mixture.py an order of the stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from hfgolf.system.errors import UserError
from hfgolf.system.wording import shortened

Entry = Mapping[str, Any]
Stages = list[tuple[int, tuple[int, ...]]]
"""(tokens from which a stage is, sequences of each entry in a round) of each, in order; the first is from 0."""
_MAX_ROUND = 100_000  # sequences; the order of one takes a second to find
_WEIGHT = "a number above 0, or {tokens: number} if it changes, such as {0: 9, 40000000: 5}"


def with_text_keys(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with the tokens of their stages as text, which JSON keeps as it is."""
    return [entry | {"weight": _as_text(entry["weight"])} if "weight" in entry else entry for entry in entries]


def _as_text(weight: Any) -> Any:
    if not isinstance(weight, dict):
        return weight
    keys = (str(int(start)) if isinstance(start, float) and start.is_integer() else str(start) for start in weight)
    return dict(zip(keys, weight.values(), strict=True))


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Return the name of each entry: the one it states, or else that of its text, with a number if it is taken."""
    names: list[str] = []
    for number, entry in enumerate(entries, 1):
        name = str(entry.get("name") or _text_name(entry))
        while name in names:
            name = f"{name}_{number}"
        names.append(name)
    return names


def _text_name(entry: Entry) -> str:
    """Return the last folder or file, without its ending, of an entry's first text that is more than a pattern."""
    files = entry.get("files") or ()
    first = entry.get("hub_name") or next(iter([files] if isinstance(files, str) else files), entry.get("source"))
    parts = (re.sub(r"\W+", "_", part.partition(".")[0]).strip("_") for part in PurePath(str(first)).parts[::-1])
    return next(filter(None, parts), "text")[:40]


def stages(entries: Sequence[Entry]) -> Stages:
    """Return the stages of a mixture without problems."""
    return [(start, _in_turn(shares)) for start, shares in _shares(entries)]


def _shares(entries: Sequence[Entry]) -> list[tuple[int, list[Fraction]]]:
    weights = [_weights(entry) for entry in entries]
    starts = sorted({0}.union(*weights) - {-1})
    return [(at, [one[max((start for start in one if start <= at), default=-1)] for one in weights]) for at in starts]


def _weights(entry: Entry) -> dict[int, Fraction]:
    """Return {tokens from which it is: weight}, with 0 from -1. Raises ValueError for what is no weight."""
    stated, found = entry.get("weight"), {-1: Fraction(0)}
    for start, weight in (stated if isinstance(stated, dict) else {"0": stated}).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 10**15:
            raise ValueError
        if not re.fullmatch("[0-9]{1,15}", start):
            raise ValueError
        found[int(start)] = Fraction(str(weight))
    if not any(found.values()):
        raise ValueError
    return found


def _in_turn(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratios of the shares."""
    denominator = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * denominator) for share in shares]
    divisor = math.gcd(*whole)
    return tuple(number // divisor for number in whole)


def problems(entries: Sequence[Entry]) -> Iterator[str]:
    """Say what is wrong with names and weights, in one line each."""
    stated = [entry.get("name") for entry in entries]
    if twice := next((name for name in stated if name and stated.count(name) > 1), None):
        yield f"data.mixture: two entries have the name {twice}; give each its own."
    for number, entry in enumerate(entries, 1):
        try:
            _weights(entry)
        except ValueError:
            shown = shortened(entry["weight"]) if "weight" in entry else "no weight"
            yield f"data.mixture: entry {number}: weight: {shown} is not allowed; allowed: {_WEIGHT}."
    for start, shares in _shares(entries):
        if not any(shares):
            yield f"data.mixture: no entry has a weight above 0 from {start:,} tokens on; state one."
        elif (length := sum(_in_turn(shares))) > _MAX_ROUND:
            yield (
                f"data.mixture: the weights from {start:,} tokens on are exact only over {length:,} sequences, more"
                f" than {_MAX_ROUND:,}; round them to fewer digits."
            )


def describe_stages(entries: Sequence[Entry]) -> list[str]:
    """Return the shares of each entry in words: "90%", or "90%, 50% from 40,000,000 tokens on"."""
    of_each: list[list[str]] = [[] for _ in entries]
    for start, turns in stages(entries):
        for words, turn in zip(of_each, turns, strict=True):
            words.append(f"{100 * turn / sum(turns):.4g}%{f' from {start:,} tokens on' if start else ''}")
    return [", ".join(words) for words in of_each]


def mean_shares(entries: Sequence[Entry]) -> list[float]:
    """Return the share of each entry, the mean over the stages."""
    shares = [[turn / sum(turns) for turn in turns] for _, turns in stages(entries)]
    return [sum(of_entry) / len(shares) for of_entry in zip(*shares, strict=True)]


@contextmanager
def of_text(name: str) -> Iterator[None]:
    """Have errors say which text of a mixture they are about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.mixture: {name}: {error}") from error
