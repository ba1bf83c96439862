"""Every decision of a history, from one seed; each has a name, so that one can be left out and the others stay.

A fault is decided where it would happen (``engine a, its 3rd wake_up``), by a hash of the seed and that name. Leaving
one out does not move the others, which is what makes a failing history short enough to read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from zlib import crc32

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """splitmix64: every bit of the result depends on every bit of ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Choices:
    """Seeded decisions. ``only``: the faults and planned events that may happen; None: all."""

    def __init__(self, seed: int, clock: Callable[[], float], only: frozenset[str] | None = None) -> None:
        self.seed = seed
        self.only = only
        self._clock = clock
        self._base = _mixed(seed)
        self._seen: dict[str, int] = {}
        #: What was injected: (time, name, what).
        self.injected: list[tuple[float, str, str]] = []
        self.by_kind: Counter[str] = Counter()
        #: When the last one was injected at a place (a replica's unit), or anywhere ("").
        self.blame: dict[str, float] = {}
        self.quiet = False
        # Every seed has its own mixture: most are mild, some are storms, and each leaves some kinds of fault out.
        self.rate = (0.0, 0.004, 0.01, 0.02, 0.05, 0.15)[self.below(6, "rate")]
        self.calm_latency = self.chance("latency", 0.5)

    # --- plain decisions ---

    def fraction(self, name: str) -> float:
        """In [0, 1), always the same for one seed and name."""
        return _mixed(self._base ^ (crc32(name.encode()) * 0x1000193)) / 2.0**64

    def below(self, bound: int, name: str) -> int:
        return int(self.fraction(name) * bound)

    def chance(self, name: str, probability: float) -> bool:
        return self.fraction(name) < probability

    def between(self, low: float, high: float, name: str) -> float:
        """Log-uniform: small and large values alike."""
        return low * (high / low) ** self.fraction(name)

    # --- decisions at a place, each time it is passed ---

    def _again(self, place: str) -> str:
        count = self._seen.get(place, 0) + 1
        self._seen[place] = count
        return f"{place}#{count}"

    def latency(self, place: str, low: float, high: float) -> float:
        """Seconds, mostly short, sometimes ``high``."""
        x = self.fraction(self._again("~" + place))
        if self.calm_latency:
            x *= 0.5
        return low * math.exp(x * math.log(high / low))

    def fault(self, place: str, what: str, kinds: tuple[str, ...]) -> str:
        """One of ``kinds``, or empty: nothing happens here this time. ``place`` is the unit that it is about."""
        name = self._again(f"{place}/{what}")
        if self.quiet or not self.rate:
            return ""
        x = self.fraction(name)
        if x >= self.rate or (self.only is not None and name not in self.only):
            return ""
        kind = kinds[int(x / self.rate * len(kinds))]
        if not self.chance(f"has {what} {kind}", 0.6):
            return ""
        self.record(place, name, f"{what}: {kind}")
        return kind

    def record(self, place: str, name: str, what: str) -> None:
        """Something was injected at ``place``."""
        now = self._clock()
        self.injected.append((now, name, what))
        self.by_kind[what] += 1
        self.blame[place] = now

    def allowed(self, name: str) -> bool:
        """A planned event may happen."""
        return self.only is None or name in self.only
