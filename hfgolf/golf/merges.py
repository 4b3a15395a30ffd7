"""A tokenizer in few bytes: most entries of a BPE vocabulary are two others, joined by a merge.

The bytes are LZMA of tokenizer.json without these entries and without the merges, a zero byte, and the ids of the first
parts of all merges, and then of the second ones (uint16). The entries of merges have the ids that are free, in order. A
tokenizer that cannot be put together again like that is tokenizer.json alone, as in exports of older versions.
"""

from __future__ import annotations

import itertools
import json
import lzma
from contextlib import suppress
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hfgolf.golf.script import smallest_lzma

_MAX_BYTES = 2**28  # a larger vocabulary is a bomb


def pack_tokenizer(tokenizer: Tokenizer) -> bytes:
    """Return the bytes of a tokenizer, for `unpack_tokenizer`."""
    text = tokenizer.to_str()
    rules = json.loads(text)
    model = rules["model"]
    # KeyError: ids in another order than the merges; OverflowError: more than 65,536 ids
    with suppress(KeyError, OverflowError):
        ids, merges = model["vocab"], model["merges"]
        made = {left + right for left, right in merges}
        pairs = np.array([[ids[part] for part in pair] for pair in merges], "<u2").reshape(-1, 2).T
        model |= {"vocab": {entry: number for entry, number in ids.items() if entry not in made}, "merges": []}
        content = _json(rules).encode() + b"\0" + pairs.tobytes()
        if _joined(content).to_str() == text:
            return smallest_lzma(content)
    return smallest_lzma(text.encode())


def unpack_tokenizer(packed: bytes) -> Tokenizer:
    """Return the tokenizer of `pack_tokenizer`, or of older exports. Raises whatever a damaged file leads to."""
    return _joined(unpack_lzma(packed))


def unpack_lzma(packed: bytes) -> bytes:
    """Return what was packed, in no more memory than any vocabulary takes. Raises ValueError or LZMAError."""
    decompressor = lzma.LZMADecompressor(memlimit=_MAX_BYTES)
    content = decompressor.decompress(packed, _MAX_BYTES)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("a vocabulary is cut off, goes on after its end, or is too large")
    return content


def _joined(content: bytes) -> Tokenizer:
    text, _, pairs = content.partition(b"\0")
    if not pairs:
        return Tokenizer.from_str(text.decode())
    rules = json.loads(text)
    vocabulary: dict[str, int] = rules["model"]["vocab"]
    entries = {number: entry for entry, number in vocabulary.items()}
    free = (number for number in itertools.count() if number not in entries)
    merges, num_characters = rules["model"]["merges"], 0
    for left, right in np.frombuffer(pairs, "<u2").reshape(2, -1).T.tolist():
        merges.append((entries[left], entries[right]))
        num_characters += len(entry := "".join(merges[-1]))
        if num_characters > _MAX_BYTES:
            raise ValueError("the tokenizer is too large")
        if entry not in vocabulary:
            vocabulary[entry] = number = next(free)
            entries[number] = entry
    return Tokenizer.from_str(_json(rules))


def _json(rules: dict[str, Any]) -> str:
    return json.dumps(rules, ensure_ascii=False, separators=(",", ":"))
