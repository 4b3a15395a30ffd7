"""The artifact: every weight comes back to the bit, and damaged bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_golf import decode

from hfgolf.golf import artifact
from hfgolf.golf.artifact import config_header
from hfgolf.golf.decoder import weights_of, weights_sha256
from hfgolf.golf.grid import Quantized, entropy_bits
from hfgolf.system.errors import UserError

CONFIG = {"vocab_size": 61, "hidden_size": 24, "qk_norm": False}


def matrix(random, rows, columns, scale=2.4, spread=0.0):
    """Return Gaussian integers. spread: octaves (standard deviation) by which rows and columns differ in scale."""
    scales = scale * 2.0 ** (spread * (random.normal(size=(rows, 1)) + random.normal(size=columns)))
    integers = np.rint(random.normal(size=(rows, columns)) * scales).astype(np.int32)
    row_codes = random.integers(100, 140, rows).astype(np.uint8)
    return Quantized(integers, row_codes)


def model(seed=0):
    random = np.random.default_rng(seed)
    return {
        "embed.weight": matrix(random, 61, 24),
        "norm.weight": random.normal(1, 0.1, 24).astype(np.float32),
        "up.weight": matrix(random, 96, 24),
        "down.weight": matrix(random, 24, 96, spread=1.0),
        "gain": np.array(-0.7, np.float32),
        "zero.weight": Quantized(np.zeros((3, 5), np.int32), np.full(3, 255, np.uint8)),
    }


def shapes_of(tensors):
    return {name: t.integers.shape if isinstance(t, Quantized) else t.shape for name, t in tensors.items()}


def assert_equal(found, tensors):
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, Quantized):
            np.testing.assert_array_equal(found[name].integers, tensor.integers)
            np.testing.assert_array_equal(found[name].row_codes, tensor.row_codes)
            np.testing.assert_array_equal(found[name].dequantized(), tensor.dequantized())
        else:
            assert found[name].dtype == np.float32
            np.testing.assert_allclose(found[name], tensor, rtol=2**-8 + 2**-10)


def test_decoded_model_equals_the_encoded_one_and_gives_the_same_bytes():
    tensors = model()
    data = artifact.encode(config_header(CONFIG), tensors).data
    config, found = decode(data, shapes_of(tensors))
    assert config == CONFIG
    assert_equal(found, tensors)
    assert artifact.encode(config_header(dict(reversed(CONFIG.items()))), found).data == data


@pytest.mark.parametrize("seed", range(12))
def test_random_models_survive_a_round_trip(seed):
    random = np.random.default_rng(seed)
    tensors = {}
    for number in range(int(random.integers(0, 7))):
        rows, columns = (int(n) for n in random.integers(1, 60, 2))
        if random.random() < 0.3:
            tensors[f"rest{number}"] = random.normal(0, 10.0 ** random.integers(-9, 4), rows).astype(np.float32)
        else:
            spread, scale = random.uniform(0, 4), 10.0 ** random.uniform(-2, 2.5)
            tensors[f"matrix{number}"] = matrix(random, rows, columns, scale, spread)
    encoded = artifact.encode(b"{}", tensors)
    found = decode(encoded.data, shapes_of(tensors))[1]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Quantized):  # values too small for fp16's exponent lose more than the others
            np.testing.assert_allclose(found[name], tensor, rtol=2**-8 + 2**-10, atol=2**-21)
            tensors[name] = found[name]
    assert_equal(found, tensors)


def test_bytes_of_all_parts_add_up_to_the_file():
    tensors = model()
    encoded = artifact.encode(config_header(CONFIG), tensors)
    in_tensors = sum(found.weights + found.side for found in encoded.tensors.values())
    assert in_tensors + sum(encoded.parts.values()) == pytest.approx(len(encoded.data))
    assert encoded.parts["header"] == len('{"hidden_size":24,"qk_norm":false,"vocab_size":61}')
    assert encoded.tensors["norm.weight"].side < 1


def test_gaussian_weights_take_their_entropy():
    """All side information counted, except the row codes, which are random here: 5.3 bits each."""
    random = np.random.default_rng(1)
    tensors = {"a": matrix(random, 300, 1000), "b": matrix(random, 1000, 200)}
    encoded = artifact.encode(b"{}", tensors)
    entropy_bytes = sum(entropy_bits(tensor.integers) * tensor.integers.size for tensor in tensors.values()) / 8
    code_bytes = 1300 * np.log2(40) / 8
    assert len(encoded.data) == pytest.approx(entropy_bytes + code_bytes, rel=0.003)


def test_classes_save_more_bytes_than_they_cost():
    """Scales that differ by an octave: coding by classes approaches the entropy given the scales."""
    random = np.random.default_rng(2)
    tensor = matrix(random, 600, 500, scale=3, spread=1.0)
    encoded = artifact.encode(b"{}", {"a": tensor})
    side = encoded.tensors["a"].side
    assert encoded.tensors["a"].weights + side < 0.9 * entropy_bits(tensor.integers) * tensor.integers.size / 8


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scale", [6, 20])
def test_classes_that_take_more_bytes_than_they_save_are_not_used(seed, scale, monkeypatch):
    """In small matrices, the histograms of many classes cost more than rows of about the same scale can save."""
    random = np.random.default_rng(seed)
    tensors = {str(number): matrix(random, 128, 32, scale, spread=0.3) for number in range(4)}
    with_classes = len(artifact.encode(b"{}", tensors).data)
    monkeypatch.setattr(artifact, "_estimated_bits", lambda sizes, classes: classes.rows.any() + classes.columns.any())
    assert with_classes <= 1.002 * len(artifact.encode(b"{}", tensors).data)


def test_flipped_missing_and_appended_bytes_are_rejected():
    tensors = model()
    data = artifact.encode(config_header(CONFIG), tensors).data
    damaged = [data + more for more in (b"\0", b"\0\0\0\0", b"golf", bytes(1000))]
    for place in range(len(data)):
        damaged.append(data[:place])
        damaged += [data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :] for flip in (0x01, 0xFF)]
    for one in damaged:
        with pytest.raises(ValueError, match=r"^it is "):
            decode(one, shapes_of(tensors))


@pytest.mark.parametrize("name", ["up.weight", "norm.weight", "down.weight"])
def test_weights_of_another_model_are_rejected(name):
    tensors = model()
    data = artifact.encode(config_header(CONFIG), tensors).data
    shapes = shapes_of(tensors)
    shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)
    with pytest.raises(ValueError, match="it does not hold the weights of this model"):
        decode(data, shapes)


def test_later_format_version_is_rejected(monkeypatch):
    monkeypatch.setattr(artifact, "VERSION", 3)
    data = artifact.encode(b"{}", {}).data
    with pytest.raises(ValueError, match="has version 3; this program reads version 2"):
        decode(data, {})


@pytest.mark.parametrize("value", [70000.0, -65519.0, np.inf, np.nan])
def test_values_outside_fp16_are_rejected(value):
    with pytest.raises(UserError, match="gain has a value that fp16 does not have"):
        artifact.encode(b"{}", {"gain": np.array([1, value], np.float32)})


def test_fp16_values_are_exact_and_zero_loses_its_sign():
    values = np.array([-0.0, 0.0, 1.0, -1.5, 2.0**-24, 65280.0], np.float32)
    encoded = artifact.encode(b"{}", {"a": values})
    found = decode(encoded.data, {"a": (6,)})[1]["a"]
    np.testing.assert_array_equal(found[[0, 1, 2, 3, 5]], values[[0, 1, 2, 3, 5]])
    assert not np.signbit(found[0])


def test_hash_covers_the_fp32_weights_in_order():
    import hashlib

    tensors = model()
    weights = weights_of(tensors.values())
    expected = hashlib.sha256(b"".join(weight.astype("<f4").tobytes() for weight in weights)).hexdigest()
    assert weights_sha256(weights) == expected
