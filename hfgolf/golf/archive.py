"""A text as one file that writes it again: the model of an export, and the text coded by that model's probabilities.

The file is a Python program (a zip file with bytes in front of it) that needs torch and numpy only. Its size is a score
without any doubt: the text comes back from these bytes. Owns encoding, the file, and the proof that it decodes.
exact.py has the probabilities, and restore.py decodes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from hfgolf.config.sections import DataSection
from hfgolf.data.files import match_files
from hfgolf.data.tokenizer import build_encoder, document_start, entry_spellings
from hfgolf.golf.exact import TOTAL_BITS, Exact, Window, cumulated, load_exact, spans
from hfgolf.golf.ledger import (
    ARTIFACT,
    UNPACK,
    config_of,
    read_tokenizer,
    require_memory,
    require_plain_files,
    run_alone,
)
from hfgolf.golf.merges import unpack_lzma
from hfgolf.golf.program import evaluate, load_model
from hfgolf.golf.restore import STATE_BITS, TOKENS_PER_PART
from hfgolf.golf.script import packed_restore, smallest_lzma
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import GolfNetwork, layer_order
from hfgolf.system.durable import write_bytes
from hfgolf.system.errors import UserError, writing
from hfgolf.system.wording import one_line

MAX_LANES = 64
TOKENS_PER_LANE = 2048
"""Of short texts. A pass over many lanes takes little longer than over one, but each lane begins without context."""
_CACHE_BYTES = 2**31  # for keys and values of all lanes
_SUPPORTED = {"norm": ("rmsnorm",), "activation": ("relu2", "leaky_relu2", "silu", "swiglu")}
_SUMS = {"mm", "bmm", "sum", "cumsum"}
_EXACT = {  # moves numbers, compares them, or is one correctly rounded operation on each
    *("__lshift__", "_to_copy", "_unsafe_view", "abs", "add", "add_", "alias", "amax", "arange", "as_strided"),
    *("bitwise_and", "bitwise_not", "bitwise_xor", "cat", "clamp", "clamp_min", "clone", "constant_pad_nd"),
    *("copy_", "detach", "div", "embedding", "empty", "eq", "expand", "floor", "frexp", "gather", "ge", "gt"),
    *("index", "le", "leaky_relu", "lift_fresh", "lt", "masked_fill", "mul", "mul_", "ne", "neg"),
    *("new_empty_strided", "new_zeros", "ones_like", "permute", "promote_types", "relu", "remainder"),
    *("round", "rsub", "scalar_tensor", "select", "slice", "split", "split_with_sizes", "sqrt", "squeeze"),
    *("stack", "sub", "t", "transpose", "unbind", "unsqueeze", "view", "where", "zeros", "zeros_like"),
}
_STUB = (
    # the program has names of up to two letters
    'import sys,lzma\ndata=open(sys.argv[0],"rb").read()\nexec(lzma.decompress(data[:{0}]))\n'
    'restore(data[{0}:],({1},{2},{3}),{4},{5},{6},"{7}")\n'
)


class Guard(TorchDispatchMode):
    """Within this context, any operation whose result could depend on the machine raises UserError.

    Sums must be of integers in fp64 and stay below 2**53. The values are checked, not only the names.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _SUMS:
            numbers = [x.double() for x in args if isinstance(x, Tensor)]
            bound = math.prod(float(x.abs().max()) for x in numbers) * args[0].shape[-1]
            if not (bound < 2**53 and all(bool((x == x.round()).all()) for x in numbers)):
                raise UserError(f"golf archive: the model adds numbers that are not exact ({name}, up to {bound:.2g}).")
        elif name not in _EXACT:
            raise UserError(f"golf archive: the model computes {name}, whose result may differ between machines.")
        return func(*args, **(kwargs or {}))


