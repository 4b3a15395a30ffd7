"""The entries of train.milestones: an amount of tokens or words, and the name of the model exported there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_SCALES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_ENTRY = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?)(?P<scale>[kMB]?)(?: (?P<unit>tokens|words))?")


@dataclass(frozen=True)
class Milestone:
    """A model to keep once the training has read so much text."""

    name: str
    """Of its folder, and of its revision on the Hub: of words as BabyLM names them, chck_10M; of tokens
    chck_10M_tokens."""
    amount: int
    unit: str
    """tokens or words."""


def milestone(text: str) -> Milestone:
    """Return what an entry such as "10M", "1.5B tokens" or "100M words" means. Raises ValueError for another text."""
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise ValueError
    amount, unit = Fraction(found["number"]) * _SCALES[found["scale"]], found["unit"] or "tokens"
    if amount.denominator != 1 or not 1 <= amount <= 10**15:
        raise ValueError
    suffix = "" if unit == "words" else "_tokens"
    return Milestone(f"chck_{found['number']}{found['scale']}{suffix}", int(amount), unit)
