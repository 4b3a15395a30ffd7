"""Speed from text files to the token cache, compared with bare `tokenizers` on text in memory, and of a cached start.

    python benchmarks/tokenize_text.py --output benchmarks/results/tokenize_text_cpu.json

The texts are the standard library of the running Python, and torch's own source, which is four times as long. Ours is
load_tokens with an empty cache: identify, read, cut, load the tokenizer, tokenize, write. No tokenizer is trained; each
comes from a folder. Bare is one call with a loaded tokenizer on all the text in memory, cut into the same pieces, and
stores nothing: `encode_batch`, and `encode_batch_fast`, which skips the offsets. Every call uses a fresh tokenizer,
because a tokenizer's cache of words makes a second pass up to twice as fast. Each way has a process of its own: the
millions of objects that `encode_batch` frees would slow down what allocates after it, by a quarter in hfgolf's case.
They take turns, and ratios are medians over pairs.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, write

from hfgolf.config.sections import DataSection, TokenizerSection

VOCABULARIES = {"byte": 257, "bpe 4,096": 4096, "bpe 50,257": 50257}
TEXTS = ("python", "torch")
BARE = ("encode_batch", "encode_batch_fast")


@cache
def bare_input(text: str, folder: Path, tokenizer: TokenizerSection) -> tuple[list[str], str]:
    """Return a text in the pieces that hfgolf cuts it into, and the serialized tokenizer. Each process reads once."""
    from hfgolf.data.corpus import load_corpus
    from hfgolf.data.tokenizer import find_tokenizer

    own = Path(tempfile.mkdtemp(dir=folder))
    pieces = load_corpus(data_config(text, own)).write_pieces(own / "pieces")
    found = find_tokenizer(tokenizer, {}, own)
    assert found is not None
    return [text for split in pieces.values() for text in split["text"][:]], found.backend_tokenizer.to_str()


def time_bare(way: str, *what: Any) -> dict[str, float]:
    from tokenizers import Tokenizer

    texts, serialized = bare_input(*what)
    encode = getattr(Tokenizer.from_str(serialized), way)
    return {way: timed(lambda: encode(texts, add_special_tokens=False))}


def time_hfgolf(text: str, folder: Path, tokenizer: TokenizerSection) -> dict[str, float]:
    from hfgolf.data.token_cache import load_tokens

    with tempfile.TemporaryDirectory(dir=folder) as empty:
        start = partial(load_tokens, data_config(text, Path(empty)), tokenizer)
        return {way: timed(start) for way in ("hfgolf", "hfgolf, cached")}


def data_config(text: str, cache: Path) -> DataSection:
    if text == "python":
        return DataSection(cache_dir=str(cache))
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    source = Path(str(spec.origin)).parent
    return DataSection(cache_dir=str(cache), source="files", files=[f"{source}/**/*.py"])


def timed(call: Callable[[], Any]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def measure(name: str, text: str, folder: Path, repetitions: int) -> dict[str, Any]:
    """Return the seconds of each way of encoding, and the size of the text."""
    from hfgolf.data.token_cache import load_tokens

    config = TokenizerSection(kind="bpe" if name.startswith("bpe") else "byte", vocab_size=VOCABULARIES[name])
    if config.kind == "bpe":
        trained = load_tokens(data_config("python", folder / "cache"), config)
        trained.tokenizer.save_pretrained(folder / name)
        config = TokenizerSection(kind="pretrained", name_or_path=str(folder / name))
    tokens = load_tokens(data_config(text, folder / "cache"), config)
    calls: list[Callable[..., dict[str, float]]] = [*(partial(time_bare, way) for way in BARE), time_hfgolf]
    seconds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        processes = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in calls]
        for repetition in range(repetitions + 1):
            for process, call in zip(processes, calls, strict=True):
                for way, took in process.submit(call, text, folder, config).result().items():
                    if repetition:  # the first one is the warmup
                        seconds[way].append(took)
    return {
        "tokenizer": name,
        "text": text,
        "bytes": tokens.train.num_bytes + tokens.val.num_bytes,
        "tokens": len(tokens.train) + len(tokens.val),
        "seconds": dict(seconds),
    }


def show(measured: dict[str, Any]) -> None:
    megabytes = measured["bytes"] / 1e6
    print(f"{measured['tokenizer']}, {measured['text']}: {megabytes:.1f} MB, {measured['tokens']:,} tokens")
    for way, times in measured["seconds"].items():
        line = f"  {way:<20}{median(times):>8.3f} s ({min(times):.3f} to {max(times):.3f})"
        line += f"{megabytes / median(times):>10.1f} MB/s"
        if way in BARE:
            pairs = zip(times, measured["seconds"]["hfgolf"], strict=True)
            line += f"   hfgolf is {median(theirs / ours for theirs, ours in pairs):.2f} times as fast"
        print(line)


def main() -> None:
    parser = build_parser(__doc__, repetitions=9)
    parser.add_argument("--tokenizers", nargs="+", choices=VOCABULARIES, help="only these")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, help="only these")
    arguments = parser.parse_args()

    results = []
    for name, text in itertools.product(arguments.tokenizers or VOCABULARIES, arguments.texts or TEXTS):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(name, text, Path(folder), arguments.repetitions))
        show(results[-1])
    write(arguments.output, ["tokenizers"], results=results)


if __name__ == "__main__":
    main()
