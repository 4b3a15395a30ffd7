"""Learn from tokens once they were scored: weights by gradients, n-grams by what followed them (test-time training).

Owns what is predicted from the tokens before, and what is learned from a window. Ships inside score.py, so it imports
numpy, torch and windows.py only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfgolf.evaluate.windows import Plan, as_fp64

ORDERS = 2, 3, 4, 6
CLASSES = 4
BETAS, VOTES_RATE, RETURN = (0.5, 0.99), 0.05, 0.01


class Learner:
    """A model that learns from each window of a stream, and what to expect after n-grams.

    All weights take a step of Adam on the mean loss of the window's targets, and go a hundredth of the way back to what
    they were (dynamic evaluation: Krause et al. 2018, arXiv:1709.07432). Each of the last 2, 3, 4 and 6 tokens, if they
    were there before, votes for what followed: the vote is added to its logit. How much is learned by the same steps,
    one number for each length, how often in a row that was right (up to 3), and the probability by the model (from
    exp(0) to exp(-3), by its integer logarithm). Distributions are normalized after the votes.

    logits: ids (1, T) -> logits (1, T, V), causally, from `weights`.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], weights: Sequence[Tensor], rate: float) -> None:
        self.logits, self.weights = logits, weights
        self.initial = [weight.detach().clone() for weight in weights]
        self.followers: dict[tuple[int, ...], tuple[int, int]] = {}  # n-gram: what followed, how often in a row
        self.votes = torch.zeros(len(ORDERS), CLASSES, CLASSES, device=weights[0].device, requires_grad=True)
        groups = [{"params": weights, "lr": rate}, {"params": [self.votes], "lr": VOTES_RATE}]
        self.optimizer = torch.optim.Adam(groups, betas=BETAS)

    def predict(self, tokens: np.ndarray, window: Sequence[int]) -> Tensor:
        """Return the log-probabilities of the targets of a window, (n, V) in fp32. Changes nothing.

        tokens: x_0 ... x_(last-1) at least, of which no more is read. window: first input, first and last target.
        Raises ValueError if a step was too large for the model.
        """
        begin, first, last = window
        ids = tokens[:last].astype(np.int64)
        logits = self.logits(torch.from_numpy(ids[None, begin:]).to(self.votes.device))[0, first - begin - 1 :]
        rows = logits.float().log_softmax(-1)
        if not rows.isfinite().all():
            raise ValueError("test-time training diverged; lower its adapt_rate")
        found = [
            (place - first, order, *self.followers[ngram])
            for place, order, ngram in _ngrams(ids, first, last)
            if ngram in self.followers
        ]
        row, order, token, times = torch.tensor(found, dtype=torch.int64, device=rows.device).view(-1, 4).T
        likely = (-rows[row, token]).clamp(0, CLASSES - 1).long()
        votes = self.votes[order, times, likely]
        return rows.index_put((row, token), votes, accumulate=True).log_softmax(-1)  # also if there are none

    def learn(self, tokens: np.ndarray, window: Sequence[int]) -> None:
        """Learn from the targets of a window, which were scored. tokens: x_0 ... x_last at least."""
        _, first, last = window
        ids = tokens[: last + 1].astype(np.int64)
        self.optimizer.zero_grad()
        with torch.enable_grad():
            rows = self.predict(ids, window)
            F.nll_loss(rows, torch.from_numpy(ids[first:]).to(rows.device)).backward()
        self.optimizer.step()
        with torch.no_grad():
            for weight, initial in zip(self.weights, self.initial, strict=True):
                weight.lerp_(initial, RETURN)
        for place, _, ngram in _ngrams(ids, first, last):
            token, times = self.followers.get(ngram, (-1, 0))
            if token == ids[place]:
                self.followers[ngram] = token, min(times + 1, CLASSES - 1)
            else:
                self.followers[ngram] = (token, times // 2) if times else (int(ids[place]), 0)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the weights what they were at first."""
        for weight, initial in zip(self.weights, self.initial, strict=True):
            weight.copy_(initial)


def _ngrams(ids: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield place, number in ORDERS, and the tokens before the place, for x_first ... x_last."""
    for place in range(first, last + 1):
        for order, size in enumerate(ORDERS):
            if size <= place:
                yield place, order, tuple(ids[place - size : place].tolist())


def score_and_learn(model: nn.Module, tokens: np.ndarray, plan: Plan, rate: float) -> float:
    """Return the nats of a plan, window by window: each is predicted, scored, and only then learned from."""
    learner, nats = Learner(model, [*model.parameters()], rate), 0.0
    for window in plan.windows.tolist():
        with torch.no_grad():
            rows = learner.predict(tokens[: window[2]], window)
        targets = torch.from_numpy(tokens[window[1] : window[2] + 1].astype(np.int64)).to(rows.device)
        nats -= as_fp64(rows.gather(1, targets[:, None])).sum().item()
        learner.learn(tokens[: window[2] + 1], window)
    learner.restore()
    return nats
