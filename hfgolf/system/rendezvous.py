"""How the processes of one run find each other: what a launcher tells each of them, and the wait until all are there.

Torch's own rendezvous waits in C++, where Python can neither say for whom nor hear a signal.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hfgolf.system.errors import UserError
from hfgolf.system.wording import join_words, one_line

logger = logging.getLogger(__name__)
PATIENCE_SECONDS = 3.0
"""How long a process waits before it says for whom."""
_REPEAT_SECONDS = 60.0
_POLL_SECONDS = 0.1
_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ALONE = "unset them to train with one process"
_meetings = itertools.count()


class LaunchError(UserError):
    """What a launcher says does not fit together. Each process says so, because their ranks may be wrong, too."""

    by_any_rank = True


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process of a run of several."""

    rank: int
    size: int
    host: str
    port: int

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def find_launch() -> Launch | None:
    """Return what a launcher told this process; None if nobody started several.

    Raises LaunchError if the variables are incomplete or do not fit together, as those of an earlier job.
    """
    stated = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    numbers = {name: _number(name, text) for name, text in stated.items() if name != "MASTER_ADDR"}
    size, rank, local_rank = (numbers.get(name) for name in _VARIABLES[:3])
    if local_rank is None and not rank and (size or 1) == 1:
        return None
    missing = [name for name in _VARIABLES if name not in stated]
    if missing:
        given = join_words((f"{name}={text}" for name, text in stated.items()), maximum=5)
        raise LaunchError(
            f"{missing[0]}: it is not set, but {given}; start several processes with torchrun or accelerate launch,"
            f" which set {join_words(_VARIABLES, ' and ')}, or {_ALONE}."
        )
    assert size is not None and rank is not None and local_rank is not None
    if not (rank < size and local_rank <= rank):
        raise LaunchError(
            f"RANK: {rank}, with LOCAL_RANK={local_rank} and WORLD_SIZE={size}; allowed: LOCAL_RANK <= RANK <"
            f" WORLD_SIZE. Start several processes with torchrun or accelerate launch, or {_ALONE}."
        )
    return Launch(rank, size, stated["MASTER_ADDR"], numbers["MASTER_PORT"]) if size > 1 else None


def _number(name: str, text: str) -> int:
    allowed = {"WORLD_SIZE": (1, 10**6), "MASTER_PORT": (0, 2**16 - 1)}.get(name, (0, 10**6))
    if not (text.isascii() and text.isdigit() and allowed[0] <= int(text[:9]) <= allowed[1]):
        raise LaunchError(f"{name}: {text[:40]!r} is not a whole number from {allowed[0]} to {allowed[1]}; {_ALONE}.")
    return int(text)


def meet(launch: Launch, patience: timedelta) -> Any:
    """Wait until all processes of the run are there, say for whom, and return the store that they share.

    patience: the timeout of the store's own calls, and how long to wait here. Raises UserError after that time, or if
    another program has the port.
    """
    wait = _Wait(launch, patience.total_seconds())
    store = _store(launch, patience, wait)
    meeting = next(_meetings)  # a process may train a second time
    names = {rank: f"hfgolf/here/{meeting}/{rank}" for rank in range(launch.size)}
    store.set(names[launch.rank], platform.node())
    while not store.check(list(names.values())):
        wait.turn(lambda: [rank for rank, name in names.items() if not store.check([name])])
    return store


class _Wait:
    """One wait, in short turns; says for whom after a while, and then every minute."""

    def __init__(self, launch: Launch, max_seconds: float) -> None:
        self._launch, self._max_seconds = launch, max_seconds
        self._began_at = time.monotonic()
        self._said_after = PATIENCE_SECONDS

    def turn(self, missing: Any, why: str = "") -> None:
        """Wait a moment. missing: returns the ranks that are not there. why: what kept this one from asking them."""
        seconds = time.monotonic() - self._began_at
        if seconds >= min(self._said_after, self._max_seconds):
            self._said_after += _REPEAT_SECONDS
            ranks = missing()
            said = (
                f"waiting for {len(ranks)} of {self._launch.size} processes at {self._launch.place}{why}:"
                f" rank {join_words(ranks, maximum=8)}; WORLD_SIZE={self._launch.size} is set,"
                " and unset it trains with one process"
            )
            if seconds >= self._max_seconds:
                raise LaunchError(f"WORLD_SIZE: gave up {said}.")
            logger.warning("%s", said)
        time.sleep(_POLL_SECONDS)


def _store(launch: Launch, patience: timedelta, wait: _Wait) -> Any:
    """Return torch's store: rank 0 has it, or torchrun's own process, and the others call that."""
    from torch.distributed import TCPStore

    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not is_host and (problem := _unreachable(launch)):
        wait.turn(lambda: [0], f" ({problem})")
    try:
        place = launch.host, launch.port, launch.size, is_host
        return TCPStore(*place, timeout=patience, wait_for_workers=False, multi_tenant=is_host)
    except RuntimeError as error:  # DistNetworkError
        if not is_host:
            raise LaunchError(
                f"MASTER_ADDR: no answer from rank 0 at {launch.place} ({one_line(error)[:200]})."
            ) from None
        raise LaunchError(
            f"MASTER_PORT: rank 0 cannot listen on port {launch.port} ({one_line(error)[-60:]}); another run may use"
            " it, so set another MASTER_PORT."
        ) from None


def _unreachable(launch: Launch) -> str | None:
    """Return why nobody listens where rank 0 should; None if somebody does."""
    try:
        socket.create_connection((launch.host, launch.port), timeout=5).close()
    except OSError as error:
        return error.strerror or one_line(error) or "no answer"
    return None
