"""Counting how often something took how long, in plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Observations by upper bound, which is included, as Prometheus has them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds``: ascending; what is above the last one is counted beside it."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """How many were at most each bound, and at the end how many there were."""
        return list(accumulate(self.counts))
