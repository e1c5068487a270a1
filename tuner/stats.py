"""Medians and their confidence intervals, without a distribution assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

Z_95 = 1.959964


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the 95 % interval of the median by order statistics (binomial, normal approximation).

    Needs no shape of the distribution. With fewer than six samples it is the whole range. Raises ValueError for no
    sample.
    """
    if not samples:
        raise ValueError("no samples: a median needs at least one")
    ordered = sorted(samples)
    count = len(ordered)
    if count < 6:
        return median(ordered), ordered[0], ordered[-1]
    reach = Z_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return median(ordered), ordered[low], ordered[high]


def interval_width(samples: Sequence[float]) -> float:
    """Half the width of the median's interval over the median: 0.005 is half a per cent each way."""
    middle, low, high = median_interval(samples)
    return (high - low) / 2 / middle if middle else math.inf
