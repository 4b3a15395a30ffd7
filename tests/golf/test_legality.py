"""The guard scores honest scorers, also with test-time training, and refuses each way to cheat, in every seed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import stat

import numpy as np
import pytest
import torch
from tiny_streams import CausalSum
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf.learner import Learner
from hfgolf.golf.legality import IllegalScorer, Reader, guarded
from hfgolf.golf.score_first import score_first, score_in_order

VOCAB, SEPARATOR, FREQUENT = 12, 11, 0
SEEDS = range(3)


def random_tokens(seed, number=61):
    random = np.random.default_rng(seed)
    tokens = random.choice(SEPARATOR, number, p=[0.3] + [0.07] * 10)
    tokens[[0, number // 3, number // 3 * 2]] = SEPARATOR
    return tokens


class Changed:
    """A reader whose scorer's distributions are changed on their way: rows = change(rows, tokens, start)."""

    def __init__(self, reader, change) -> None:
        self.reader, self.change = reader, change

    def commit(self, predict, count) -> None:
        start = self.reader.num_seen
        self.reader.commit(lambda tokens: self.change(predict(tokens), tokens, start), count)


def windows(seed, *, stride=8, batch_size=1, change=None):
    """Return a scorer with sliding windows of 16 tokens."""
    model = CausalSum(VOCAB, seed)

    def scorer(reader):
        plan = plan_windows("sliding", len(reader), 16, stride)
        changed = Changed(reader, change) if change else reader
        score_in_order(changed, model, plan, batch_size)

    return scorer


def flat(seed):
    return windows(seed, stride=16, batch_size=3)


def adapts(seed):
    """Test-time training: of weights, and of the votes of n-grams."""
    model = CausalSum(VOCAB, seed)

    def scorer(reader):
        learner = Learner(model, [*model.parameters()], 0.03)
        score_first(reader, learner, plan_windows("sliding", len(reader), 16, 8))
        assert len(learner.followers) > 30 and learner.votes.any()

    return scorer


def tilts_by_bigrams(seed):
    """Mix in how often each entry followed the last token, of all tokens before."""

    def tilt(rows, tokens, start):
        counts = torch.full((len(rows), VOCAB), 0.1)
        for row, stop in enumerate(range(start, start + len(rows))):
            followers = tokens[1:stop][tokens[: stop - 1] == tokens[stop - 1]]
            counts[row] += torch.from_numpy(np.bincount(followers, minlength=VOCAB))
        return (0.8 * rows.exp() + 0.2 * counts / counts.sum(-1, keepdim=True)).log()

    return windows(seed, change=tilt)


def counts_token_by_token(seed):
    """No pass ahead at all: one token, one commit."""

    def scorer(reader):
        counts = np.ones(VOCAB)
        while reader.num_seen < len(reader):
            counts[reader.seen[-1]] += 1
            reader.commit(lambda tokens: torch.from_numpy(np.log(counts / counts.sum()))[None])

    return scorer


HONEST = [flat, windows, adapts, tilts_by_bigrams, counts_token_by_token]


@pytest.mark.parametrize("build", HONEST)
def test_honest_scorers_are_never_refused(build):
    """And their score is the one without a guard, and the one of a pass per token."""
    for seed in SEEDS:
        tokens = random_tokens(seed)
        reader = guarded(build(seed), tokens, VOCAB, check="places")
        build(seed)(free := Reader(tokens, VOCAB, check=None))
        assert reader.nats == pytest.approx(free.nats, rel=1e-6)
        assert np.array_equal(reader.seen, tokens)
        checked = reader.describe()["checked_tokens"]
        assert checked == 0 if build is counts_token_by_token else checked >= 2
    strict = guarded(build(seed), tokens, VOCAB, check="tokens")
    assert strict.nats == pytest.approx(reader.nats, rel=1e-6)


def raised(rows, targets, is_peeked=True):
    """Return the distributions with the probability of known targets raised."""
    helped = rows.clone()
    helped[torch.arange(len(targets)), torch.tensor(targets)] += 5.0
    return torch.where(torch.as_tensor(is_peeked), helped, rows).log_softmax(-1)


def peeks(rows, tokens, start):
    return raised(rows, tokens[start:])


def looks_further_ahead(rows, tokens, start):
    """The gate of #1797: something of the token after the next gets in."""
    following = torch.from_numpy(np.append(tokens[start + 1 :], [0, 0]))[: len(rows)]
    return (rows * (1 + 0.1 * following[:, None])).log_softmax(-1)


