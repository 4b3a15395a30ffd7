r"""Case operators: `The USA, iPhone` becomes `^the& usa, i^phone`, inside the tokenizer, without loss.

^ (U+0001) makes a capital of the next letter, & (U+0002) of all letters of the next word. An operator stands before the
space in front of a word, so that ` the` is an entry that lower-case text uses, too. U+0001 to U+0003 in a text are
spelled U+0003 and a digit. Only A to Z change. Source: the record #1855 of Parameter Golf.
"""

from __future__ import annotations

import json
from string import ascii_uppercase

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

CAPITAL, CAPITALS, ESCAPE = "\x01", "\x02", "\x03"
OPERATORS = CAPITAL + CAPITALS + ESCAPE
_MAX_LETTERS = 32  # of a word in capitals: a longer one gets an operator per letter; lookbehinds must be bounded
_WORD = rf"(?=[A-Z]{{2,{_MAX_LETTERS}}}(?![A-Za-z]))"  # a whole word in capitals starts here
_IN_WORD = "".join(rf"(?<!\x02{space}[A-Z]{{1,{_MAX_LETTERS - 1}}})" for space in ("", " "))
# GPT-2's split (Radford et al. 2019), except that a word includes an operator in front of it
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[\x01\x02]? ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def add_case_operators(tokenizer: Tokenizer) -> None:
    """Put the transform into a byte-level BPE tokenizer that is not trained yet, as a normalizer and a decoder.

    An operator is one byte of the vocabulary and stands for no byte of the text (see tokenizer.entry_bytes). Each piece
    of a document is encoded by itself: only if one ends inside a word, in 4,096 characters without a space or newline,
    may the tokens of two pieces decode together to another case than one after the other.
    """
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("\n"),  # tokenizers 0.23 panics later if something is inserted at the very start
            *(normalizers.Replace(plain, spelled) for plain, spelled in _escapes()),
            normalizers.Replace(Regex(f" {_WORD}"), f"{CAPITALS} "),
            normalizers.Replace(Regex(rf"(?<![A-Za-z \x02]){_WORD}"), CAPITALS),
            normalizers.Replace(Regex(r"(?<!\x02) (?=[A-Z])"), f"{CAPITAL} "),
            normalizers.Replace(Regex(rf"(?=[A-Z])(?<![\x01\x02] |[\x01\x02]){_IN_WORD}"), CAPITAL),
            *(normalizers.Replace(letter, letter.lower()) for letter in ascii_uppercase),
            normalizers.Replace(Regex(r"\A\n"), ""),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    each_letter = Regex(rf"(?=[a-z])(?<=\x02 ?[a-z]{{0,{_MAX_LETTERS - 1}}})")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Replace(each_letter, CAPITAL),
            *(
                decoders.Replace(f"{CAPITAL}{space}{letter.lower()}", f"{space}{letter}")
                for letter in ascii_uppercase
                for space in (" ", "")
            ),
            decoders.Replace(CAPITAL, ""),  # without a letter after it, as a model may write it
            decoders.Replace(CAPITALS, ""),
            *(decoders.Replace(spelled, plain) for plain, spelled in reversed(_escapes())),
        ]
    )


def has_case_operators(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the transform."""
    # its state is the JSON in tokenizer.json; the tokenizer's own, with all entries, takes 50 ms to write and parse
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    return {"type": "Replace", "pattern": {"String": CAPITALS}, "content": ""} in decoder.get("decoders", [])


def _escapes() -> list[tuple[str, str]]:
    """Return (character, its spelling); that of ESCAPE first, because the other spellings contain it."""
    return [(ESCAPE, f"{ESCAPE}0"), (CAPITAL, f"{ESCAPE}1"), (CAPITALS, f"{ESCAPE}2")]
