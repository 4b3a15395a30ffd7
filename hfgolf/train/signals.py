"""Being asked to stop or to save: SIGTERM, SIGINT, SIGHUP and SIGUSR1, from the first line of a run to its last.

In the training loop a signal is only noted; the loop looks at it after each step. Elsewhere there is nothing to save,
so the process ends at once. Does not know what is done about a wish. Imports nothing heavy: the handlers must be there
before torch is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C reaches a launcher and its processes alike, and the launcher passes it on: that is one wish, not two.
_ONE_WISH_SECONDS = 1.0
_LAUNCHER_POLL_SECONDS = 1.0
_SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has neither this one
_SIGUSR1 = getattr(signal, "SIGUSR1", None)  # nor this one


class Stopped(SystemExit):
    """End the process with 128 + the signal's number; raised by the handler where there is nothing to save."""


class Signals:
    """Handle signals while entered; may be entered again inside, which changes nothing.

    The first wish to stop raises Stopped, or is noted inside of `noted()`. A second one ends the process at once. Only
    the main thread can install handlers; elsewhere nobody is ever asked for anything.
    """

    def __init__(self, where: str = "before the first step; the same command starts again") -> None:
        self.stop = 0
        """Number of the signal that asks for an end; 0: none."""
        self.save = 0
        """1 if somebody asks for a checkpoint."""
        self.where = where
        """What a person reads after "stopped by SIGTERM"."""
        self._stopped_at = 0.0
        self._is_noting = False
        self._depth = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop}
            if _SIGHUP and signal.getsignal(_SIGHUP) != signal.SIG_IGN:  # nohup ignores it, and means that
                handlers[_SIGHUP] = self._on_stop
            if _SIGUSR1:
                handlers[_SIGUSR1] = self._on_save
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            follow_launcher(lambda: bool(self.stop))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if isinstance(error, Stopped) and os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # a terminal that was closed
                print(f"stopped by {signal.Signals(self.stop).name} {self.where}", file=sys.stderr)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Only note, inside, that somebody wants an end; raise Stopped on leaving if nothing was done about it."""
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False
        if self.stop:
            raise Stopped(128 + self.stop)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that was forked, not executed: a worker of a pool
            os._exit(128 + number)
        now = time.monotonic()
        if not self.stop:
            self.stop, self._stopped_at = number, now
            if not self._is_noting:
                raise Stopped(128 + number)
        elif number != _SIGHUP and now - self._stopped_at > _ONE_WISH_SECONDS:  # nobody repeats a SIGHUP on purpose
            os._exit(128 + number)  # not sys.exit: that would wait for a save under way

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = 1


def follow_launcher(is_stopping: Callable[[], bool] = lambda: False) -> None:
    """Have this process stop, by SIGTERM, when its launcher dies: training would go on without it, unseen.

    is_stopping: says that somebody has asked for an end already, so that no second wish is made of the launcher's.
    """
    launcher = os.getppid()

    def watch() -> None:
        # not PR_SET_PDEATHSIG: the kernel sends that at the end of the thread that forked, and launchers have several
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_POLL_SECONDS)
        if not is_stopping():
            os.kill(os.getpid(), signal.SIGTERM)

    if _is_launcher(launcher):
        threading.Thread(target=watch, daemon=True, name="launcher").start()


def _is_launcher(process: int) -> bool:
    """Say whether a process is `accelerate launch` or `torchrun`: a shell, for one, may end before the training."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    import psutil

    try:
        words = set(map(os.path.basename, psutil.Process(process).cmdline()))
    except psutil.Error:
        return False
    return {"accelerate", "launch"} <= words or bool(words & {"accelerate-launch", "accelerate.commands.launch"})
