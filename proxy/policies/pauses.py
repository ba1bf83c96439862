"""How long the cache of a conversation is worth keeping while it is silent: learned from how soon others came back.

Keeping it costs those who wait for its room one second a second. If it comes back in time, the engine is spared its
whole prefill, which would have held up everybody else there too. The patience is the time at which that pays best; none
where conversations come back late or never (people who think, documents that are asked about once).
"""

from __future__ import annotations

import math
from collections import deque

#: Pauses that are remembered; fewer than the second say nothing.
PAUSES, FEWEST = 32, 8
#: A longer pause is as good as never coming back, and no patience is longer. Seconds.
LONGEST = 30.0
#: Seconds of somebody's waiting that one second of prefill saved is worth: everybody on the replica is behind it.
WORTH = 8.0
#: The gain must be at least this share of what could be gained if all came back at once; less may be chance.
LEAST_GAIN = 0.25
#: How much longer than the pauses that were seen the patience is: they are not the longest that there will be.
MARGIN = 1.1


class Pauses:
    """The last pauses of one kind of conversation."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=PAUSES)
        self._patience: dict[float, float] = {}

    def add(self, seconds: float) -> None:
        """One came back after ``seconds``; infinity for one that did not."""
        self._seconds.append(seconds if seconds <= LONGEST else math.inf)
        self._patience.clear()

    @property
    def tell(self) -> bool:
        """Whether there were enough of them to say anything."""
        return len(self._seconds) >= FEWEST

    def patience(self, prefill: float) -> float:
        """How long to keep the cache of one whose whole prefill takes ``prefill`` seconds; told by ``about``.

        One decision asks this of everybody who sits.
        """
        known = self._patience.get(prefill)
        if known is None:
            known = self._patience[prefill] = self._best(prefill * WORTH)
        return known

    def _best(self, worth: float) -> float:
        if not self.tell:
            return 0.0
        pauses = sorted(self._seconds)
        count, kept, best = len(pauses), 0.0, 0.0
        least = LEAST_GAIN * len(pauses) * worth
        for back, seconds in enumerate(pauses, start=1):
            if seconds > LONGEST:
                break
            kept += seconds
            gain = back * worth - kept - (count - back) * seconds
            if gain > least:
                least, best = gain, MARGIN * seconds
        return best


def about(prefill: float) -> float:
    """The seconds of a prefill as exactly as patience depends on them, so that many ask for the same."""
    return round(prefill) if prefill >= 1.0 else max(0.1, round(prefill, 1))
