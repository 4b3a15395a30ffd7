"""Speed and memory of building the token cache of a text too large for memory. Linux only.

    python benchmarks/large_corpus.py --gigabytes 2        (growth.py measures several sizes)

The text is one document of random lines, with a fixed seed, from the standard library of the running Python. A separate
process trains a BPE tokenizer on a sample of it and tokenizes it. Memory is the peak of that process: "own" is what it
allocated (RssAnon, sampled ten times per second), which must not grow with the text. "with files" also counts pages of
mapped files (VmHWM), which the system can reclaim. The text is left alone for a moment first, because the hash of a
file that was just written is not kept, and the second start would read it again. Text and cache are in the temporary
folder (TMPDIR), which needs 4 times the size of the text, and are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import build_parser, write

from hfgolf.data.cache_folder import SETTLED_SECONDS

_LINES_AT_ONCE = 100_000


def write_text(path: Path, num_bytes: int) -> None:
    """Write at least num_bytes of random lines from the standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for source in sources for line in source.read_bytes().splitlines(keepends=True) if line.strip()]
    generator = random.Random(0)
    with open(path, "wb") as file:
        while file.tell() < num_bytes:
            file.write(b"".join(generator.choices(lines, k=_LINES_AT_ONCE)))


def child(path: str, cache_dir: str, vocab_size: int) -> dict[str, Any]:
    """Build the cache, and load it once more; the log goes to the terminal."""
    import logging

    from hfgolf.config.sections import DataSection, TokenizerSection
    from hfgolf.data.token_cache import load_tokens

    logging.basicConfig(level="INFO", format="%(message)s")
    data = DataSection(source="files", files=[path], split="contiguous", cache_dir=cache_dir, in_memory=False)
    seconds = []
    for _ in range(2):
        started_at = time.perf_counter()
        tokens = load_tokens(data, TokenizerSection(vocab_size=vocab_size))
        seconds.append(time.perf_counter() - started_at)
    return {"tokens": len(tokens.train) + len(tokens.val), "build_seconds": seconds[0], "cached_seconds": seconds[1]}


def kibibytes(process: int, field: str) -> int:
    """Return a field of the process's status in KiB, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def measure(gigabytes: float, vocab_size: int, folder: Path) -> dict[str, Any]:
    """Return the figures of the build, in bytes and seconds."""
    text, cache = folder / "text.txt", folder / "cache"
    write_text(text, int(gigabytes * 1e9))
    time.sleep(SETTLED_SECONDS)
    command = [sys.executable, __file__, "--child", str(text), str(cache), "--vocab_size", str(vocab_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        own, with_files = 0, 0
        while process.poll() is None:
            own = max(own, kibibytes(process.pid, "RssAnon"))
            with_files = max(with_files, kibibytes(process.pid, "VmHWM"))
            time.sleep(0.1)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return {
        "text_bytes": text.stat().st_size,
        "vocab_size": vocab_size,
        **json.loads(output.splitlines()[-1]),
        "peak_own_bytes": own * 1024,
        "peak_with_files_bytes": with_files * 1024,
        "cache_bytes": sum(path.stat().st_size for path in cache.glob("tokens/*/*/*")),
    }


def show(measured: dict[str, Any]) -> None:
    megabytes, seconds = measured["text_bytes"] / 1e6, measured["build_seconds"]
    print(f"text    {megabytes:,.0f} MB, {measured['tokens']:,} tokens")
    print(f"build   {seconds:,.1f} s, {megabytes / seconds:.1f} MB/s; again {measured['cached_seconds']:.2f} s")
    own, with_files = measured["peak_own_bytes"] / 1e6, measured["peak_with_files_bytes"] / 1e6
    print(f"memory  {own:,.0f} MB own, {with_files:,.0f} MB with files")
    print(f"cache   {measured['cache_bytes'] / 1e6:,.0f} MB")


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child[0], arguments.child[1], arguments.vocab_size)))
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(arguments.gigabytes, arguments.vocab_size, Path(folder))
    show(measured)
    write(arguments.output, ["tokenizers"], **measured)


if __name__ == "__main__":
    main()
