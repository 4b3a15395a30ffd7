"""The one exception a person can fix; it knows nothing else of hfgolf."""


class UserError(Exception):
    """Report a mistake the user can fix, in one line: what, where, what is allowed, what to do.

    Scripts print the message without a traceback and exit with status 2.
    """
