"""The first five minutes of a new user as text: python benchmarks/transcript.py PLAY > docs/first_five_minutes.txt

PLAY is the text tinyshakespeare. Runs COMMANDS in a folder with four texts that `write_texts` makes, in a terminal of
24 lines of 80 characters. Each line begins with the seconds since its command began. Of what is drawn over itself, as
the bar is, one state every ten seconds is kept. Paths are shown without that folder.
"""

from __future__ import annotations

import csv
import datetime
import fcntl
import gzip
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch

from hfgolf.system.hardware import cpu_cores, device_name
from hfgolf.system.wording import count_of

ROOT = Path(__file__).parents[1]
ROWS, COLUMNS = 24, 80
COMMANDS = (
    "ls -sh",
    "hfgolf train deutsch.txt --minutes 1",
    "hfgolf generate runs/deutsch 'Die Datei' --max_new_tokens 60",
    "head -3 chat.txt",
    "hfgolf train chat.txt --minutes 1",
    "hfgolf generate runs/chat --max_new_tokens 60",
    "head -2 reviews.csv | cut -c 1-78",
    "hfgolf train reviews.csv --minutes 1",
    "hfgolf train reviews.csv --minutes 1 --data.text_column review",
    "hfgolf generate runs/reviews --max_new_tokens 60",
    "hfgolf train project --minutes 1",
    "hfgolf generate runs/project 'def main(' --max_new_tokens 60",
    "hfgolf doctor runs/project",
    "ls runs/project",
)
FRAME_SECONDS = 10
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def main() -> None:
    folder = tempfile.mkdtemp()
    bin_folder = Path(folder, ".bin")
    bin_folder.mkdir()
    (bin_folder / "hfgolf").write_text(f'#!/bin/sh\nexec {sys.executable} -m hfgolf "$@"\n')
    (bin_folder / "hfgolf").chmod(0o755)
    os.environ |= {"HFGOLF": str(ROOT), "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    os.chdir(folder)
    write_texts(Path(sys.argv[1]).read_text())
    cpu, load = device_name(torch.device("cpu")), os.getloadavg()[0]
    print(f"# {time.strftime('%Y-%m-%d')}: {count_of(cpu_cores(), 'core')} of an {cpu}, load {load:.1f} at the start")
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        for seconds, line in shown(command):
            print(f"{seconds:7.1f}  {line.replace(f'{folder}/', '')}".rstrip(), flush=True)


def write_texts(play: str) -> None:
    """Write German prose (man pages), a play as a chat's export, a table of reviews, and a source tree."""
    pages = sorted(Path("/usr/share/man/de").glob("man*/*.gz"))
    source = b"\n".join(gzip.decompress(page.read_bytes()) for page in pages)
    left_aligned = ["-rHY=0", "-dAD=l"]
    command = ["groff", "-kt", "-mandoc", "-Tutf8", "-P-cbou", *left_aligned]
    shown_page = subprocess.run(command, input=source, capture_output=True)
    Path("deutsch.txt").write_bytes(shown_page.stdout)
    clock = datetime.datetime(2024, 3, 1, 18)
    with Path("chat.txt").open("w") as chat:
        for part in play.split("\n\n"):
            name, _, words = part.partition(":\n")
            clock += datetime.timedelta(seconds=len(part))
            chat.write(f"[{clock:%d.%m.%y, %H:%M:%S}] {name.title()}: {' '.join(words.split())}\n")
    with Path("reviews.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "stars", "review"))
        paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 60)
        table.writerows((number, 1 + number % 5, " ".join(part.split())) for number, part in enumerate(paragraphs))
    shutil.copytree(ROOT / "hfgolf", "project", ignore=shutil.ignore_patterns("__pycache__"))


def shown(command: str) -> Iterator[tuple[float, str]]:
    """Yield (seconds, line) of what a command shows in a terminal."""
    started_at, kept_at, rest = time.monotonic(), 0.0, ""
    process, terminal = pty.fork()
    if process == 0:
        os.execvp("sh", ["sh", "-c", f"stty rows {ROWS} cols {COLUMNS}; {command}"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while chunk := _read(terminal):
        rest += _ESCAPES.sub("", chunk.decode(errors="replace")).replace("\r\n", "\n")
        *parts, rest = re.split("(?<=[\r\n])", rest)
        for part in parts:
            seconds = time.monotonic() - started_at
            is_frame = part.endswith("\r")
            if part.strip() and (not is_frame or seconds - kept_at >= FRAME_SECONDS):
                kept_at = seconds if is_frame else kept_at
                yield seconds, part.rstrip()
    os.waitpid(process, 0)


def _read(terminal: int) -> bytes:
    """Return what there is, b"" at the end."""
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux says so when the last process has closed its side
        return b""


if __name__ == "__main__":
    main()
