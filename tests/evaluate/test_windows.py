"""Windows: each target is scored once, from enough context, and the modes agree where they must."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_streams import CausalSum, plain_nats
from torch.nn import functional as F

from hfgolf.evaluate.windows import IGNORED, MODES, batches, plan_windows, score, sum_nats

NUM_TOKENS = (2, 3, 4, 5, 8, 9, 16, 17, 33)
LENGTHS = (1, 2, 3, 4, 8, 16, 40)


def shapes(length):
    """Return (num_tokens, stride) pairs for windows of a length."""
    strides = sorted({1, 2, length // 2, length - 1, length} & {*range(1, length + 1)})
    return list(itertools.product(NUM_TOKENS, strides))


def by_hand(num_tokens, length, stride):
    """Return [(inputs, scored targets)] of sliding windows, one token at a time."""
    last, found, begin = num_tokens - 1, [], 0
    while begin == 0 or begin + length - stride < last:
        targets = range(begin + 1, min(begin + length, last) + 1)
        found.append((list(range(begin, targets[-1])), list(targets if begin == 0 else targets[length - stride :])))
        begin += stride
    return found


def scored(plan):
    """Return [(number of tokens before it in its window, target)] for each scored target."""
    return [(target - begin, target) for begin, first, last in plan.windows for target in range(first, last + 1)]


@pytest.mark.parametrize("length", LENGTHS)
def test_sliding_windows_score_each_target_once_with_enough_context(length):
    for num_tokens, stride in shapes(length):
        plan = plan_windows("sliding", num_tokens, length, stride)
        assert [target for _, target in scored(plan)] == list(range(1, num_tokens)) == plan.targets().tolist()
        assert all(length - stride < context <= length or target <= length for context, target in scored(plan))
        hand = by_hand(num_tokens, length, stride)
        assert [(list(range(b, e)), list(range(f, e + 1))) for b, f, e in plan.windows.tolist()] == hand


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("skip", [False, True])
def test_document_windows_never_cross_a_separator(length, skip):
    for (num_tokens, stride), seed in itertools.product(shapes(length), range(4)):
        is_separator = np.random.default_rng(seed).random(num_tokens) < (0, 0.1, 0.5, 1)[seed]
        is_separator[0] = seed % 2  # a stream may also start inside a document
        separators = np.flatnonzero(is_separator)
        expected = [target for target in range(1, num_tokens) if not (skip and is_separator[target])]
        if not expected:
            continue
        plan = plan_windows("documents", num_tokens, length, stride, separators, skip_separators=skip)
        assert plan.targets().tolist() == expected
        for begin, first, last in plan.windows.tolist():
            assert not is_separator[begin + 1 : last].any(), "a window crosses a separator"
            for target in range(first, last + 1):
                document = max([0, *separators[separators < target].tolist()])
                available = target - document
                assert begin >= document and target - begin >= min(available, length - stride + 1)


def test_flat_equals_rows_and_sliding_with_a_full_stride():
    for num_tokens, length in ((40, 8), (41, 8), (42, 8), (3, 8)):
        flat = plan_windows("flat", num_tokens, length, stride=3)
        assert np.array_equal(flat.windows, plan_windows("sliding", num_tokens, length, length).windows)
        rows = [(begin, begin + 1, min(begin + length, num_tokens - 1)) for begin in range(0, num_tokens - 1, length)]
        assert flat.windows.tolist() == [list(row) for row in rows]


def test_coverage_reports_what_was_scored():
    plan = plan_windows("flat", 42, 8, drop_tail=True)
    assert plan.coverage() == {
        "mode": "flat", "window": 8, "stride": 8, "num_scored": 40, "num_unscored": 2, "first_target": 1,
        "last_target": 40, "tail": "dropped", "separators": "scored",
    }  # fmt: skip
    assert plan_windows("flat", 42, 8).coverage() | {"num_scored": 41, "num_unscored": 1, "last_target": 41} == (
        plan_windows("flat", 42, 8).coverage()
    )
    documents = plan_windows("documents", 10, 8, 2, np.array([0, 4, 7]), skip_separators=True).coverage()
    assert (documents["num_scored"], documents["num_unscored"], documents["separators"]) == (7, 3, "skipped")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("flat", 1, 8), "nothing to score: 1 tokens"),
        (("flat", 8, 8, None, None, True), "nothing to score: 8 tokens, windows of 8"),
        (("sliding", 40, 8, 9), "stride of 1 to 8"),
        (("sliding", 40, 8, -1), "stride of 1 to 8"),
        (("rolling", 40, 8, 4), "flat, sliding, documents"),
        (("documents", 40, 8, 4), "positions of their separators"),
        (("documents", 2, 8, 4, np.array([0, 1]), False, True), "nothing to score"),
    ],
)
def test_impossible_plans_are_rejected(arguments, says):
    with pytest.raises(ValueError, match=says):
        plan_windows(*arguments)


@pytest.fixture
def tokens():
    tokens = np.random.default_rng(0).integers(0, 11, 75).astype(np.uint16)
    tokens[[0, 20, 21, 60]] = 11
    return tokens


def plans(tokens, length, stride):
    return [plan_windows(mode, len(tokens), length, stride, np.flatnonzero(tokens == 11)) for mode in MODES]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_windows_in_batches_of_one_shape(tokens, batch_size, world):
    for plan in plans(tokens, 8, 3):
        ranks = [list(batches(tokens.__getitem__, plan, batch_size, rank, world)) for rank in range(world)]
        seen = []
        for together in zip(*ranks, strict=True):
            assert len({batch.shape for pair in together for batch in pair}) == 1
            assert {batch.stride() for pair in together for batch in pair} == {(together[0][0].shape[1], 1)}
            assert any((labels != IGNORED).any() for _, labels in together)
            for inputs, labels in together:
                assert inputs.dtype == labels.dtype == torch.int64 and len(inputs) == batch_size
                seen += [labels[labels != IGNORED]]
        assert sorted(torch.cat(seen).tolist()) == sorted(tokens[1:].tolist())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_score_is_the_plain_sum_over_windows(tokens, batch_size):
    model = CausalSum(12)

    def nats(inputs, labels):
        return sum_nats(model(inputs), labels)

    for length, stride in ((8, 3), (8, 8), (100, 50)):
        for plan in plans(tokens, length, stride):
            expected = plain_nats(model, tokens, plan.windows.tolist())
            assert score(nats, tokens.__getitem__, plan, batch_size) == pytest.approx(expected, rel=1e-6)
    flat, sliding, _ = (score(nats, tokens.__getitem__, plan, batch_size) for plan in plans(tokens, 8, 8))
    assert sliding == flat
    ids = torch.from_numpy(tokens.astype(np.int64))
    whole = F.cross_entropy(model(ids[:-1]), ids[1:], reduction="sum")
    for plan in plans(tokens, 74, 74)[:2]:  # a window of the whole stream is one forward pass
        assert score(nats, tokens.__getitem__, plan, batch_size) == pytest.approx(whole.item(), rel=1e-6)
