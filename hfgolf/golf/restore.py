"""What an archive runs: it decodes its own text.

Ships inside archives: it imports of hfgolf what is packed with it. archive.py writes what this reads.
"""

from __future__ import annotations

import hashlib
import lzma
import sys

import numpy as np
import torch

from hfgolf.golf.exact import TOTAL_BITS, Exact, Window, cumulated, load_exact, spans
from hfgolf.golf.program import load_model

STATE_BITS = 48
"""States are in [2**48, 2**56): beside 24 bits of frequency, what their rounding costs cannot be measured."""
TOKENS_PER_PART = 16


def restore(data: bytes, sizes: tuple[int, int, int], start: int, num_tokens: int, lanes: int, sha256: str) -> None:
    """Write the text of an archive to the file that the command line names, or to standard output.

    data: an artifact, the vocabulary and the coded text, of these sizes. The vocabulary is packed with LZMA: how many
    bytes each token spells (uint16), and all these bytes. The tokens are in `lanes` parts of equal length, decoded side
    by side; each part begins after the token `start`. The process exits with a message if the text has another SHA-256.
    """
    try:
        text = _text(data, sizes, start, num_tokens, lanes)
        if hashlib.sha256(text).hexdigest() != sha256:
            raise ValueError("the archive is damaged, or this machine does not compute as IEEE 754 says")
    except Exception as error:  # a damaged archive raises anything
        sys.exit(f"error: {sys.argv[0]}: {error}")
    with open(sys.argv[1] if sys.argv[1:] else 1, "wb") as file:
        file.write(text)


def _text(data: bytes, sizes: tuple[int, int, int], start: int, num_tokens: int, lanes: int) -> bytes:
    weights, vocabulary, stream = (data[sum(sizes[:part]) :][: sizes[part]] for part in range(3))
    config, network, _ = load_model(weights, {})
    load_exact(network)
    at = STATE_BITS // 8 + 1
    state = int.from_bytes(stream[:at], "big")
    targets = -(-num_tokens // lanes)
    ids = torch.full((lanes, targets + 1), start)
    exact = Exact()
    for begin, first, last in spans(targets, config.max_position_embeddings):
        window = Window(network, exact)
        for known in range(begin, first - 1, TOKENS_PER_PART):
            window.extend(ids[:, known : min(known + TOKENS_PER_PART, first - 1)], 1)
        for target in range(first, last + 1):
            rows = cumulated(window.extend(ids[:, target - 1 : target], 1))[:, 0].numpy()
            for lane, row in enumerate(rows):
                if lane * targets + target > num_tokens:  # the last lane is shorter
                    break
                slot = state % 2**TOTAL_BITS
                token = int(row.searchsorted(slot, "right")) - 1
                state = int(row[token + 1] - row[token]) * (state >> TOTAL_BITS) + slot - int(row[token])
                while state < 2**STATE_BITS:
                    state, at = state << 8 | stream[at], at + 1
                ids[lane, target] = token
            if sys.stderr.isatty():
                print(f"\r{target} of {targets}", end="", file=sys.stderr)
    unpacked = lzma.decompress(vocabulary)
    lengths = np.frombuffer(unpacked[: 2 * config.vocab_size], "<u2").astype(int)
    ends = 2 * config.vocab_size + lengths.cumsum()
    spelled = [unpacked[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    return b"".join(spelled[token] for token in ids[:, 1:].flatten()[:num_tokens].tolist())
