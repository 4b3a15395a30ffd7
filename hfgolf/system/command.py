"""Run a command: its errors in one line, its status, and output whose reader may be gone; imports nothing heavy."""

from __future__ import annotations

import io
import os
import select
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hfgolf.system.errors import UserError, explained
from hfgolf.system.redact import redact


def run_command(main: Callable[[], int | None]) -> None:
    """Run a script's main(). A UserError becomes one line on stderr, once per machine, and exit status 2.

    So does any error behind which is something that the machine refuses, such as space on a disk.
    """
    # before torch is imported: when a process is gone, its store writes 30 lines of C++ frames for each call
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "OMP_WAIT_POLICY" not in os.environ:
        # Before torch is imported: in each step its threads wait for each other hundreds of times. If they sleep soon
        # instead of spinning, a step beside a busy program is 1.5 times as fast on two cores, and alone it is 3 to 4 %
        # slower (benchmarks/busy_machine.py).
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample holds any character, an old locale's terminal does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        odd = next((word for word in sys.argv if not word.isprintable()), None)
        if odd is not None and sys.getfilesystemencoding() != "utf-8":
            raise UserError(f"the command line: this locale has no characters for {odd!r}; set LC_ALL=C.UTF-8.")
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        status = _say(error)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        if not silence_if_closed(sys.stdout):
            raise
        status = 141  # 128 + SIGPIPE
    except OSError as error:
        if error.filename is None and (reason := _refusal_of(sys.stdout)):
            with suppress(OSError):
                print(f"error: the output could not be written: {reason}.", file=sys.stderr)
            status = 1
        else:
            status = _say(explained(error) or error)
    except Exception as error:
        status = _say(explained(error) or error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not silence_if_closed(stream):  # else Python's flush at exit fails, and the status becomes 120
                _refusal_of(stream, "")
    sys.exit(status)


def _say(error: Exception) -> int:
    """Print a UserError, unless the first process of this machine does, and return the exit status; else raise it."""
    if not isinstance(error, UserError):
        raise error
    if is_first_of_machine() or error.by_any_rank:  # ranks.py tells the first of the others' errors
        with suppress(OSError):
            print(error.shown(redact), file=sys.stderr)
    return 2


def own_command() -> str:
    """Return what a person types here for `hfgolf`: its path if no shell would find it, as in a .venv not activated."""
    beside = shutil.which("hfgolf", path=str(Path(sys.executable).parent))
    if shutil.which("hfgolf"):
        return "hfgolf"
    if beside is None:
        return f"{shlex.quote(sys.executable)} -m hfgolf"
    return shlex.quote(os.path.relpath(beside) if Path(beside).is_relative_to(Path.cwd()) else beside)


def is_first_of_machine() -> bool:
    """Return whether this is the first of a run's processes on this machine, which speaks for them."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def _refusal_of(stream: TextIO | None, text: str = "\n") -> str | None:
    """Return why a stream takes no text, and redirect it to nowhere; None if it takes some."""
    if stream is None or stream.closed:
        return None
    try:
        print(end=text, file=stream, flush=True)
    except OSError as error:
        _silence(stream.fileno())
        return error.strerror
    return None


def silence_if_closed(stream: TextIO | None) -> bool:
    """Redirect a stream to nowhere if its reader is gone (closed terminal, broken pipe); return whether it was."""
    if stream is None or not hasattr(select, "poll"):  # Windows has no poll
        return False
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # report only errors and hang-ups
    if not poll.poll(0):
        return False
    _silence(descriptor)
    return True


def _silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
