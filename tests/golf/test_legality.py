"""The legality tests pass honest scorers, with and without test-time training, and catch each way to cheat."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf.legality import legality_problems
from hfgolf.golf.score_first import LoraAdapter, SgdAdapter, document_chunks, score_first, stream_chunks

VOCAB, SEPARATOR = 12, 11


@pytest.fixture(scope="module")
def tokens():
    tokens = np.random.default_rng(0).integers(0, SEPARATOR, 61)
    tokens[[0, 20, 47]] = SEPARATOR
    return tokens


@pytest.fixture
def model():
    """A causal model: each logit depends on all inputs so far, and on their order."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = embedding, head

        def forward(self, inputs):
            places = torch.arange(1, inputs.shape[-1] + 1)[:, None]
            return self.head((self.embedding(inputs) * places).cumsum(-2).tanh())

    return Model()


def score(model, tokens, *, stride=4, adapter=None):
    plan = plan_windows("sliding", len(tokens), 8, stride)
    return score_first(model, tokens.__getitem__, plan, stream_chunks(plan, 16), batch_size=3, adapter=adapter)


def score_documents(model, tokens, adapter=None):
    plan, chunks = document_chunks(len(tokens), 8, 4, np.flatnonzero(tokens == SEPARATOR))
    return score_first(model, tokens.__getitem__, plan, chunks, batch_size=3, adapter=adapter)


def test_honest_scorers_are_legal(model, tokens):
    assert legality_problems(partial(score, model), tokens, VOCAB) == []
    assert legality_problems(partial(score_documents, model), tokens, VOCAB, fixed_ids=[SEPARATOR]) == []


def test_scoring_before_training_is_legal(model, tokens):
    sgd = SgdAdapter(model, model, length=8, num_chunks=4, learning_rate=0.3)
    assert legality_problems(partial(score, model, adapter=sgd), tokens, VOCAB) == []
    lora = LoraAdapter(model, model, learning_rate=0.1)
    scorer = partial(score_documents, model, adapter=lora)
    assert legality_problems(scorer, tokens, VOCAB, fixed_ids=[SEPARATOR]) == []


def peeks_at_the_token(model, tokens):
    """SLOT and n-gram caches: the distribution is made for the token that comes."""
    for targets, log_probs in score(model, tokens):
        helped = log_probs.clone()
        helped[torch.arange(len(targets)), torch.from_numpy(tokens[targets])] += 1
        yield targets, helped.log_softmax(-1)


def peeks_once(model, tokens):
    """The very last distribution depends on its token."""
    for targets, log_probs in score(model, tokens):
        is_last = torch.from_numpy(targets == len(tokens) - 1)[:, None]
        yield targets, torch.where(is_last, log_probs.roll(int(tokens[-1]), -1), log_probs)


def looks_at_the_next_token(model, tokens):
    """The gate of #1797: something of the token after the next gets in."""
    following = torch.from_numpy(np.append(tokens[1:], 0))
    for targets, log_probs in score(model, tokens):
        yield targets, (log_probs * (1 + 0.1 * following[targets][:, None])).log_softmax(-1)


def trains_first(model, tokens):
    """Pre-quantization test-time training."""
    adapter = SgdAdapter(model, model, length=8, num_chunks=1, learning_rate=0.3)
    with adapter:
        adapter.adapt(tokens, np.array([[0, 1, len(tokens) - 1]]))
        yield from score(model, tokens)


def rescores(model, tokens):
    yield from score(model, tokens)
    yield from score(model, tokens, stride=1)


def goes_backward(model, tokens):
    yield from reversed([*score(model, tokens)])


def leaves_out_the_hard_ones(model, tokens):
    yield from [*score(model, tokens)][:-1]


def skips_one(model, tokens):
    for targets, log_probs in score(model, tokens):
        is_kept = targets != 30
        yield targets[is_kept], log_probs[torch.from_numpy(is_kept)]


def does_not_sum_to_1(model, tokens):
    for targets, log_probs in score(model, tokens):
        yield targets, torch.logaddexp(log_probs, torch.full_like(log_probs, math.log(1e-4)))


def is_not_a_number(model, tokens):
    for targets, log_probs in score(model, tokens):
        yield targets, torch.where(torch.from_numpy(targets == 33)[:, None], math.nan, log_probs)


def scores_only_the_token(model, tokens):
    for targets, log_probs in score(model, tokens):
        yield targets, log_probs.gather(1, torch.from_numpy(tokens[targets])[:, None])


def throws_dice(model, tokens):
    for targets, log_probs in score(model, tokens):
        yield targets, (log_probs + torch.randn(VOCAB) * 1e-3).log_softmax(-1)


@pytest.mark.parametrize(
    ("cheat", "says"),
    [
        (peeks_at_the_token, r"^the distribution of token 1 depends on token 1, which is the token itself \(1 "),
        (peeks_once, r"^the distribution of token 60 depends on token 60, which is the token itself \(1 "),
        (looks_at_the_next_token, r"^the distribution of token \d+ depends on token \d+, which is later \(1 "),
        (trains_first, r"^the distribution of token 1 depends on token 1, which is the token itself"),
        (rescores, r"^token 1 is committed again; each token must be committed once, in order$"),
        (goes_backward, r"^token \d+ is committed when token 1 was next"),
        (leaves_out_the_hard_ones, r"^token \d+ is the first that is not committed; there are 61$"),
        (skips_one, r"^token 31 is committed when token 30 was next"),
        (does_not_sum_to_1, r"^the probabilities of token 1 sum to 1\.0012 instead of 1$"),
        (is_not_a_number, r"^the probabilities of token 33 sum to nan"),
        (scores_only_the_token, r"^the log-probabilities of \d+ tokens have shape \(\d+, 1\); they must be full"),
        (throws_dice, r"^two runs on the same tokens give different distributions"),
    ],
)
def test_cheating_scorer_is_caught(model, tokens, cheat, says):
    (problem,) = legality_problems(partial(cheat, model), tokens, VOCAB)
    assert re.search(says, problem), problem


def test_separators_are_never_replaced(model, tokens):
    """The windows of documents may depend on where the separators are: that is no leak."""
    seen = []

    def scorer(tokens):
        seen.append(tokens == SEPARATOR)
        return score_documents(model, tokens)

    assert legality_problems(scorer, tokens, VOCAB, num_flips=30, fixed_ids=[SEPARATOR]) == []
    assert len(seen) == 32 and all(np.array_equal(each, seen[0]) for each in seen)