def overwrites_what_it_is_given(rows, tokens, start):
    tokens.base[:] = FREQUENT  # so that all targets would be the same
    return torch.full_like(rows, math.log(1e-5)).index_fill(1, torch.tensor(FREQUENT), 9.0).log_softmax(-1)


def caches_prefixes():
    """What was peeked at is returned again for the same prefix."""
    cache = {}

    def change(rows, tokens, start):
        helped = raised(rows, tokens[start:])
        keys = [tokens[: start + row].tobytes() for row in range(len(rows))]
        return torch.stack([cache.setdefault(key, row) for key, row in zip(keys, helped, strict=True)])

    return change


def is_honest_on_short_streams(rows, tokens, start):
    return raised(rows, tokens[start:], is_peeked=start > 30)


def is_honest_at_fixed_places(rows, tokens, start):
    places = np.arange(start, start + len(rows))
    return raised(rows, tokens[start:], ~torch.from_numpy(np.isin(places, np.linspace(1, 240, 8).round()))[:, None])


def gates_by(entries):
    """Return what asks only whether the target is one of some entries."""

    def change(rows, tokens, start):
        is_known = len(tokens) - start
        is_one = torch.from_numpy(np.isin(tokens[start:], entries))
        chance = torch.where(is_one, 0.99, 0.01)[:, None]
        among = torch.zeros(VOCAB).index_fill(0, torch.tensor(entries), 1.0)
        probabilities = rows.exp()
        inside, outside = probabilities * among, probabilities * (1 - among)
        gated = inside / inside.sum(-1, keepdim=True), outside / outside.sum(-1, keepdim=True)
        mixed = chance * gated[0][:is_known] + (1 - chance) * gated[1][:is_known]
        return torch.cat([mixed, probabilities[is_known:]]).log()

    return change


def excludes_what_it_is_shown():
    """In a pass per token, the k-th pass of a block hides token k: it is none that is shown instead."""
    passes = []

    def change(rows, tokens, start):
        passes.append(start)
        place = passes.count(start) - 1
        helped = rows.clone()
        if place < len(tokens) - start:
            helped[place, tokens[start + place]] = -9.0
        return helped.log_softmax(-1)

    return change


def counts_what_it_is_shown():
    """What stands in for hidden tokens tells which are frequent in the text to come."""
    counts = np.full(VOCAB, 0.1)

    def change(rows, tokens, start):
        counts[:] += np.bincount(tokens[start:], minlength=VOCAB)
        return torch.from_numpy(np.log(counts / counts.sum())).float().expand_as(rows)

    return change


CHEATS = {
    "peeks": lambda: peeks,
    "looks further ahead": lambda: looks_further_ahead,
    "caches prefixes": caches_prefixes,
    "is honest on short streams": lambda: is_honest_on_short_streams,
    "is honest at fixed places": lambda: is_honest_at_fixed_places,
    "gates by the most frequent entry": lambda: gates_by([FREQUENT]),
    "gates by a class": lambda: gates_by([1, 2, 3, 4]),
}


@pytest.mark.parametrize("build", CHEATS.values(), ids=CHEATS)
def test_every_cheat_is_refused_in_every_seed(build):
    for seed in SEEDS:
        scorer = windows(seed, change=build())
        with pytest.raises(
            IllegalScorer, match=r"^the distributions of tokens \d+ to \d+ depend on token \d+ or later"
        ):
            guarded(scorer, random_tokens(seed, 241), VOCAB, check="places")


@pytest.mark.parametrize("build", [build for name, build in CHEATS.items() if "further" not in name])
def test_a_pass_per_token_leaves_a_cheat_nothing_to_gain(build):
    tokens = random_tokens(0, 121)
    honest, blind = (
        guarded(windows(0, change=change), tokens, VOCAB, check="tokens").nats for change in (None, build())
    )
    windows(0, change=build())(free := Reader(tokens, VOCAB, check=None))
    assert free.nats < 0.95 * honest < blind, "unguarded it pays"


@pytest.mark.parametrize("cheat", [excludes_what_it_is_shown, counts_what_it_is_shown])
def test_a_pass_per_token_shows_nothing_that_depends_on_what_it_hides(cheat):
    """Two texts that begin alike: what a scorer is given for the first half is the same."""
    tokens = random_tokens(0, 121)
    others = np.append(tokens[:61], SEPARATOR - 1 - tokens[61:].clip(max=SEPARATOR - 1))

    def seen(tokens):
        given = []

        def change(rows, tokens, start):
            given.extend([tokens.copy()] if start <= 33 else [])
            return rows

        guarded(windows(0, change=change), tokens, VOCAB, check="tokens")
        return given

    for one, other in zip(seen(tokens), seen(others), strict=True):
        assert np.array_equal(one, other)
    honest, blind = (guarded(windows(0, change=change), tokens, VOCAB, "tokens").nats for change in (None, cheat()))
    assert blind > 0.99 * honest


