"""The colors of all charts, which color-blind readers tell apart.

Source: Okabe and Ito, "Color Universal Design", 2008.
"""

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
