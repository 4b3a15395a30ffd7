"""The one exception that a user can fix, and what the machine refuses, in one line. Imports nothing else of hfgolf."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# C0 and C1, what separates lines, and characters that reverse text (bidirectional controls, Unicode TR 36)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str, keep: str = "") -> str:
    """Return text with its control characters escaped, except those of `keep`: a file's name could forge a line."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


class UserError(Exception):
    """Report a mistake that the user can fix, in one line: what, where, what is allowed, what to do.

    Scripts print the message without a traceback and exit with status 2. Its control characters are escaped there. A
    message has more lines only on purpose: each is an argument of its own.
    """

    by_any_rank = False
    """Whether each process prints it, not only the first one of each machine."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))

    def shown(self, clean: Callable[[str], str] = str) -> str:
        """Return what a terminal or a notebook shows. clean: redacts a line."""
        return "error: " + "\n".join(escaped(clean(str(line))) for line in self.args)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback (IPython's protocol)."""
        return [self.shown()]


_ADVICE = {
    errno.ENOSPC: "free up space there, or choose another folder",
    errno.EDQUOT: "your quota there is used up; free up space, or choose another folder",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose a folder that you may write to, or change its permissions",
    errno.EPERM: "choose a folder that you may write to, or change its permissions",
    errno.EIO: "the disk or the way to it fails; choose another folder",
    errno.ESTALE: "the network file system has lost it; mount it again, or choose another folder",
    errno.EFBIG: "the file system or `ulimit -f` allows no larger files; choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOLCK: "the file system there has no locks; choose a folder on another one",
    errno.ENFILE: "this machine cannot open more files; end other programs",
    errno.EMFILE: "this process cannot open more files; raise the limit, as with `ulimit -n 4096`",
    errno.ENOMEM: "free memory, or take a smaller model or batch.micro_batch_size",
}
_CODE = re.compile(r"\b(?:os error|errno) (\d+)\b", re.IGNORECASE)  # of Rust; of Python and Arrow
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc", "could not create a primitive")


def refusal(error: BaseException) -> tuple[str, str] | None:
    """Return (what the machine refuses, advice) if that is behind an error of any library; None if it is not.

    Libraries hide an OSError in their own errors: SafetensorError, ArrowException, tokenizers' plain Exception.
    """
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        code = _code(following)
        if code in _ADVICE:
            return os.strerror(code), _ADVICE[code]
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return None


def _code(error: BaseException) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.errno:
        return error.errno
    is_of_memory = isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
    if is_of_memory or isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, UserError) or not isinstance(error, Exception):
        return 0
    if found := _CODE.search(text):
        return int(found[1])
    return next((code for code in _ADVICE if code != errno.EIO and os.strerror(code) in text), 0)


def explained(error: Exception) -> UserError | None:
    """Return an error of any library as a UserError if the machine's refusal is behind it; None if it is not."""
    found = refusal(error)
    if found is None:
        return None
    what, advice = found
    path = _named_path(error)
    return UserError(f"{f'{path}: ' if path else ''}{what}; {advice}.")


def _named_path(error: Exception) -> Path | None:
    """Return the file that an error of any library names, None if it names none."""
    chain = [error, error.__cause__, error.__context__]
    names = [one.filename for one in chain if isinstance(one, OSError) and isinstance(one.filename, str | bytes)]
    return Path(os.fsdecode(names[0])) if names else None


@contextmanager
def writing(key: str, place: Path) -> Iterator[None]:
    """Raise UserError if the machine refuses what this block writes, whichever library notices it.

    key: the option or key that names the place, for the message. It is not blamed for a file elsewhere, as one that the
    block reads.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = refusal(error)
        if found is None and not isinstance(error, OSError):
            raise
        what, advice = found or (getattr(error, "strerror", None) or str(error), "choose another folder")
        path = _named_path(error)
        if path and not _is_of(path, place):
            raise (explained(error) or UserError(f"{path}: {what}.")) from error
        raise UserError(f"{key}: cannot write to {place} ({what}); {advice}.") from error


def _is_of(path: Path, place: Path) -> bool:
    """Return whether a path is a place, in it, above it, or one that durable.py makes beside it."""
    path, place = Path(os.path.abspath(path)), Path(os.path.abspath(place))
    beside = [place.with_name(f".{word}-{place.name}") for word in ("partial", "replaced")]
    return path in place.parents or any(path.is_relative_to(one) for one in (place, *beside))
