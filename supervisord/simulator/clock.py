"""The simulator's time: simulated seconds, stretched or shrunk by one factor."""

from __future__ import annotations

import asyncio

#: Real seconds of lateness that following steps make up.
MOST_LATENESS = 0.1


class Clock:
    """``factor`` is real seconds per simulated second: 1.0 is life size, 0.01 a hundred times faster, 0 no waiting."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._due = 0.0

    def real(self, seconds: float) -> float:
        """Simulated seconds as real ones."""
        return seconds * self.factor

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(self.real(seconds))

    def idle(self) -> None:
        """There is nothing to do: the next step starts when it starts."""
        self._due = 0.0

    async def step(self, seconds: float) -> None:
        """Like ``sleep``, but back-to-back steps do not add up their timers' lateness: rates stay true."""
        now = asyncio.get_running_loop().time()
        # Far behind, the machine itself stalled: that time is gone, no burst of steps makes it up.
        start = self._due if now - self._due < MOST_LATENESS else now
        self._due = start + self.real(seconds)
        await asyncio.sleep(max(0.0, self._due - now))
