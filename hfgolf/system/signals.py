"""Handle requests to stop or save (SIGTERM, SIGINT, SIGHUP, SIGUSR1) from the first line of a run to its last.

In the loop, a signal sets a flag that the loop reads after each step; elsewhere the process ends at once. A thread
hears it if a long call of a library runs no handlers. Imports nothing heavy, to be installed before torch is imported.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C reaches the launcher and its processes, and the launcher forwards it: two signals, one request. A launcher that
# dies is noticed by one process after the other.
SAME_REQUEST_SECONDS = 1.0
DEAF_SECONDS = 2.0
"""How long a handler may wait for Python to run it before the thread acts."""
BEFORE_THE_FIRST_STEP = "before the first step; run the same command to start again"
_LAUNCHER_POLL_SECONDS = 1.0
# Windows has neither of these.
_SIGHUP = getattr(signal, "SIGHUP", None)
_SIGUSR1 = getattr(signal, "SIGUSR1", None)


class Stopped(SystemExit):
    """Ends the process with status 128 + signal; the handler raises it if there is nothing to save."""


class Signals:
    """Handles signals while entered. Entering it again inside has no effect.

    The first request to stop raises Stopped, or inside `deferred()` only sets `stop`. A second one ends the process at
    once. Python installs handlers only in the main thread; in another thread, this object never receives a request.
    """

    def __init__(self, stop_message: str = BEFORE_THE_FIRST_STEP) -> None:
        self.stop = 0
        """Number of the signal that requested a stop; 0 if none did."""
        self.save = 0
        """1 if a checkpoint was requested."""
        self.stop_message = stop_message
        """Printed after "stopped by SIGTERM"."""
        self.runs = 0
        """How many have begun."""
        self._stopped_at = 0.0
        self._handled = 0
        """How many signals the handler has handled."""
        self._wakeup: tuple[socket.socket, int] | None = None
        """What the interpreter writes the number of each signal to, and what it wrote to before."""
        self._is_deferring = False
        self._depth = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop}
            if _SIGHUP and signal.getsignal(_SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                handlers[_SIGHUP] = self._on_stop
            if _SIGUSR1:
                handlers[_SIGUSR1] = self._on_save
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            self._listen()
            self._follow_launcher()
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
        if self._wakeup:
            writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            writer.close()  # ends the thread
            self._wakeup = None
        if isinstance(error, Stopped):
            self._print(f"stopped by {signal.Signals(self.stop).name} {self.stop_message}")

    def _print(self, line: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # the terminal may be closed
                print(line, file=sys.stderr, flush=True)

    def _listen(self) -> None:
        """Start the thread that hears signals while the main thread is in a call that lets no handler run."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        _forget_in_children()
        self._wakeup = writer, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reader,), daemon=True, name="signals").start()

    def _hear(self, reader: socket.socket) -> None:
        """Do what the handler would do, for each signal that it does not handle soon."""
        handled, has_warned = self._handled, False
        while numbers := reader.recv(64):
            stopping = [number for number in numbers if number in self._before and number != _SIGUSR1]
            heard_at = time.monotonic()
            while stopping and self._handled == handled and time.monotonic() < heard_at + DEAF_SECONDS:
                time.sleep(0.05)
            is_deaf, handled = bool(stopping) and self._handled == handled, self._handled
            reader.setblocking(False)
            with suppress(BlockingIOError):
                reader.recv(64)  # what came meanwhile is the same request
            reader.setblocking(True)
            if not (is_deaf and self._before) or (self.stop and heard_at - self._stopped_at <= SAME_REQUEST_SECONDS):
                continue
            if self._is_deferring and not (self.stop or has_warned):
                has_warned = True
                self._print(
                    f"{signal.Signals(stopping[0]).name}: waiting for the end of the step to save; a second one"
                    " ends the process without"
                )
            elif not (self._is_deferring and stopping[0] == _SIGHUP):
                where = "in the middle of a step, without a save" if self._is_deferring else self.stop_message
                self._print(f"stopped by {signal.Signals(stopping[0]).name} {where}")
                os._exit(128 + stopping[0])
        reader.close()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record a request to stop inside this context; raise Stopped on exit if it was not handled."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self.stop:
            raise Stopped(128 + self.stop)

    def agree(self, number: int) -> None:
        """Take over the stop that another process was asked for: what this one may hear later is the same request."""
        if number and not self.stop:
            self.stop, self._stopped_at = number, time.monotonic()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a forked child, such as a pool worker
            os._exit(128 + number)
        self._handled += 1
        now = time.monotonic()
        if not self.stop:
            self.stop, self._stopped_at = number, now
            if not self._is_deferring:
                raise Stopped(128 + number)
        elif number != _SIGHUP and now - self._stopped_at > SAME_REQUEST_SECONDS:  # nobody repeats SIGHUP on purpose
            os._exit(128 + number)  # not sys.exit, which would wait for a pending save

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = 1

    def _follow_launcher(self) -> None:
        """Send this process SIGTERM when its launcher dies; otherwise it would keep training unnoticed."""
        launcher = os.getppid()

        def watch() -> None:
            # not PR_SET_PDEATHSIG, which comes when the forking thread ends: launchers have several threads
            while os.getppid() == launcher:
                time.sleep(_LAUNCHER_POLL_SECONDS)
            if not self.stop:  # a second signal would end the process at once
                os.kill(os.getpid(), signal.SIGTERM)

        # for no other parent: a shell, for example, may end before training
        if "TORCHELASTIC_RUN_ID" in os.environ or launcher_options() is not None:
            threading.Thread(target=watch, daemon=True, name="launcher").start()


@functools.cache
def _forget_in_children() -> None:
    """In forked children, undo set_wakeup_fd: a signal to a child would count as one to this process."""

    def forget() -> None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def launcher_options() -> list[str] | None:
    """Return the words after `accelerate launch` if that started this process, else None."""
    import psutil

    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent else []
    except psutil.Error:  # it is gone, or must not be read
        return None
    names = [os.path.basename(word) for word in words]
    for place, name in enumerate(names):  # other programs have a word `launch`, too, such as `make launch`
        is_command = name == "launch" and names[place - 1].startswith("accelerate")
        if is_command or name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[place + 1 :]
    return None
