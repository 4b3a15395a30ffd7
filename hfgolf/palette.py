"""The colors of all charts, which color-blind readers tell apart, and the style of all pictures.

Source of the colors: Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
BLACK = "#000000"
GREY = "#999999"  # not one of theirs: for what is in the background

LINES = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY_BLUE, GREY, BLACK)
"""For lines that share a chart, in this order."""

DARK_LINES = ("#4FA8E0", "#FF8A4C", "#2CC79B", "#E3A0C6", "#F2B83D", "#9AD7FF", "#B0B0B0", "#FFFFFF")
"""The same colors, lightened for a dark background; not theirs."""

INK = "#1f2328"  # text and axes
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK),
    **{"font.size": 8.5, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.labelcolor": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.15},
    **{"lines.linewidth": 1.3, "lines.markersize": 3.5, "legend.frameon": False},
}


@contextmanager
def style(**more: Any) -> Iterator[None]:
    """Draw with matplotlib in the style of all pictures; also a decorator of what draws and saves one.

    more: further settings of matplotlib's.
    """
    import matplotlib

    with matplotlib.rc_context(_STYLE | more):
        yield


_CREATORS = {"png": "Software", **dict.fromkeys(("svg", "pdf", "ps", "eps"), "Creator")}


def save(figure: Figure, target: Path | BinaryIO, kind: str | None = None, **options: Any) -> None:
    """Save a picture, marked as hfgolf's if its format can say so. kind: such as png; None: the suffix of the path."""
    kind = kind or str(target).rpartition(".")[2]
    name = _CREATORS.get(kind)
    figure.savefig(target, format=kind, metadata={name: "hfgolf"} if name else None, **options)
