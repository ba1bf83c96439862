"""Retry-After: from what was measured, not a constant."""

from __future__ import annotations

import math

#: Before the first measurement. One deployment saw 2.5-4 s from level 1, 23 s from level 2, a minute for a cold start.
FIRST_GUESS_WAKE1 = 4.0
FIRST_GUESS_WAKE2 = 25.0
FIRST_GUESS_START = 60.0

#: Weight of the newest measurement in a running mean.
NEWEST = 0.3


def blend(mean: float, sample: float) -> float:
    """A running mean of positive samples; ``mean`` 0.0 means that this is the first."""
    return sample if mean <= 0.0 else (1 - NEWEST) * mean + NEWEST * sample


def retry_after(remaining: float) -> float:
    """Whole seconds, at least 1: what the header can say."""
    return float(max(1, math.ceil(remaining)))


def queue_drain(depth: int, service_seconds: float, replicas: int) -> float:
    """Seconds until a queue of ``depth`` requests is likely to have moved on.

    Batching engines serve many at once, so the mean service time bounds the wait from above only loosely; a batch
    of 16 per replica is assumed, vLLM's throughput being far from linear in anything smaller.
    """
    return service_seconds * depth / (16.0 * max(1, replicas))
