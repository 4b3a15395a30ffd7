"""Format seconds, bytes and dollars for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return "26 ms", "0.4 s", "12 s", "4 min 59 s" or "7 h 02 min"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(num_bytes: float) -> str:
    """Return "1.1 GB" or "640 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 0.95e9 else f"{num_bytes / 1e6:.0f} MB"


def gigabytes(num_bytes: float) -> str:
    """Return "1.08 GB"."""
    return f"{num_bytes / 1e9:.2f} GB"


def dollars(amount: float) -> str:
    """Return "$12.34"; four decimals below ten cents."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.4f}"
