"""Test-time training: what is scored first, what a learner may see, and a model that is afterwards what it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hfgolf.evaluate.windows import plan_windows, score, sum_nats
from hfgolf.golf.learner import CLASSES, ORDERS, RETURN, Learner, score_and_learn
from hfgolf.golf.legality import Reader
from hfgolf.golf.score_first import score_first, score_in_order
from hfgolf.system.errors import UserError

RATE = 0.01


@pytest.fixture
def model(build_model):
    return build_model().eval()


@pytest.fixture
def logits(model):
    return lambda inputs: model(inputs).logits


@pytest.fixture
def tokens():
    """Parts that each repeat a few bytes of their own: there is something to learn from their beginnings."""
    random = np.random.default_rng(0)
    return np.concatenate([np.tile(random.integers(0, 256, 5), count) for count in (2, 6, 12)])


@pytest.fixture
def plan(tokens):
    return plan_windows("sliding", len(tokens), 16, 8)


@pytest.fixture
def learner(model, logits):
    return lambda rate=RATE, logits=logits: Learner(logits, [*model.parameters()], rate)


def read(tokens, scorer, *arguments):
    scorer(reader := Reader(tokens, 257, check=None), *arguments)
    return reader


def test_a_learner_sees_only_what_was_scored(learner, tokens, plan):
    reader, seen = Reader(tokens, 257, check=None), []

    class Watched(Learner):
        def learn(self, tokens, window):
            assert len(tokens) == reader.num_seen == window[2] + 1, "no token after the last that was scored"
            seen.append(tokens[window[1] :])
            super().learn(tokens, window)

    watched = learner()
    watched.__class__ = Watched
    score_first(reader, watched, plan)
    assert np.array_equal(np.concatenate(seen), tokens[1:]), "each target once, in order"


@pytest.mark.parametrize("stride", [8, 16])
def test_it_learns_repeated_text_and_restores_the_model(model, logits, learner, tokens, stride):
    plan = plan_windows("sliding", len(tokens), 16, stride)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plain = read(tokens, score_in_order, logits, plan, 2).nats
    whole = score(lambda inputs, labels: sum_nats(logits(inputs), labels), tokens.__getitem__, plan, 4)
    assert plain == pytest.approx(whole, rel=1e-6)
    adapted = read(tokens, score_first, learner(), plan).nats
    assert adapted < 0.9 * plain
    assert read(tokens, score_first, learner(), plan).nats == adapted, "a second pass starts from the same weights"
    network = torch.nn.Module()
    network.forward, network.weights = logits, torch.nn.ParameterList(model.parameters())
    assert score_and_learn(network, tokens, plan, RATE) == pytest.approx(adapted, rel=1e-6), "score.py does the same"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert read(tokens, score_in_order, logits, plan, 2).nats == plain


def test_a_step_is_one_of_adam_and_a_hundredth_of_the_way_back(model, logits, learner, tokens):
    begin, first, last = window = 3, 9, 14
    before = [weight.detach().clone() for weight in model.parameters()]
    loss = F.cross_entropy(
        logits(torch.from_numpy(tokens)[None, begin:last])[0, first - begin - 1 :],
        torch.from_numpy(tokens)[first : last + 1],
    )
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    learner().learn(tokens[: last + 1], window)
    for weight, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        stepped = old - RATE * gradient / (gradient.abs() + 1e-8)  # the first step of Adam
        torch.testing.assert_close(weight.detach(), stepped.lerp(old, RETURN))


def test_what_followed_an_ngram_gets_a_vote(logits, learner):
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3, 4, 7])
    one = learner(rate=0.0)
    one.learn(tokens[:11], (0, 1, 10))
    assert one.followers[1, 2] == (3, 1), "3 followed at first, and was right once"
    assert one.followers[2, 3] == (9, 0) and one.followers[1, 2, 3] == (9, 0), "4 was never right, so 9 replaced it"
    assert (2, 3, 4, 5, 1, 2) in one.followers and len(next(iter(one.followers))) == min(ORDERS)
    with torch.no_grad():
        plain = logits(torch.from_numpy(tokens)[None, 4:12])[0].log_softmax(-1)
        one.votes.copy_(torch.arange(one.votes.numel()).view_as(one.votes) / 10)
        rows = one.predict(tokens[:12], (4, 11, 12))
    assert rows.exp().sum(-1).allclose(torch.ones(2))
    for row, (place, votes) in enumerate([(11, [(0, 3, 1)]), (12, [(0, 9, 0), (1, 9, 0)])]):
        expected = plain[place - 5].clone()
        for order, token, times in votes:
            likely = min(CLASSES - 1, math.floor(-plain[place - 5, token]))
            expected[token] += one.votes[order, times, likely]
        torch.testing.assert_close(rows[row], expected.log_softmax(-1))


def test_the_model_is_restored_after_a_break_or_an_error(logits, learner, tokens, plan):
    before = logits(torch.arange(8)[None]).detach()
    reader = Reader(tokens, 257, check=None)

    def breaking(inputs):
        if reader.num_seen > 40:
            assert not torch.equal(logits(torch.arange(8)[None]), before)
            raise KeyboardInterrupt
        return logits(inputs)

    with pytest.raises(KeyboardInterrupt):
        score_first(reader, learner(logits=breaking), plan)
    assert torch.equal(logits(torch.arange(8)[None]), before)
    with pytest.raises(UserError, match=r"^--adapt_rate: test-time training diverged; lower its adapt_rate\.$"):
        read(tokens, score_first, learner(rate=1e30), plan)
    assert torch.equal(logits(torch.arange(8)[None]), before)