def test_overwriting_what_a_scorer_is_given_changes_no_target():
    for seed in SEEDS:
        tokens = random_tokens(seed)
        reader = guarded(windows(seed, change=overwrites_what_it_is_given), tokens, VOCAB, check="places")
        assert np.array_equal(tokens, random_tokens(seed))
        assert reader.nats > 9 * (tokens[1:] != FREQUENT).sum(), "each other entry costs 20 nats"


def test_a_scorer_has_nothing_to_peek_at():
    tokens = random_tokens(0)
    reader = Reader(tokens, VOCAB)
    reader.commit(lambda _: torch.full((1, VOCAB), -math.log(VOCAB)))
    assert reader.seen.base[:2].tolist() == tokens[:2].tolist() and not reader.seen.base[2:].any()
    with pytest.raises(ValueError, match="read-only"):
        reader.seen[0] = 1


def test_a_later_pass_writes_into_no_distribution():
    tokens = random_tokens(0)

    def scorer(reader):
        rows = torch.full((len(tokens) - 1, VOCAB), -math.log(VOCAB))

        def predict(known):
            for place, token in enumerate(known[1:-1]):
                rows[place] = torch.log_softmax(9.0 * torch.eye(VOCAB)[token], -1)
            return rows

        reader.commit(predict, len(rows))

    assert guarded(scorer, tokens, VOCAB, check="tokens").nats > 0.9 * math.log(VOCAB) * len(tokens)


def breaks_off(reader):
    """Look at a block, commit nothing, and use what was seen."""
    looked = []
    with contextlib.suppress(ZeroDivisionError):
        reader.commit(lambda tokens: looked.append(tokens) or 1 / 0, len(reader) - 1)
    for _ in range(1, len(reader)):
        reader.commit(lambda tokens: torch.log_softmax(9.0 * torch.eye(VOCAB)[looked[0][len(tokens)]], -1)[None])


def goes_on_after_a_refusal(reader):
    for _ in range(1, len(reader)):
        try:
            reader.commit(lambda _: torch.zeros(1, VOCAB))
        except IllegalScorer:
            continue


def goes_on_while_it_predicts(reader):
    """The refusal of a commit within a commit is caught."""

    def predict(tokens):
        goes_on_after_a_refusal(reader)
        return torch.full((len(reader) - 1, VOCAB), -math.log(VOCAB))

    reader.commit(predict, len(reader) - 1)


def scores_again(reader):
    windows(0)(reader)
    windows(0)(reader)


def ends_early(reader):
    reader.commit(lambda _: torch.full((40, VOCAB), -math.log(VOCAB)), 40)


def commits_nothing(reader):
    reader.commit(lambda _: torch.zeros(0, VOCAB), 0)


def does_not_sum_to_1(rows, tokens, start):
    return torch.logaddexp(rows, torch.full_like(rows, math.log(1e-4)))


def is_not_a_number(rows, tokens, start):
    return torch.where(torch.tensor(start == 33), math.nan, rows)


class AnswersForItself(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        is_asked = func.__name__ == "gather"
        return torch.zeros(len(args[0]), 1) if is_asked else super().__torch_function__(func, types, args, kwargs or {})


def answers_for_itself(rows, tokens, start):
    return rows.as_subclass(AnswersForItself)


def scores_only_the_token(rows, tokens, start):
    return rows[:, :1]


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        (breaks_off, "the scorer was shown tokens, and did not commit them before anything else"),
        (goes_on_while_it_predicts, "the scorer was shown tokens, and did not commit them before anything else"),
        (goes_on_after_a_refusal, "the probabilities of token 1 sum to 12 instead of 1"),
        (scores_again, "16 tokens are committed when 0 are left; each is scored once"),
        (commits_nothing, "0 tokens are committed when 60 are left; each is scored once"),
        (ends_early, "token 41 is the first that is not committed; there are 61"),
        (windows(0, change=does_not_sum_to_1), r"the probabilities of token 1 sum to 1\.0012 instead of 1"),
        (windows(0, change=is_not_a_number), "the probabilities of token 33 sum to nan instead of 1"),
        (
            windows(0, change=answers_for_itself),
            r"the log-probabilities are of type AnswersForItself; they must be a torch\.Tensor",
        ),
        (
            windows(0, change=scores_only_the_token),
            r"the log-probabilities of 16 tokens have shape \(16, 1\); they must be full distributions, \(16, 12\)",
        ),
    ],
)
@pytest.mark.parametrize("check", ["places", "tokens"])
def test_other_rules_are_kept(scorer, says, check):
    with pytest.raises(IllegalScorer, match=f"^{says}$"):
        guarded(scorer, random_tokens(0), VOCAB, check=check)


