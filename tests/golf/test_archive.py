"""Archives: the same bits in any order of additions, and the same text from the file alone."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from tiny_golf import MODELS, build_model, encode_model
from tokenizers import Tokenizer

from hfgolf.data.case_operators import add_case_operators
from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf import archive, artifact, exact, program
from hfgolf.golf.archive import Guard, choose_lanes, encode_tokens
from hfgolf.golf.decoder import read_sections
from hfgolf.golf.exact import Exact, Window, cumulated, fixed, load_exact, spans
from hfgolf.golf.ledger import ARTIFACT, TOKENIZER, UNPACK
from hfgolf.golf.program import load_model
from hfgolf.golf.script import packed_restore
from hfgolf.system.errors import UserError

EXACT_MODELS = {name: changes for name, changes in MODELS.items() if changes.get("norm") != "layernorm"}
EXACT_MODELS["learned"] = {"position_embedding": "learned", "use_bias": True, "activation": "silu", "qk_norm": False}
TEXT = "Él said: «To be, or not to be» 🙂\r\n\tthat is the question.\n" * 8


@pytest.fixture(autouse=True)
def few_windows_per_pass(monkeypatch):
    """A pass is padded to as many windows as it may have: of these models more than a thousand."""
    monkeypatch.setattr(program, "LOGITS_PER_BATCH", 2**13)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def network_of(**changes):
    """Return a model whose every vector has random weights, as an archive loads it, and its artifact."""
    model = build_model(**changes)
    data = encode_model(model)
    return model, load_model(data, model.config.to_dict())[1], data


@cache
def artifact_with(**changes):
    return encode_model(build_model(vocab_size=257, eos_token_id=256, **changes))


@pytest.fixture
def folder(tmp_path, tokenizer):
    """Return what an archive reads of an export, with a byte tokenizer."""
    (tmp_path / ARTIFACT).write_bytes(artifact_with())
    (tmp_path / TOKENIZER).write_bytes(lzma.compress(tokenizer.backend_tokenizer.to_str().encode()))
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return tmp_path


@pytest.mark.parametrize("changes", EXACT_MODELS.values(), ids=EXACT_MODELS)
def test_a_window_read_in_any_parts_has_the_logits_of_the_model_and_the_same_bits(changes):
    model, network, _ = network_of(**changes)
    ids = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    ids[:, 5] = 3  # the separator of `record`
    load_exact(network)
    found = []
    for lengths in ([16], [1] * 16, [5, 1, 7, 3]):
        window = Window(network, Exact())
        found.append(torch.cat([window.extend(part, part.shape[1]) for part in ids.split(lengths, 1)], 1))
    with torch.no_grad():
        torch.testing.assert_close(found[0], model(ids).logits.double(), atol=2e-4, rtol=1e-4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_sums_are_the_same_bits_in_any_order_on_any_threads_and_in_integers():
    x, weight, order = random(8, 999), random(70, 999), torch.randperm(999)
    expected = Exact()._linear(x, weight)
    torch.testing.assert_close(expected, x @ weight.T, atol=1e-3, rtol=0)
    assert torch.equal(expected, Exact()._linear(x[:, order], weight[:, order]))
    (a, scale), (b, row_scale) = fixed(x, 999), fixed(weight, 999)
    by_integers = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T
    assert torch.equal(expected, torch.from_numpy(by_integers).double() / (scale * row_scale.mT))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with torch.backends.mkldnn.flags(enabled=number != 2):
                assert torch.equal(expected, Exact()._linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    for sum_ in (exact._sum, exact._squares):
        assert torch.equal(sum_(x), sum_(x[:, order]))


def test_frequencies_are_those_of_softmax_and_each_token_has_one():
    logits = random(8, 999)
    sums = cumulated(logits)
    frequencies = torch.diff(sums)
    assert (sums[:, 0] == 0).all() and (sums[:, -1] == 2**exact.TOTAL_BITS).all() and frequencies.min() >= 1
    torch.testing.assert_close(frequencies.double() / 2**exact.TOTAL_BITS, logits.softmax(-1), atol=1e-6, rtol=1e-4)


def test_attention_does_not_depend_on_the_order_of_the_keys():
    model, _, _ = network_of()
    query, order = random(2, 2, 1, 16), torch.randperm(9)
    keys, values = fixed(random(2, 2, 9, 16), 16), fixed(random(2, 2, 9, 16) ** 3, 16)
    module, mask = model.model.layers[0].self_attn, torch.arange(9)[None, None] < 6
    whole = exact.exact_attention(module, query, keys, values, mask, scaling=0.25)[0]
    shuffled = [tuple(part[:, :, order] for part in pair) for pair in (keys, values)]
    assert torch.equal(
        whole, exact.exact_attention(module, query, shuffled[0], shuffled[1], mask[..., order], scaling=0.25)[0]
    )
    cut = [tuple(part[:, :, :6] for part in pair) for pair in (keys, values)]
    assert torch.equal(whole, exact.exact_attention(module, query, cut[0], cut[1], mask[..., :6], scaling=0.25)[0])


def test_exp_cos_and_powers_are_right():
    x = torch.linspace(-700, 700, 4001, dtype=torch.float64)
    torch.testing.assert_close(exact.exp(x), x.exp(), atol=0, rtol=1e-13)
    torch.testing.assert_close(exact._cos(x), x.cos(), atol=1e-12, rtol=0)
    torch.testing.assert_close(exact._EXACT["sin"](x), x.sin(), atol=1e-12, rtol=0)
    torch.testing.assert_close(exact._EXACT["tanh"](x), x.tanh(), atol=1e-15, rtol=0)
    exponents = torch.linspace(-1, 0, 9)
    torch.testing.assert_close(exact._EXACT["__rpow__"](exponents, 1e4), 10_000.0 ** exponents.double())


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-9, 1.0, 1e30])
def test_any_sum_of_integers_stays_exact(size):
    for terms in (1, 2, 3, 255, 256, 1000, 2**16):
        for factors in (1, 2):
            integers, scale = fixed(torch.full((1, 4), size, dtype=torch.float64), terms, factors)
            assert torch.equal(integers, integers.round()) and torch.frexp(scale)[0].item() == 0.5
            assert float(integers.max()) ** factors * terms < 2**53


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda x: x.cos(), "computes cos"),
        (lambda x: torch.nn.functional.layer_norm(x, (3,)), "computes native_layer_norm"),
        (lambda x: x @ x, "adds numbers that are not exact"),
        (lambda x: (x.round() * 2.0**52).sum(-1), "adds numbers that are not exact"),
    ],
)
def test_the_guard_refuses_what_may_differ_between_machines(compute, said):
    x = 1.1 * torch.eye(3, dtype=torch.float64)
    with Guard():
        (x.round() @ x.round()).sum(-1)
    with pytest.raises(UserError, match=f"^golf archive: the model {said}"), Guard():
        compute(x)


@pytest.mark.parametrize(("count", "length"), [(1, 8), (8, 8), (9, 8), (100, 16), (100, 7), (5, 1)])
def test_windows_of_a_lane_are_sliding_windows_of_half_a_stride(count, length):
    plan = plan_windows("sliding", count + 1, length, max(1, length // 2))
    assert list(spans(count, length)) == [tuple(window) for window in plan.windows.tolist()]


def test_the_program_of_an_archive_decodes_what_was_coded_within_half_a_percent(tmp_path, monkeypatch, capfd):
    """In lanes of which the last is not full, over several windows, with most switches."""
    model, network, data = network_of(**MODELS["record"])
    count, lanes = 2290, 96
    ids = torch.randint(0, 97, (lanes, 25), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 0
    text = bytes(ids[:, 1:].flatten()[:count].tolist())
    streams = [row[: count - lane * 24 + 1].numpy() for lane, row in enumerate(ids)]
    ideal_bytes = archive._bits(network, streams) / 8
    whole_bytes = archive._bits(network, [np.concatenate([[0], *(row[1:] for row in streams)])]) / 8
    assert archive._bits_of_lanes(network, streams) / 8 == pytest.approx(ideal_bytes - whole_bytes, abs=0.1)
    stream = encode_tokens(network, ids, count)
    assert ideal_bytes - 1 < len(stream) < 1.005 * ideal_bytes
    packed: dict = {"__name__": "archive"}
    source = lzma.decompress(packed_restore(model.config)).decode()
    exec(compile(source, "restore", "exec", dont_inherit=True), packed)
    vocabulary = lzma.compress(np.ones(97, "<u2").tobytes() + bytes(range(97)))
    sections = [data, vocabulary, stream]
    monkeypatch.setattr(sys, "argv", ["archive", str(tmp_path / "text")])
    arguments = (0, count, lanes, hashlib.sha256(text).hexdigest())
    packed["restore"](b"".join(sections), tuple(map(len, sections)), *arguments)
    assert (tmp_path / "text").read_bytes() == text
    spoiled = bytearray(stream)
    spoiled[100] ^= 1
    monkeypatch.setattr(sys, "argv", ["archive", str(tmp_path / "spoiled")])
    with pytest.raises(SystemExit, match=r"^error: archive: [^\n]*$"):
        packed["restore"](data + vocabulary + spoiled, tuple(map(len, sections)), *arguments)
    assert not (tmp_path / "spoiled").exists()


def test_an_archive_is_one_file_that_writes_its_text_without_hfgolf(folder, hfgolf, tmp_path, monkeypatch):
    texts = [folder / "text.txt", folder / "more" / "more.txt"]
    texts[1].parent.mkdir()
    texts[1].write_text("More of it.\n")
    whole = b"".join(path.read_bytes() for path in texts)
    monkeypatch.setattr(archive, "TOKENS_PER_LANE", 128)  # several lanes
    said = hfgolf("golf", "archive", folder, "--files", folder / "t*.txt", texts[1].parent, "--json")
    assert said.status == 0, said.err
    figures, path = json.loads(said.out), folder / "text.pyz"
    assert figures["bytes"] == path.stat().st_size == sum(figures["parts"].values())
    assert figures["bits_per_byte"] == 8 * path.stat().st_size / len(whole)
    assert figures["parts"]["weights"] == (folder / ARTIFACT).stat().st_size
    assert figures["coded_bytes"] < 1.005 * figures["ideal_bytes"] + 8
    assert figures["lanes"] > 2 and 0 < figures["lanes_bytes"] < 0.5 * figures["ideal_bytes"]
    assert figures["sha256"] == hashlib.sha256(whole).hexdigest()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # another machine, as far as this one can be one: no vector instructions in torch, other ones in MKL, more threads
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-I", path]
    done = subprocess.run(command, cwd=elsewhere, env=os.environ | other, capture_output=True, check=True)
    assert done.stdout == whole and b"hfgolf" not in path.read_bytes()
    again = hfgolf("golf", "unarchive", path, "--output", elsewhere / "again")
    assert again.status == 0 and (elsewhere / "again").read_bytes() == whole
    assert hfgolf("golf", "unarchive", path, "--output", elsewhere / "again").err.count("exists") == 1
    monkeypatch.setattr(archive, "_restored", lambda data, name: texts[1].read_bytes())
    text = hfgolf("golf", "archive", folder, "--files", texts[1])
    assert text.status == 0 and "of the model's own bits" in text.out, "an archive may replace one"


SPOILED = {
    "other bytes": (lambda data: b"x" + data[1:], "its program is another one"),
    "other lines": (lambda data: data.replace(b"import sys,lzma", b"import os;a=b=0"), "not an archive"),
    "less": (lambda data: data[:-30], "its program is another one"),
}


def test_an_archive_with_another_program_is_not_run(folder, hfgolf, monkeypatch):
    monkeypatch.setattr(archive, "_restored", lambda data, name: TEXT.encode())
    assert hfgolf("golf", "archive", folder, "--files", folder / "text.txt").status == 0
    path = folder / "text.pyz"
    data = path.read_bytes()
    monkeypatch.setattr(archive, "_restored", lambda data, name: pytest.fail("it was run"))
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("its lines were unpacked, in any size"))
    for name, (spoil, said) in SPOILED.items():
        path.write_bytes(spoil(data))
        ended = hfgolf("golf", "unarchive", path, "--output", folder / "again")
        assert ended.status == 2 and said in ended.err and ended.err.count("\n") == 1, (name, ended.err)
        assert not (folder / "again").exists()


def test_a_zip_file_in_the_coded_text_is_no_part_of_the_program(folder, hfgolf, monkeypatch):
    """Its directory breaks off after an entry, lzma.py, which the program would import."""
    assembled, ran = archive._assembled, folder / "ran"
    payload = f"open({str(ran)!r}, 'w')".encode()

    def with_module(program_, sections, *arguments):
        place = sum(map(len, [program_, *sections]))
        sizes = struct.pack("<3I2H", zlib.crc32(payload), len(payload), len(payload), 7, 0)
        local = b"PK\3\4" + struct.pack("<5H", 20, 0, 0, 0, 33) + sizes + b"lzma.py" + payload
        entry = b"PK\1\2" + struct.pack("<6H", 20, 20, 0, 0, 0, 33) + sizes + struct.pack("<3H2I", 0, 0, 0, 0, place)
        directory = entry + b"lzma.py" + bytes(46)
        end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 2, 2, len(directory), place + len(local), 0)
        return assembled(program_, [*sections[:2], sections[2] + local + directory + end], *arguments)

    monkeypatch.setattr(archive, "_assembled", with_module)
    monkeypatch.setattr(archive, "_restored", lambda data, name: TEXT.encode())
    assert hfgolf("golf", "archive", folder, "--files", folder / "text.txt").status == 0
    monkeypatch.undo()
    assert zipfile.ZipFile(folder / "text.pyz").namelist() == ["__main__.py"]
    ended = hfgolf("golf", "unarchive", folder / "text.pyz", "--output", folder / "again")
    assert ended.status == 0 and (folder / "again").read_bytes() == TEXT.encode() and not ran.exists()


def test_an_archive_that_claims_more_than_this_machine_holds_is_not_run(folder, hfgolf, monkeypatch):
    assembled, calls = archive._assembled, []
    monkeypatch.setattr(archive, "_assembled", lambda *arguments: calls.append(arguments) or assembled(*arguments))
    monkeypatch.setattr(archive, "_restored", lambda data, name: TEXT.encode())
    assert hfgolf("golf", "archive", folder, "--files", folder / "text.txt").status == 0
    monkeypatch.setattr(archive, "_restored", lambda data, name: pytest.fail("it was run"))
    ((program_, (weights, vocabulary, stream), start, number, lanes, sha256),) = calls
    wide = artifact.encode(artifact.config_header({"hidden_size": 2**20, "num_attention_heads": 2**10}), {}).data
    claims = {
        "its weights would take 791,700.1 GB of memory": (wide, vocabulary, number, lanes),
        "its text would take ": (weights, vocabulary, 10**12, archive.MAX_LANES),
        "it has another number of lanes": (weights, vocabulary, number, 10**12),
        "or is too large": (weights, lzma.compress(bytes(2**29), preset=0), number, lanes),
    }
    for said, (weights, vocabulary, number, lanes) in claims.items():
        data = assembled(program_, [weights, vocabulary, stream], start, number, lanes, sha256)
        (folder / "text.pyz").write_bytes(data)
        ended = hfgolf("golf", "unarchive", folder / "text.pyz", "--output", folder / "again")
        assert ended.status == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    os.mkfifo(folder / "pipe")
    assert "(it is no file)" in hfgolf("golf", "unarchive", folder / "pipe", "--output", folder / "again").err


def test_an_archive_that_decodes_to_another_text_is_not_written(folder, hfgolf, monkeypatch):
    monkeypatch.setattr(archive, "_restored", lambda data, name: b"another")
    ended = hfgolf("golf", "archive", folder, "--files", folder / "text.txt")
    assert ended.status == 2 and "would decode to another text" in ended.err
    assert not (folder / "text.pyz").exists()


def with_case_operators(folder):
    backend = Tokenizer.from_str(lzma.decompress((folder / TOKENIZER).read_bytes()).decode())
    add_case_operators(backend)
    (folder / TOKENIZER).write_bytes(lzma.compress(backend.to_str().encode()))


def with_other_weights(folder):
    """A file whose config and CRC are right."""
    data = artifact_with()
    header = read_sections(data)[0]
    (folder / ARTIFACT).write_bytes(artifact.encode(header, {"w": np.arange(3, dtype=np.float32)}).data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / ARTIFACT).write_bytes(artifact_with(norm="layernorm")),
            "model.norm layernorm cannot",
        ),
        (lambda folder: (folder / "text.txt").write_bytes(b"caf\xe9"), "cannot be read as UTF-8"),
        (lambda folder: (folder / "text.txt").write_bytes(b""), "is empty"),
        (lambda folder: (folder / "text.txt").unlink(), "--files: no file matches "),
        (with_case_operators, "are not the bytes of the text"),
        (lambda folder: (folder / ARTIFACT).unlink(), "is not a folder that `hfgolf golf export` wrote"),
        (with_other_weights, "or is damaged (it does not hold the weights of this model)"),
        (lambda folder: (folder / UNPACK).touch(), "its model is of another architecture; only Golf models can be"),
    ],
)
def test_what_cannot_be_archived_is_refused_in_one_line(folder, hfgolf, monkeypatch, change, said):
    change(folder)
    monkeypatch.setattr(archive, "encode_tokens", lambda *_: pytest.fail("it was coded"))
    ended = hfgolf("golf", "archive", folder, "--files", folder / "text.txt")
    assert ended.status == 2 and said in ended.err, ended.err
    assert sum(line.startswith("error:") for line in ended.err.splitlines()) == 1
    assert not (folder / "text.pyz").exists()


def test_lanes_grow_with_the_text_and_fit_into_memory():
    config = build_model().config
    assert [choose_lanes(count, config) for count in (1, 5000, 10**8)] == [1, 5000 // archive.TOKENS_PER_LANE, 64]
    config.max_position_embeddings = 2**20
    assert choose_lanes(10**8, config) < 16
