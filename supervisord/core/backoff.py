"""How long a failed replica is left alone."""

from __future__ import annotations


def delay(failures: int, minimum: float, maximum: float) -> float:
    """Seconds to wait after the ``failures``-th failure in a row (1 for the first): doubling, bounded."""
    if failures < 1:
        return 0.0
    # 2**64 seconds is beyond any bound: keeps the power small for a replica that fails for years
    return min(maximum, minimum * 2.0 ** min(failures - 1, 64))
