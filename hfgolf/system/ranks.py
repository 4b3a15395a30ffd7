"""One decision for all ranks of a run, and one end: they exchange values, and a failure of one rank reaches the others.

The exchange uses the store of torch's process group and no collective: it needs no device, may wait for hours while one
rank prepares data, and ends at once if a rank fails. With one process, nothing here costs anything.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
from torch import distributed

from hfgolf.system.command import is_first_of_machine
from hfgolf.system.errors import UserError, explained
from hfgolf.system.redact import redact, redact_values
from hfgolf.system.wording import one_line

Value = TypeVar("Value")

_POLL_SECONDS = 0.1
_WATCH_SECONDS = 1.0
_SHOWN = 120  # characters of a value in a message
FAREWELL_SECONDS = 3.0
"""How long a failed rank waits until the others know; then the store may end with it."""
STUCK_SECONDS = 60.0
"""How long a rank may remain in a collective that a failed rank has left alone."""
SILENT_SECONDS = 300.0
"""How long a rank may give no sign of life until the others take it for dead; a collective that breaks says so sooner.

A process that is stopped, or that never lets another thread run, gives none, either.
"""
GONE_SECONDS = 5.0
"""The same, if a collective has broken."""
_exchanges = itertools.count()
_failures: dict[int, tuple[str, str]] = {}
"""{rank: (its name, its line)} of the ranks that have ended with an error, as far as this one knows; see _part."""
_silent: set[int] = set()
"""The ranks that have given no sign of life for too long."""


@dataclass(frozen=True)
class _Group:
    """The ranks of this run, as `together` found them: the end of training destroys torch's process group."""

    rank: int
    size: int
    store: Any


class _Pulse:
    """The signs of life of all ranks: each rank writes a new one to the store every second, in a thread."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        # an object of its own: a blocking call on the other one, as in torch's rendezvous, would hold up this one
        self._store = group.store.clone()
        self._seen = dict.fromkeys(set(range(group.size)) - {group.rank}, (b"", time.monotonic()))
        """{rank: (its last sign, when it was new)}."""

    def beat(self) -> None:
        """Write a sign, and look for new ones."""
        with suppress(RuntimeError):  # the store has ended: all the others seem silent, rank 0 first
            sign = json.dumps(
                [f"rank {self._group.rank} ({platform.node()})", _machine(), os.getpid(), time.monotonic()]
            )
            self._store.set(f"hfgolf/alive/{self._group.rank}", sign)
            for rank, (last, _) in list(self._seen.items()):
                key = f"hfgolf/alive/{rank}"
                if self._store.check([key]) and (sign_of_other := self._store.get(key)) != last:
                    self._seen[rank] = (sign_of_other, time.monotonic())

    def note_silent(self, seconds: float) -> bool:
        """Note each rank that has been silent for so long as failed, for all ranks; return whether there is one."""
        silent = [
            (rank, sign) for rank, (sign, at) in self._seen.items() if time.monotonic() - at > seconds or _is_gone(sign)
        ]
        for rank, sign in silent:
            who = json.loads(sign)[0] if sign else f"rank {rank}"
            line = "gives no sign of life; it was killed, ran out of memory, or its machine is gone"
            _failures.setdefault(rank, (who, line))
            _silent.add(rank)
            with suppress(RuntimeError):
                self._store.set(f"hfgolf/failed/{rank}", json.dumps(_failures[rank]))
        return bool(silent)


def _machine() -> str | None:
    """Return a name of the processes that this one can see by their numbers; None if that is unknown."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None


def _is_gone(sign: bytes) -> bool:
    """Return whether the rank that wrote a sign of life was a process of this machine and has ended."""
    if not sign:
        return False
    _, machine, process, _ = json.loads(sign)
    if machine is None or machine != _machine():
        return False
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_group: _Group | None = None


class RankError(UserError):
    """The failure of one rank, as all ranks raise it."""


class _HeardError(RankError):
    """Repeats what another rank has said."""


def gather(value: Value) -> list[Value]:
    """Return the value of each rank, by rank. All ranks call it. Raises RankError if a rank has failed instead."""
    group = _group or _find_group()
    if group is None:
        return [value]
    name, pause = f"hfgolf/{next(_exchanges)}", 0.001
    group.store.set(f"{name}/{group.rank}", pickle.dumps(value))
    keys = [f"{name}/{rank}" for rank in range(group.size)]
    while not group.store.check(keys):
        if _listen(group) and not group.store.check(keys):  # a rank may have answered, and failed only then
            raise _HeardError(_report(group))
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return [pickle.loads(group.store.get(key)) for key in keys]


def decide(decision: Callable[[], Value]) -> Value:
    """Return the decision of rank 0, the only one that calls `decision`. Raises RankError if that fails."""
    group = _group or _find_group()
    answers: list[Any] = gather(decision() if group is None or group.rank == 0 else None)
    return answers[0]


def agree(values: Mapping[str, Any], advice: str) -> None:
    """Raise RankError if a value differs between ranks; it names the lowest rank that differs from rank 0.

    values: {name: value}, with secrets; they are redacted in the message.
    """
    everyone = gather((platform.node(), dict(values)))
    first, of_first = everyone[0]
    for rank, (node, of_other) in enumerate(everyone):
        names = [name for name in of_first | of_other if of_first.get(name) != of_other.get(name)]
        if names:
            key = names[0]
            mine, other = (one_line(redact_values({key: one.get(key)})[key])[:_SHOWN] for one in (of_first, of_other))
            more = f" ({len(names) - 1} more differ)" if len(names) > 1 else ""
            raise RankError(f"{key}: {mine} on rank 0 ({first}), but {other} on rank {rank} ({node}){more}; {advice}.")


