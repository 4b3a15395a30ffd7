"""A guard for any scorer of a stream of tokens: it is shown a token only after it committed a distribution of it.

The conditions are those that Parameter Golf adopted: a distribution depends on earlier tokens only, it is a full
normalized distribution over the vocabulary, and each token is scored once, in order. A scorer gets a `Reader` instead
of the tokens, and the reader adds up the nats. Knows nothing of how a scorer works. It runs in the scorer's own
process and in copies of it, so it does not catch code that reaches around the reader, into its memory or a file.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Predict = Callable[[np.ndarray], Tensor]
"""Takes x_0 ... x_m; returns the log-probabilities of the last n of the tokens x_1 ... x_(m+1), (n, V)."""
Scorer = Callable[["Reader"], object]
"""Commits x_1 ... x_N to a reader."""
_SUM_TOLERANCE = 1e-4
_COPIED = "the scorer copies its reader, and a copy would show tokens to come"
_OPEN = "the scorer was shown tokens, and did not commit them before anything else"


class IllegalScorer(Exception):
    """What is illegal about a scorer, in one line."""


class Reader:
    """The tokens x_0 ... x_N of a stream; each but the first is seen once its distribution is committed.

    check: "places", in each block that is predicted at once, one secret place; "tokens", each token, which takes a pass
    per token; None, that distributions are normalized and nothing more.

    nats: of the tokens seen, in fp64, of distributions divided by their sum.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, check: str | None = "places") -> None:
        self._tokens, self._vocab_size, self._check = tokens, vocab_size, check
        self._shown = np.zeros_like(tokens)  # holds nothing that was not shown, so a view of it tells nothing
        self._shown[:1] = tokens[:1]
        self._hash = hashlib.sha256()
        self._num_seen, self._num_checked, self._nats = min(1, len(tokens)), 0, 0.0
        self._process = os.getpid()
        self._problem: str | None = None
        self._is_open = False  # tokens may be shown that are not committed

    def __len__(self) -> int:
        """Return the number of all tokens, N + 1."""
        return len(self._tokens)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self._refuse(_COPIED)

    # properties, because what a scorer may read it must not write
    @property
    def num_seen(self) -> int:
        return self._num_seen

    @property
    def nats(self) -> float:
        return self._nats

    @property
    def seen(self) -> np.ndarray:
        """x_0 ... x_(t-1), where x_t is the next token to commit."""
        return self._view(self.num_seen)

    def describe(self) -> dict[str, Any]:
        """Return how many tokens were secret to what predicted them, and the SHA-256 of all distributions, in fp32."""
        return {"checked_tokens": self._num_checked, "distributions_sha256": self._hash.hexdigest()}

    def commit(self, predict: Predict, count: int = 1) -> None:
        """Commit the distributions of the next `count` tokens, x_t ... x_(t+count-1). They are seen from then on.

        predict: is given x_0 ... x_(t+count-2), and returns their log-probabilities, (count, V), each from the tokens
        before it only. It may be called several times; it must change nothing.

        "places": two copies of this process (fork) predict the block. To the second, the tokens are others from a place
        on that is drawn from the system's entropy once the first has begun; up to there its distributions must be the
        same, to the bit. Neither copy can know what the other sees, so nothing that a scorer keeps, counts or
        overwrites helps it. "tokens": each distribution is from a pass of its own, to which the token is unknown.

        Raises IllegalScorer if a distribution is not one, or depends on what it may not, or nothing is left to commit.
        """
        count = int(count)  # of another class, it may call itself 1
        start, stop = self._num_seen, self._num_seen + count
        if os.getpid() != self._process:
            self._refuse(_COPIED)
        if self._problem is not None or self._is_open:
            self._refuse(self._problem or _OPEN)
        if not start < stop <= len(self):
            self._refuse(f"{count} tokens are committed when {len(self) - start} are left; each is scored once")
        self._is_open = True  # and remains so if predict raises
        if count == 1 or self._check is None:
            rows = self._predicted(predict, start, stop, stop - 1)
        elif self._check == "tokens":
            parts = [self._predicted(predict, start, stop, cut)[cut - start :][:1] for cut in range(start, stop)]
            rows = np.concatenate(parts)
            self._num_checked += count - 1
        else:
            rows = self._checked(predict, start, stop)
        self._require_distributions(rows, start)
        self._is_open = False
        self._shown[start:stop] = self._tokens[start:stop]
        self._num_seen = stop
        of_targets = rows[np.arange(count), self._tokens[start:stop]].astype(np.float64)
        self._nats += float((np.log(_sums(rows)) - of_targets).sum())
        if self._check is not None:
            self._hash.update(rows.tobytes())

    def _predicted(
        self, predict: Predict, start: int, stop: int, cut: int, others: NDArray[np.integer] | int = 0
    ) -> NDArray[np.float32]:
        """Return the distributions of x_start ... x_(stop-1), predicted from inputs that are `others` from x_cut on.

        0 tells nothing of the tokens that it hides.
        """
        self._shown[start:cut] = self._tokens[start:cut]
        self._shown[cut : stop - 1] = others
        given = predict(self._view(stop - 1))
        if type(given) is not Tensor:
            self._refuse(f"the log-probabilities are of type {type(given).__name__}; they must be a torch.Tensor")
        # ours, and no tensor: no later pass writes into it, and no mode of torch answers for it
        rows = np.array(given.detach().float().cpu().numpy(), np.float32)
        if rows.shape != (stop - start, self._vocab_size):
            self._refuse(
                f"the log-probabilities of {stop - start} tokens have shape {rows.shape}; they must be full"
                f" distributions, ({stop - start}, {self._vocab_size})"
            )
        if self._problem is not None:
            self._refuse(self._problem)
        return rows

    def _checked(self, predict: Predict, start: int, stop: int) -> NDArray[np.float32]:
        """Return the distributions of a block, compared up to a secret place with those that know no more."""

        def from_tokens() -> bytes:
            return self._predicted(predict, start, stop, stop - 1).tobytes()

        def from_others() -> bytes:
            return self._predicted(predict, start, stop, cut, others)[: cut - start + 1].tobytes()

        with _one_thread():  # because the threads of a pool do not live on in a copy
            first = _Copy(from_tokens)
            random = np.random.default_rng()  # seeded by the system's entropy
            cut = int(random.integers(start, stop - 1))
            others = random.choice(self._tokens, stop - 1 - cut)  # frequent ones often: so are classes of them
            different = self._tokens[self._tokens != self._tokens[cut]]
            others[0] = random.choice(different) if len(different) else (others[0] + 1) % self._vocab_size
            second = _Copy(from_others, unseen=first)
            said, expected = first.answer(), second.answer()
        if len(said) != 4 * (stop - start) * self._vocab_size:
            from_tokens()  # raises what the copy has raised
            self._refuse(f"tokens {start} to {stop - 1} could not be predicted in a copy of the process")
        rows = np.frombuffer(said, np.float32).reshape(stop - start, -1)
        if not expected:
            self._refuse(f"tokens {start} to {stop - 1} could not be predicted from other tokens")
        if rows[: cut - start + 1].tobytes() != expected:
            self._refuse(f"the distributions of tokens {start} to {cut} depend on token {cut} or later ones")
        self._num_checked += 1
        return rows

    def _require_distributions(self, rows: NDArray[np.float32], start: int) -> None:
        sums = _sums(rows)
        wrong = ~(np.abs(sums - 1) <= _SUM_TOLERANCE)  # also for NaN
        if wrong.any():
            place = int(wrong.argmax())
            self._refuse(f"the probabilities of token {start + place} sum to {sums[place]:.6g} instead of 1")

    def _view(self, stop: int) -> np.ndarray:
        view = self._shown[:stop]
        view.flags.writeable = False
        return view

    def _refuse(self, problem: str) -> NoReturn:
        self._problem = problem
        raise IllegalScorer(problem)


