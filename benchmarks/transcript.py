"""The first five minutes of a new user as text: python benchmarks/transcript.py > docs/first_five_minutes.txt

Runs COMMANDS in an empty folder, in a terminal of 24 lines of 80 characters. Each line begins with the seconds since
its command began. Of what is drawn over itself, as the bar is, one state every ten seconds is kept.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hfgolf.system.hardware import cpu_cores, device_name
from hfgolf.system.wording import count_of

ROOT = Path(__file__).parents[1]
ROWS, COLUMNS = 24, 80
COMMANDS = (
    "(cd $HFGOLF && git ls-files '*.md' '*.py' | xargs cat) > my.txt",
    "hfgolf train my.txt --train.max_minutes 3 --train.max_steps null",
    'hfgolf generate runs/my "The model" --max_new_tokens 60',
    "hfgolf doctor runs/my",
    "ls runs/my",
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
    cpu, load = device_name(torch.device("cpu")), os.getloadavg()[0]
    print(f"# {time.strftime('%Y-%m-%d')}: {count_of(cpu_cores(), 'core')} of an {cpu}, load {load:.1f} at the start")
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        for seconds, line in shown(command):
            print(f"{seconds:7.1f}  {line}".rstrip(), flush=True)


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
