"""What counts as a spike and as a divergence of the training loss, for the doctor and for train.rollback_on."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

LEVEL_STEPS = 50  # enough that the median moves less than the noise of a single step
SIGMAS = 6  # robust standard deviations; healthy runs reached 5.3
SPIKE_SHARE = 0.2  # above the usual loss; healthy runs reached 0.1

RISE = 1.2  # times the lowest level so far
MIN_RISE = 0.1  # nats per token; near a loss of 0, a fifth more is nothing
RISE_FROM_START = 1.1  # times the first loss; a healthy run is never worse than guessing for long


def robust_sigma(values: Collection[float]) -> float:
    """Return a standard deviation that outliers barely affect: 1.4826 times the median absolute deviation."""
    array = np.asarray(list(values))
    return 1.4826 * float(np.median(np.abs(array - np.median(array))))