@contextmanager
def first_of_machine() -> Iterator[None]:
    """Run a block on the first rank of each machine, then on its others, which find what the first has cached."""
    if not is_first_of_machine():
        gather(None)
    yield
    if is_first_of_machine():
        gather(None)


@contextmanager
def together(num_ranks: int) -> Iterator[None]:
    """Let a failure in this context on any rank end the context on all of them.

    All ranks then raise a RankError with the same line, except that an error that is not a UserError keeps its
    traceback where it happened. The process group must exist if there are several. Entering it again inside has no
    effect.
    """
    global _group
    if _group is not None or num_ranks == 1:
        yield
        return
    group = _group = _find_group()
    assert group is not None
    ended, pulse = threading.Event(), _Pulse(group)
    watcher = threading.Thread(target=_watch, args=(group, pulse, ended), daemon=True, name="ranks")
    watcher.start()
    try:
        yield
        gather(None)  # rank 0 still exports and pushes, which may fail
        _leave(group, STUCK_SECONDS)  # all are well, so they only have to get to it
    except UserError as error:
        _part(group, "" if isinstance(error, _HeardError) else str(error))
        raise _reported(group) from None
    except Exception as error:
        # a collective that a failed or dead rank has left alone raises a RuntimeError of gloo or NCCL
        if isinstance(error, RuntimeError) and _wait_until(
            lambda: _listen(group) or pulse.note_silent(GONE_SECONDS), GONE_SECONDS + _WATCH_SECONDS
        ):
            _part(group, "")
            raise _reported(group) from None
        line = explained(error)
        _part(group, str(line) if line else f"{type(error).__name__}: {one_line(error)[:300]}")
        if line:
            raise _reported(group) from error
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        _part(group, _stop_line(error))
        raise
    finally:
        ended.set()
        watcher.join(FAREWELL_SECONDS)  # Python aborts if it ends while a thread is in a call of the store
        _group = None


def _find_group() -> _Group | None:
    """Return the ranks of torch's process group; None if there is none, or it has one rank."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    # a store of our own would need a second port between the machines
    store = distributed.distributed_c10d._get_default_store()
    return _Group(distributed.get_rank(), distributed.get_world_size(), store)


def _listen(group: _Group) -> bool:
    """Return whether a rank has failed, and note what each said."""
    with suppress(RuntimeError):  # the store has ended; _failures has what was heard before
        for rank in set(range(group.size)) - _failures.keys():
            key = f"hfgolf/failed/{rank}"
            if group.store.check([key]):
                who, line = json.loads(group.store.get(key))
                _failures[rank] = (who, line)
    return any(line for _, line in _failures.values())


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    ends_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends_at:
        time.sleep(_POLL_SECONDS)
    return condition()


def _part(group: _Group, line: str) -> None:
    """Tell the others that this rank has failed, and wait a moment for them to hear it, so that all know the same.

    line: empty if this rank only heard of a failure.
    """
    name = f"rank {group.rank} ({platform.node()})"
    _failures[group.rank] = (name, line)  # known here even if the store has ended, as _report needs
    with suppress(RuntimeError):  # the store has ended
        group.store.set(f"hfgolf/failed/{group.rank}", json.dumps([name, line]))
        _wait_until(lambda: _listen(group) and len(_failures) == group.size, FAREWELL_SECONDS)
        _leave(group, FAREWELL_SECONDS)
    if not is_first_of_machine():
        time.sleep(_WATCH_SECONDS)  # a launcher ends the others once one ends: the first must have said the line


def _leave(group: _Group, seconds: float) -> None:
    """Let rank 0 end last, but wait no longer than that: the store may be in its process."""
    with suppress(RuntimeError):
        if group.rank:
            group.store.set(f"hfgolf/left/{group.rank}", "")
        else:
            keys = [f"hfgolf/left/{rank}" for rank in range(1, group.size)]
            _wait_until(lambda: group.store.check(keys), seconds)


def _report(group: _Group) -> str:
    """Return the line of all ranks if all failed alike, else that of the lowest rank that failed, with its name."""
    said = [_failures[rank] for rank in sorted(_failures) if _failures[rank][1]]
    who, line = said[0]
    is_alike = len(said) == group.size and len({line for _, line in said}) == 1
    return line if is_alike else f"{who}: {line}"


def _reported(group: _Group) -> RankError:
    error = RankError(_report(group))
    error.by_any_rank = _speaks_for_machine(group)
    return error


def _speaks_for_machine(group: _Group) -> bool:
    """Return whether this process says what has failed: the first of its machine, or the next if that is dead."""
    own = int(os.environ.get("LOCAL_RANK", "0"))
    return all(rank in _silent for rank in range(group.rank - own, group.rank))


def _stop_line(error: BaseException) -> str:
    """Return what the others say if a signal or a script has ended this rank."""
    code = error.code if isinstance(error, SystemExit) else 130
    try:
        name = signal.Signals(int(code) - 128).name  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"ended with status {code}."
    return f"stopped by {name}; run the same command to start again."


def _watch(group: _Group, pulse: _Pulse, ended: threading.Event) -> None:
    """End this process if another rank has failed and this one does not notice, as in a collective of NCCL."""
    pulse.beat()
    while not ended.wait(_WATCH_SECONDS):
        pulse.beat()
        if _listen(group) or pulse.note_silent(SILENT_SECONDS):
            break
    if not ended.wait(STUCK_SECONDS):
        if _speaks_for_machine(group):
            print(RankError(_report(group)).shown(redact), file=sys.stderr, flush=True)
        os._exit(2)
