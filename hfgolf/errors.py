"""The one exception that a user can fix. Imports nothing else of hfgolf."""


class UserError(Exception):
    """Report a mistake that the user can fix, in one line: what, where, what is allowed, what to do.

    Scripts print the message without a traceback and exit with status 2.
    """

    by_any_rank = False
    """Whether each process prints it, not only the first one of each machine."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback (IPython's protocol)."""
        return [f"error: {self}"]