def uniform(number=1):
    return torch.full((number, VOCAB), -math.log(VOCAB))


def commits_all(reader, predict=lambda tokens: uniform()):
    while reader.num_seen < len(reader):
        reader.commit(predict)


def commits_what_it_knows(reader, tokens):
    commits_all(reader, lambda known: raised(uniform(), tokens[len(known) : len(known) + 1]))


class CallsItself1(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def says_that_its_block_is_one_token(reader):
    for _ in range(4):
        reader.commit(lambda tokens: raised(uniform(15), tokens[reader.num_seen :]), CallsItself1(15))


def answers_by_its_own_method(reader):
    def predict(tokens):
        rows = uniform()
        rows.detach = lambda: rows.as_subclass(AnswersForItself)
        return rows

    commits_all(reader, predict)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_asked = func.__name__ == "gather"
        return torch.zeros(len(args[0]), 1) if is_asked else func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if "gather" in str(func) else result


def answers_by_a_mode_of_functions(reader):
    with FunctionMode():
        commits_all(reader)


def answers_by_a_mode_of_operations(reader):
    with DispatchMode():
        commits_all(reader)


def looks_into_a_copy(reader):
    commits_all(other := copy.copy(reader))
    commits_what_it_knows(reader, other.seen)


def rehearses_in_a_copy_of_the_process(reader):
    receiving, sending = os.pipe()
    if not (copied := os.fork()):
        with contextlib.suppress(IllegalScorer):
            commits_all(reader)
        os.write(sending, reader.seen.tobytes())
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as file:
        commits_what_it_knows(reader, np.frombuffer(file.read(), int))
    os.waitpid(copied, 0)


def says_that_it_is_at_the_end(reader):
    reader.num_seen = len(reader)


def writes_its_score(reader):
    commits_all(reader)
    reader.nats = 1.0


def goes_back(reader):
    commits_all(reader)
    tokens = reader.seen.copy()
    reader.num_seen, reader.nats = 1, 0.0
    commits_what_it_knows(reader, tokens)


@pytest.mark.parametrize(
    "cheat",
    [
        says_that_its_block_is_one_token,
        answers_by_its_own_method,
        answers_by_a_mode_of_functions,
        answers_by_a_mode_of_operations,
        looks_into_a_copy,
        rehearses_in_a_copy_of_the_process,
        says_that_it_is_at_the_end,
        writes_its_score,
        goes_back,
    ],
)
@pytest.mark.parametrize("check", ["places", "tokens"])
def test_what_a_scorer_hands_over_or_writes_is_worth_nothing(cheat, check):
    """It is refused, or no better than one that knows nothing."""
    tokens = random_tokens(0)
    with contextlib.suppress(IllegalScorer, AttributeError):
        assert guarded(cheat, tokens, VOCAB, check).nats > 0.999 * math.log(VOCAB) * (len(tokens) - 1)


def own_pipes():
    files = (number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}"))
    return {number for number in files if stat.S_ISFIFO(os.fstat(number).st_mode)}


def test_a_copy_of_the_process_has_no_pipe_but_its_own(tmp_path):
    """From the other one, it could read what to answer."""
    tokens, before, said = random_tokens(0), own_pipes(), tmp_path / "said"

    def predict(known):
        with said.open("a") as file:
            print(len(own_pipes() - before), file=file)
        return uniform(len(tokens) - 1)

    guarded(lambda reader: reader.commit(predict, len(tokens) - 1), tokens, VOCAB, check="places")
    assert said.read_text().split() == ["1", "1"]


def test_the_score_is_that_of_normalized_distributions_and_all_are_hashed():
    tokens = random_tokens(0)
    rows = torch.randn(len(tokens) - 1, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rows += 9e-5  # of which each token would gain

    def scorer(reader):
        reader.commit(lambda _: rows[:1])
        reader.commit(lambda _: rows[1:], len(rows) - 1)

    reader = guarded(scorer, tokens, VOCAB, check="places")
    nats = -sum(float(row.double().log_softmax(-1)[token]) for row, token in zip(rows, tokens[1:], strict=True))
    assert reader.nats == pytest.approx(nats, rel=1e-12)
    expected = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    assert reader.describe() == {"checked_tokens": 1, "distributions_sha256": expected}
