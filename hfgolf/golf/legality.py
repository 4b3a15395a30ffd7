"""Is a scorer legal? Tests of any function that scores a stream of tokens from left to right.

The conditions are those that Parameter Golf adopted: a distribution depends on earlier tokens only, it is a full
normalized distribution over the vocabulary, and each token is scored once, in order. No test proves a scorer legal; a
scorer that fails one is not. Knows nothing of how a scorer works.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from hfgolf.evaluate.windows import as_fp64

Commits = Iterator[tuple[np.ndarray, Tensor]]
"""Target indices (n,), ascending, and their log-probabilities (n, V), in the order in which they are final."""
Scorer = Callable[[np.ndarray], Commits]
"""Takes the tokens x_0 ... x_N; commits x_1 ... x_N."""
_SUM_TOLERANCE = 1e-4


def legality_problems(
    scorer: Scorer,
    tokens: np.ndarray,
    vocab_size: int,
    *,
    num_flips: int = 8,
    fixed_ids: Collection[int] = (),
    seed: int = 0,
) -> list[str]:
    """Return what is illegal about a scorer, tried on a stream of tokens; an empty list if nothing was found.

    1. Each of x_1 ... x_N is committed once, ascending. 2. Each distribution covers the vocabulary and sums to 1 within
    1e-4. 3. If a token x_t is replaced, the distributions of x_1 ... x_t stay the same to the bit. Runs the scorer
    2 + num_flips times, at most: give it a slice of the stream, with several chunks if it adapts.

    num_flips: tokens to replace, one at a time, evenly spaced and the last. fixed_ids: ids never replaced and never put
        in, such as separators, on which windows may depend.
    """
    problems: list[str] = []
    before = _run(scorer, tokens, vocab_size, problems)
    if problems:
        return problems
    if _run(scorer, tokens, vocab_size) != before:
        return ["two runs on the same tokens give different distributions, so a flipped token would prove nothing"]
    random = np.random.default_rng(seed)
    places = np.setdiff1d(np.arange(1, len(tokens)), np.flatnonzero(np.isin(tokens, [*fixed_ids])))
    if not len(places):
        return ["the tokens are too few to replace one"]
    choice = np.unique(np.linspace(0, len(places) - 1, num_flips).round().astype(int))
    allowed = np.setdiff1d(np.arange(vocab_size), [*fixed_ids])
    for place in places[choice].tolist():
        flipped = tokens.copy()
        flipped[place] = random.choice(allowed[allowed != tokens[place]])
        after = _run(scorer, flipped, vocab_size, last=place)
        changed = [target for target in range(1, place + 1) if after.get(target) != before[target]]
        if changed:
            problems.append(
                f"the distribution of token {changed[0]} depends on token {place}, which is"
                f" {'the token itself' if changed[0] == place else 'later'} ({len(changed)} distributions changed)"
            )
            break
    return problems


def _run(
    scorer: Scorer, tokens: np.ndarray, vocab_size: int, problems: list[str] | None = None, last: int | None = None
) -> dict[int, bytes]:
    """Return a hash of each target's distribution, up to target `last`. problems: gets what is wrong with commits."""
    hashes: dict[int, bytes] = {}
    problems = [] if problems is None else problems
    expected = 1
    for targets, log_probs in scorer(tokens):
        problems += _distribution_problems(targets, log_probs, vocab_size)
        for target, row in zip(map(int, targets), log_probs.detach().cpu().contiguous(), strict=False):
            if target != expected and not problems:
                what = "again" if target in hashes else f"when token {expected} was next"
                problems.append(f"token {target} is committed {what}; each token must be committed once, in order")
            expected = target + 1
            hashes[target] = hashlib.blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        if problems or (last is not None and expected > last):
            break
    else:
        if expected != len(tokens):
            problems.append(f"token {expected} is the first that is not committed; there are {len(tokens)}")
    return hashes


def _distribution_problems(targets: np.ndarray, log_probs: Tensor, vocab_size: int) -> list[str]:
    if log_probs.shape != (len(targets), vocab_size):
        return [
            f"the log-probabilities of {len(targets)} tokens have shape {tuple(log_probs.shape)}; they must be full"
            f" distributions, ({len(targets)}, {vocab_size})"
        ]
    sums = as_fp64(log_probs).exp().sum(-1)
    wrong = ~((sums - 1).abs() <= _SUM_TOLERANCE)  # also for NaN
    if not wrong.any():
        return []
    place = int(wrong.nonzero()[0, 0])
    return [f"the probabilities of token {int(targets[place])} sum to {sums[place].item():.6g} instead of 1"]
