"""How small do the usual compressors make a text, and an archive of hfgolf?

    apt install xz-utils zstd brotli bzip2 p7zip-full zpaq
    python benchmarks/compressors.py input.txt --archive runs/input.pyz

Runs each program on the text, in a folder of its own, and adds a row for each to compressors.jsonl beside this file:
bytes, seconds and the most memory, in MB, of both ways. Each text must come back byte for byte. The program that
decompresses is no part of the bytes, but of those of an archive of hfgolf (`hfgolf golf archive`), which has its model
as well. Prints a table for each text, smallest first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hfgolf.system.hardware import device_name

sys.path.append(str(Path(__file__).parent))
from jobs import series_of

ROWS = Path(__file__).with_suffix(".jsonl")
PROGRAMS = {
    "xz -9e": ("xz -9e -k -c text > packed", "xz -d -c packed > text"),
    "zstd --ultra -22 --long=27": (
        "zstd -q --ultra -22 --long=27 text -o packed",
        "zstd -q -d --long=27 packed -o text",
    ),
    "brotli -q 11 -w 24": ("brotli -q 11 -w 24 text -o packed", "brotli -d packed -o text"),
    "bzip2 -9": ("bzip2 -9 -c text > packed", "bzip2 -d -c packed > text"),
    "7z PPMd, order 16, 1 GB": ("7z a -m0=PPMd:o16:mem=1g packed.7z text && mv packed.7z packed", "7z x packed"),
    "zpaq -m5": ("zpaq add packed.zpaq text -m5 && mv packed.zpaq packed", "mv packed p.zpaq && zpaq x p.zpaq"),
}
"""{program: how to make `packed` of the file `text`, and the other way}."""

_ALONE = """
import resource, subprocess, sys
subprocess.run(["bash", "-ec", sys.argv[1]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""  # a child begins with the memory of the process that forks it, so a small one does


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--archive", type=Path, nargs="*", default=[], help="of this text, by hfgolf golf archive")
    arguments = parser.parse_args()
    text = arguments.text.read_bytes()
    ways: list[tuple[str, str | None, str, Path | None]]
    ways = [(name, *PROGRAMS[name], None) for name in arguments.programs]
    ways += [(f"hfgolf, {path.stem}", None, f"{sys.executable} -I packed > text", path) for path in arguments.archive]
    for name, pack, unpack, archive in ways:
        with ROWS.open("a") as file:
            file.write(json.dumps(measure(arguments.text.name, text, name, pack, unpack, archive)) + "\n")
    for title, rows in series_of(ROWS, lambda row: f"{row['text']}, {row['bytes']:,} bytes, {row['machine']}").items():
        print(title)
        for row in sorted(rows, key=lambda row: row["packed_bytes"]):
            unpacked = f"unpacked in {row['unpack_seconds']:.1f} s, {row['unpack_mb']:.0f} MB"
            packed = f"packed in {row['pack_seconds']:.1f} s, {row['pack_mb']:.0f} MB; " if row["pack_seconds"] else ""
            print(f"  {row['packed_bytes']:10,}  {row['bits_per_byte']:.3f}  {row['program']:28}  {packed}{unpacked}")


def measure(title: str, text: bytes, name: str, pack: str | None, unpack: str, archive: Path | None) -> dict[str, Any]:
    """Return the row of a program. Raises ValueError if the text does not come back."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "text").write_bytes(text)
        pack_seconds, pack_mb = measured(pack, folder) if pack else (None, None)
        if archive:
            (folder / "packed").write_bytes(archive.read_bytes())
        packed_bytes = (folder / "packed").stat().st_size
        (folder / "text").unlink()
        unpack_seconds, unpack_mb = measured(unpack, folder)
        if (folder / "text").read_bytes() != text:
            raise ValueError(f"{name}: another text came back")
    return {
        "text": title,
        "sha256": hashlib.sha256(text).hexdigest()[:12],
        "bytes": len(text),
        "program": name,
        "packed_bytes": packed_bytes,
        "bits_per_byte": 8 * packed_bytes / len(text),
        "pack_seconds": pack_seconds,
        "pack_mb": pack_mb,
        "unpack_seconds": unpack_seconds,
        "unpack_mb": unpack_mb,
        "machine": device_name(torch.device("cpu")),
    }


def measured(command: str, folder: Path) -> tuple[float, float]:
    """Run a command of the shell in a folder; return its seconds and the most memory of one of its processes, in MB."""
    started_at = time.perf_counter()
    alone = [sys.executable, "-I", "-c", _ALONE, command]
    kilobytes = subprocess.run(alone, cwd=folder, check=True, stdout=subprocess.PIPE).stdout
    return time.perf_counter() - started_at, int(kilobytes) / 1024


if __name__ == "__main__":
    main()
