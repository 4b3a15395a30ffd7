"""Being asked to stop or to save from outside: SIGTERM, SIGINT and SIGUSR1 as flags that the loop looks at.

Does not know what is done about them. Only the main thread can install handlers; elsewhere nothing is ever asked.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger(__name__)

# Ctrl-C reaches a launcher and its processes alike, and the launcher passes it on: that is one wish, not two.
_ONE_WISH_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Signals:
    """Remembers, while entered, a SIGTERM or SIGINT, and SIGUSR1; the second wish to stop ends the process at once."""

    def __init__(self) -> None:
        self.stop = 0
        """Number of the signal that asks for an end; 0: none."""
        self.save = 0
        """1 where somebody asks for a checkpoint."""
        self._stopped_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop}
            if hasattr(signal, "SIGUSR1"):
                handlers[signal.SIGUSR1] = self._on_save
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.stop:
            self.stop, self._stopped_at = number, now
        elif now - self._stopped_at > _ONE_WISH_SECONDS:
            os._exit(128 + number)  # not sys.exit: that would wait for a save under way

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = 1


def follow_launcher() -> None:
    """Have the kernel send SIGTERM to this process when `accelerate launch` dies; Linux only.

    With one process the launcher neither passes SIGTERM on nor waits: training would go on without it, unseen.
    """
    parent = psutil.Process().parent()
    words = set(map(os.path.basename, parent.cmdline())) if parent else set()
    is_launcher = {"accelerate", "launch"} <= words or words & {"accelerate-launch", "accelerate.commands.launch"}
    if sys.platform == "linux" and is_launcher:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
