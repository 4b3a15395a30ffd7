"""The coder: what it takes beside the entropy, and that every integer comes back."""

from __future__ import annotations

import numpy as np
import pytest

from hfgolf.golf import artifact
from hfgolf.golf.artifact import Encoder, frequencies_of
from hfgolf.golf.decoder import Decoder, read_tensors
from hfgolf.golf.grid import Quantized, entropy_bits

RANDOM = np.random.default_rng(0)


def round_trip(chunks, num_contexts=1, num_lanes=None):
    """Return the code, after checking that decoding returns each chunk and ends where the code ends."""
    encoder = Encoder(num_contexts)
    for contexts, integers in chunks:
        encoder.add(contexts, integers)
    coded = encoder.encode(num_lanes)
    decoder = Decoder(coded.tables, coded.num_lanes, coded.stream, coded.raw)
    for contexts, integers in chunks:
        contexts = np.broadcast_to(contexts, integers.shape)
        np.testing.assert_array_equal(decoder.integers(contexts), integers)
    assert decoder.is_at_end()
    return coded


@pytest.mark.parametrize(
    "draws",
    [
        np.rint(RANDOM.normal(0, 2.4, 2**17)).astype(np.int32),
        RANDOM.choice([-7, 0, 3, 40], 2**17, p=[0.9, 0.06, 0.03, 0.01]).astype(np.int32),
        RANDOM.geometric(0.1, 2**17).astype(np.int32).clip(max=63),
    ],
    ids=["gaussian", "skewed", "geometric"],
)
def test_draws_take_their_entropy(draws):
    coded = round_trip([(0, draws)])
    entropy_bytes = entropy_bits(draws) * len(draws) / 8
    assert entropy_bytes <= len(coded.stream) <= 1.0005 * entropy_bytes + 4 * coded.num_lanes
    assert not coded.raw, "integers below 64 have no raw bits"


def test_words_that_nobody_reads_are_noticed():
    integers = np.rint(RANDOM.normal(0, 3, 5000)).astype(np.int32)
    encoder = Encoder(1)
    encoder.add(0, integers)
    coded = encoder.encode(4)
    for stream, raw in ((coded.stream + bytes(2), coded.raw), (coded.stream, coded.raw + bytes(1))):
        decoder = Decoder(coded.tables, coded.num_lanes, stream, raw)
        np.testing.assert_array_equal(decoder.integers(np.zeros(5000, np.int64)), integers)
        assert not decoder.is_at_end()


def test_textbook_decoder_reads_a_single_lane():
    """A decoder written from Duda 2013, arXiv:1311.2540, one symbol at a time, reads the same integers.

    constriction's coder for Python has words of 32 bits and frequencies of 24, so it cannot read this stream.
    """
    integers = np.rint(RANDOM.normal(0, 3, 2000)).astype(np.int32)
    coded = round_trip([(0, integers)], num_lanes=1)
    ((lowest, frequencies),) = coded.tables
    symbol_of = np.repeat(np.arange(len(frequencies)), frequencies)
    starts = np.cumsum(frequencies) - frequencies
    words = np.frombuffer(coded.stream, "<u2").tolist()
    state = words.pop(0) | words.pop(0) << 16
    decoded = []
    for _ in integers:
        slot = state % 2**14
        symbol = symbol_of[slot]
        decoded.append(lowest + int(symbol))
        state = int(frequencies[symbol]) * (state // 2**14) + slot - int(starts[symbol])
        if state < 2**16:
            state = state * 2**16 + words.pop(0)
    assert decoded == integers.tolist()
    assert state == 2**16 and not words


@pytest.mark.parametrize(
    "integers",
    [
        np.empty(0, np.int32),
        np.array([5], np.int32),
        np.full(1000, -3, np.int32),
        np.array([-(2**31), 2**31 - 1, 0, -1, 1, 63, 64, -64, 65, 127, 128], np.int32),
        RANDOM.integers(-(2**31), 2**31, 3000).astype(np.int32),
    ],
    ids=["empty", "one", "constant", "extremes", "all of int32"],
)
@pytest.mark.parametrize("num_lanes", [1, 256])
def test_extreme_integers_survive_a_round_trip(integers, num_lanes):
    coded = round_trip([(0, integers)], num_lanes=num_lanes)
    if len(np.unique(integers)) < 2:
        assert len(coded.stream) == 4 * num_lanes, "what is constant costs nothing"


def test_any_number_of_integers_has_a_number_of_lanes_that_can_be_stored(monkeypatch):
    monkeypatch.setattr(artifact, "INTEGERS_PER_LANE", 1)
    integers = np.zeros((200, 200), np.int32)
    data = artifact.encode(b"{}", {"a": Quantized(integers, np.zeros(200, np.uint8))}).data
    (found,) = read_tensors(data, [integers.shape])
    np.testing.assert_array_equal(found.integers, integers)


def test_the_bits_of_the_chunks_are_those_of_the_code():
    """With raw bits, which only integers from 64 have, and without."""
    encoder = Encoder(2)
    chunks = [(0, RANDOM.normal(0, 3, 20_000)), (1, RANDOM.normal(0, 3000, 20_000)), (0, RANDOM.normal(0, 3, 100))]
    for context, draws in chunks:
        encoder.add(context, np.rint(draws).astype(np.int32))
    coded = encoder.encode()
    bits = coded.chunk_bits
    assert sum(bits) / 8 == pytest.approx(len(coded.stream) - 4 * coded.num_lanes + len(coded.raw), rel=1e-3)
    assert bits[1] / 20_000 == pytest.approx(2.0471 + np.log2(3000), abs=0.05)
    assert bits[0] / 20_000 == pytest.approx(2.0471 + np.log2(3), abs=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_random_chunks_in_random_contexts_survive_a_round_trip(seed):
    random = np.random.default_rng(seed)
    num_contexts = int(random.integers(1, 12))
    chunks = []
    for _ in range(int(random.integers(0, 8))):
        contexts = random.integers(0, num_contexts, int(random.integers(0, 700)))
        scales = 4.0 ** random.integers(-2, 12, num_contexts)
        integers = np.rint(random.standard_cauchy(len(contexts)) * scales[contexts])
        chunks.append((contexts, integers.clip(-(2**31), 2**31 - 1).astype(np.int64)))
    round_trip(chunks, num_contexts, num_lanes=int(2 ** random.integers(0, 9)))


@pytest.mark.parametrize("seed", range(10))
def test_frequencies_are_optimal(seed):
    """No move of one slot from a symbol to another saves bits."""
    random = np.random.default_rng(seed)
    counts = np.floor(10.0 ** random.uniform(-1, 7, int(random.integers(1, 900)))).astype(np.int64)
    counts[random.integers(len(counts))] += 1
    frequencies = frequencies_of(counts)
    assert frequencies.sum() == 2**14
    assert ((frequencies > 0) == (counts > 0)).all()
    used, f = counts[counts > 0], frequencies[counts > 0]
    gains = used * np.log((f + 1) / f)
    losses = np.where(f > 1, used * np.log(f / np.maximum(f - 1, 0.5)), np.inf)
    for winner in np.argsort(gains)[-3:]:
        assert gains[winner] <= np.delete(losses, winner).min(initial=np.inf) * (1 + 1e-9)