def guarded(scorer: Scorer, tokens: np.ndarray, vocab_size: int, check: str | None = None) -> Reader:
    """Score a stream under guard; return the reader, which has the nats.

    check: "places" or "tokens", see `Reader`; None: places, or tokens where a copy of the process cannot compute the
    same: beside an accelerator, and on systems without a safe fork. Raises IllegalScorer, for a scorer that ends early,
    too, or goes on after it was refused.
    """
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    reader = Reader(tokens, vocab_size, check or ("places" if can_fork else "tokens"))
    scorer(reader)
    problem = reader._problem
    if problem is None and reader.num_seen < len(reader):
        problem = f"token {reader.num_seen} is the first that is not committed; there are {len(reader)}"
    if problem is not None:
        raise IllegalScorer(problem)
    return reader


def _sums(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sums of the probabilities."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums: NDArray[np.float64] = np.exp(rows, dtype=np.float64).sum(-1)
    return sums


class _Copy:
    """A copy of this process that computes bytes; it has no pipe to another copy, `unseen`."""

    def __init__(self, compute: Callable[[], bytes], unseen: _Copy | None = None) -> None:
        self._receiving, sending = os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                os.close(self._receiving)
                if unseen is not None:
                    os.close(unseen._receiving)
                with open(sending, "wb") as file:
                    file.write(compute())
            finally:
                os._exit(0)
        os.close(sending)

    def answer(self) -> bytes:
        """Return what it has computed; b"" if that raised an exception."""
        with open(self._receiving, "rb") as file:
            said = file.read()
        os.waitpid(self._process, 0)
        return said


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