def archive(
    folder: Path, files: Sequence[str], output: Path, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Write the text of `files`, one after the other, as an archive; return its figures.

    folder: of an export. files: paths, folders, globs or URLs, as in data.files; each is read as it is. The archive is
    there only if a clean process has decoded it to exactly this text. Raises UserError if folder, model, tokenizer or
    text do not allow it.
    """
    artifact, config, network, tokenizer = _read_export(folder)
    started_at = time.perf_counter()

    def say(line: str) -> None:
        progress(f"[{time.perf_counter() - started_at:5.0f} s] {line} ...")

    say("tokens")
    texts = [_read_text(path) for path in _find_files(files)]
    tokens, spellings = _tokenize(texts, tokenizer, config.vocab_size)
    text = b"".join(texts)
    start, num_tokens = document_start(tokenizer)[0], len(tokens)
    lanes = choose_lanes(num_tokens, config)
    targets = -(-num_tokens // lanes)
    padded = np.pad(tokens, (0, lanes * targets - num_tokens)).reshape(lanes, targets)
    ids = np.pad(padded, ((0, 0), (1, 0)), constant_values=start)
    say("the model's own bits")
    rows = [row[: num_tokens - lane * targets + 1] for lane, row in enumerate(ids)]
    ideal_bytes, lanes_bytes = _bits(network, rows) / 8, _bits_of_lanes(network, rows) / 8
    say("coding")
    stream = encode_tokens(network, torch.from_numpy(ids), num_tokens)
    lengths = np.array([*map(len, spellings)], "<u2").tobytes()
    sections = [artifact, smallest_lzma(lengths + b"".join(spellings)), stream]
    sha256 = hashlib.sha256(text).hexdigest()
    program = packed_restore(config)
    data = _assembled(program, sections, start, num_tokens, lanes, sha256)
    say("decoding in a clean process")
    coded_at = time.perf_counter()
    if _restored(data, output.name) != text:
        raise UserError(f"--files: {output} was not written, because it would decode to another text.")
    with writing("--output", output):
        write_bytes(output, data)
    parts = dict(zip(("program", "weights", "vocabulary", "text"), map(len, [program, *sections]), strict=True))
    return {
        "archive": str(output),
        "bytes": len(data),
        "text_bytes": len(text),
        "bits_per_byte": 8 * len(data) / len(text),
        "parts": parts | {"frame": len(data) - sum(parts.values())},
        "num_tokens": num_tokens,
        "coded_bytes": len(stream),
        "ideal_bytes": ideal_bytes,
        "gap": len(stream) / ideal_bytes - 1,
        "lanes": lanes,
        "lanes_bytes": lanes_bytes,
        "window": config.max_position_embeddings,
        "sha256": sha256,
        "encode_seconds": coded_at - started_at,
        "decode_seconds": time.perf_counter() - coded_at,
    }


def unarchive(path: Path, output: Path) -> int:
    """Write the text of an archive, decoded in a clean process; return its bytes.

    The archive may be somebody else's: it is run only if it is what hfgolf writes for its model, and decodes in the
    memory that is free. Raises UserError.
    """
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        data = path.read_bytes()
        stub = data[data.rindex(_STUB[:10].encode()) :].partition(b'")\n')[0].decode()
        *numbers, sha256 = re.findall(r"\b(?:[0-9a-f]{64}|\d+)\b", stub)  # what is wrong with them shows below
        _, end, _, *sizes, start, num_tokens, lanes = map(int, numbers)
        ends = itertools.accumulate([end, *sizes])
        sections = [data[a:b] for a, b in itertools.pairwise(ends)]
        config = config_of(sections[0])
        if lanes != choose_lanes(num_tokens, config):
            raise ValueError("it has another number of lanes")
        spelled = unpack_lzma(sections[1])
        longest = np.frombuffer(spelled, "<u2", config.vocab_size).max()
        require_memory(lanes * _cache_bytes(config) + num_tokens * (24 + int(longest)), "its text")
        program = packed_restore(config)
        if data != _assembled(program, sections, start, num_tokens, lanes, sha256):
            raise ValueError("its program is another one")
    except Exception as error:  # what is no archive raises anything
        raise UserError(
            f"{path} is not an archive that this version of hfgolf writes ({one_line(error)}), so it was not run; read"
            " it, and run it with Python yourself if you trust it."
        ) from None
    text = _restored(data, path.name)
    with writing("--output", output):
        write_bytes(output, text)
    return len(text)


def choose_lanes(num_tokens: int, config: GolfConfig) -> int:
    """Return how many parts of a text are decoded side by side."""
    return max(1, min(MAX_LANES, num_tokens // TOKENS_PER_LANE, _CACHE_BYTES // _cache_bytes(config)))


def _cache_bytes(config: GolfConfig) -> int:
    """Return the bytes of the keys and values of a lane."""
    numbers = 2 * len(layer_order(config)) * config.num_key_value_heads * config.head_dim
    return 8 * numbers * config.max_position_embeddings


def encode_tokens(network: GolfNetwork, ids: Tensor, num_tokens: int) -> bytes:
    """Return the code of the tokens ids[:, 1:] (lanes, targets), of which num_tokens count; ids[:, 0] is known.

    rANS (Duda 2013, arXiv:1311.2540) with one state, a Python integer, for all lanes: the last token first. Passes read
    whole parts of a window, while restore.py reads one token at a time, so each archive proves that both are equal.
    """
    load_exact(network)
    config = network.model.config
    lanes, targets = ids.shape[0], ids.shape[1] - 1
    part = max(1, min(TOKENS_PER_PART, 2**22 // (lanes * config.vocab_size)))
    low, high = np.empty((2, targets + 1, lanes), np.int64)
    exact = Exact()
    with Guard():
        for begin, first, last in spans(targets, config.max_position_embeddings):
            window = Window(network, exact)
            for at in range(begin, last, part):
                end = min(at + part, last)
                logits = window.extend(ids[:, at:end], max(1, end + 1 - max(first, at + 1)))
                if end < first:
                    continue
                here = slice(max(first, at + 1), end + 1)
                sums, labels = cumulated(logits), ids[:, here, None]
                low[here], high[here] = (sums.gather(-1, labels + after)[..., 0].T for after in (0, 1))
    counts = np.arange(1, targets + 1)[:, None] + targets * np.arange(lanes) <= num_tokens
    pairs = zip(low[1:][counts].tolist(), high[1:][counts].tolist(), strict=True)
    state, stream = 2**STATE_BITS, bytearray()
    for start, end in reversed([*pairs]):
        while state >= (end - start) << (STATE_BITS + 8 - TOTAL_BITS):
            stream.append(state & 255)
            state >>= 8
        state = (state // (end - start) << TOTAL_BITS) + state % (end - start) + start
    return state.to_bytes(STATE_BITS // 8 + 1, "big") + stream[::-1]


def _bits(network: GolfNetwork, streams: Sequence[np.ndarray]) -> float:
    """Return the bits of streams of tokens, without their first, under the model in fp32 and in the same windows."""
    config = network.model.config
    windows = "sliding", max(1, config.max_position_embeddings // 2)
    nats = sum(evaluate(network, config, tokens, np.ones_like(tokens), *windows)["nats"] for tokens in streams)
    network.cpu()  # where all else of an archive is computed
    return float(nats) / math.log(2)


def _bits_of_lanes(network: GolfNetwork, rows: Sequence[np.ndarray]) -> float:
    """Return what it costs that each lane but the first begins without the context of the one before. rows: as read."""
    window = network.model.config.max_position_embeddings
    contexts = [row[-1 - max(1, window // 2) :] for row in rows[:-1]]
    begins = [row[: window + 1] for row in rows[1:]]
    both = [np.concatenate([context, begin[1:]]) for context, begin in zip(contexts, begins, strict=True)]
    return _bits(network, begins) + _bits(network, contexts) - _bits(network, both)


def _read_export(folder: Path) -> tuple[bytes, GolfConfig, GolfNetwork, PreTrainedTokenizerFast]:
    if (folder / UNPACK).is_file():
        raise UserError(f"{folder}: its model is of another architecture; only Golf models can be archived.")
    require_plain_files(folder)
    try:
        artifact = (folder / ARTIFACT).read_bytes()
        config = config_of(artifact)
        network = load_model(artifact, config.to_dict())[1]
        tokenizer = read_tokenizer(folder, config)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise UserError(
            f"{folder} is not a folder that `hfgolf golf export` wrote, or is damaged ({one_line(error)[:200]})."
        ) from None
    for name, allowed in _SUPPORTED.items():
        if (value := getattr(config, name)) not in allowed:
            raise UserError(
                f"{folder}: model.{name} {value} cannot be archived; it has no form that is equal on all machines."
                f" Allowed: {', '.join(allowed)}."
            )
    return artifact, config, network, tokenizer


def _find_files(names: Sequence[str]) -> list[Path]:
    try:
        return [file.path for file in match_files(DataSection(source="files", files=[*names]), "files", None)]
    except UserError as error:
        raise UserError(str(error).replace("data.files", "--files")) from None


def _read_text(path: Path) -> bytes:
    try:
        text = path.read_bytes()
        text.decode()
    except (OSError, UnicodeDecodeError) as error:
        wanted = "read" if isinstance(error, OSError) else "read as UTF-8"
        raise UserError(f"--files: {path} cannot be {wanted} ({error.args[-1]}); name files of plain text.") from None
    return text


def _tokenize(
    texts: Sequence[bytes], tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> tuple[np.ndarray, list[bytes]]:
    """Return the tokens of texts without the very first, and what each of vocab_size tokens spells.

    Raises UserError unless the tokens spell the texts: the archive has no other way to write them.
    """
    spellings = entry_spellings(tokenizer)
    spellings += [b""] * (vocab_size - len(spellings))
    encode, start = build_encoder(tokenizer, "pretrained"), document_start(tokenizer)
    found = list[int]()
    for text in texts:
        ids = encode([text.decode()])[0].tolist()
        if b"".join(spellings[number] for number in ids) != text:
            raise UserError(
                "--files: the entries of the tokenizer, joined, are not the bytes of the text, because it rewrites text"
                " (case operators, SentencePiece); use a byte, char or bpe tokenizer."
            )
        found += start + ids
    if max(found) >= vocab_size or max(map(len, spellings)) >= 2**16:
        raise UserError("--files: the tokenizer of this folder is not the model's.")
    return np.array(found[1:]), spellings


def _assembled(
    program: bytes, sections: Sequence[bytes], start: int, num_tokens: int, lanes: int, sha256: str
) -> bytes:
    """Return the file: the program and its sections, and then a zip file with the lines that run it."""
    file = io.BytesIO()
    stub = _STUB.format(len(program), *map(len, sections), start, num_tokens, lanes, sha256)
    entry = zipfile.ZipInfo("__main__.py")
    entry.create_system = 3  # the same bytes everywhere
    with zipfile.ZipFile(file, "w") as zipped:  # by itself: zipfile would read an entry in the sections
        zipped.writestr(entry, stub)
    return b"".join([program, *sections, file.getvalue()])


def _restored(data: bytes, name: str) -> bytes:
    """Return what an archive writes, in a process that sees nothing of hfgolf."""
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder, name), Path(folder, "text")
        file.write_bytes(data)
        try:
            run_alone([str(file), str(text)], Path(folder))
        except ValueError as error:
            raise UserError(f"{name} did not decode: {error}") from None
        return text.read_bytes()
