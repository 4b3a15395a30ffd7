"""Speed from text files to the token cache, compared with bare `tokenizers` on text in memory, and of a cached start.

    python benchmarks/tokenize_text.py --output benchmarks/results/tokenize_text_cpu.json

The texts are the standard library of the running Python, and torch's own source, which is four times as long. Ours is
load_tokens with an empty cache: identify, read, cut, load the tokenizer, tokenize, write. No tokenizer is trained; each
comes from a folder. Bare is one call with a loaded tokenizer on all the text in memory, cut into the same pieces, and
stores nothing: `encode_batch`, and `encode_batch_fast`, which skips the offsets. Every call uses a fresh tokenizer,
because a tokenizer's cache of words makes a second pass up to twice as fast. Repetitions are interleaved in one
process, and ratios are medians over pairs.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from machine import build_parser, write

VOCABULARIES = {"byte": 257, "bpe 4,096": 4096, "bpe 50,257": 50257}
TEXTS = ("python", "torch")
BARE = ("encode_batch", "encode_batch_fast")


def measure(name: str, text: str, folder: Path, repetitions: int) -> dict[str, Any]:
    """Return the seconds of each way of encoding, and the size of the text."""
    from tokenizers import Tokenizer

    from hfgolf.config import DataConfig, TokenizerConfig
    from hfgolf.data.corpus import load_corpus
    from hfgolf.data.token_cache import load_tokens

    def data(cache: Path | str) -> DataConfig:
        if text == "python":
            return DataConfig(cache_dir=str(cache))
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        source = Path(str(spec.origin)).parent
        return DataConfig(cache_dir=str(cache), source="files", files=[f"{source}/**/*.py"])

    config = TokenizerConfig(kind="bpe" if name.startswith("bpe") else "byte", vocab_size=VOCABULARIES[name])
    tokens = load_tokens(DataConfig(cache_dir=str(folder / "cache")), config)
    if config.kind == "bpe":
        tokens.tokenizer.save_pretrained(folder / name)
        config = TokenizerConfig(kind="pretrained", name_or_path=str(folder / name))
    tokens = load_tokens(data(folder / "cache"), config)
    pieces = load_corpus(data(folder / "cache")).write_pieces(folder / "pieces")
    texts = [text for split in pieces.values() for text in split["text"][:]]
    serialized = tokens.tokenizer.backend_tokenizer.to_str()

    seconds: dict[str, list[float]] = {way: [] for way in (*BARE, "hfgolf", "hfgolf, cached")}

    def clock(way: str, call: Callable[[], Any]) -> None:
        started_at = time.perf_counter()
        call()
        seconds[way].append(time.perf_counter() - started_at)

    for _ in range(repetitions):
        for way in BARE:
            backend = Tokenizer.from_str(serialized)
            encode = getattr(backend, way)
            clock(way, partial(encode, texts, add_special_tokens=False))
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            for way in ("hfgolf", "hfgolf, cached"):
                clock(way, partial(load_tokens, data(empty), config))
    num_bytes = tokens.train.num_bytes + tokens.val.num_bytes
    return {
        "tokenizer": name,
        "text": text,
        "bytes": num_bytes,
        "tokens": len(tokens.train) + len(tokens.val),
        "seconds": seconds,
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
