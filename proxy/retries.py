"""A bound on retries, so that a storm of failures is not answered by a storm of requests."""

from __future__ import annotations

#: Retries that may be made at once without any success in between: a card with all its requests in flight may die.
RESERVE = 1024.0
#: Retries earned by each request that was answered.
SHARE = 0.2


class RetryBudget:
    """Counts down with every retry and up with every answer, never above the reserve."""

    def __init__(self, reserve: float = RESERVE, share: float = SHARE) -> None:
        self._reserve, self._share = reserve, share
        self._left = reserve

    def earn(self) -> None:
        """A request was answered."""
        self._left = min(self._reserve, self._left + self._share)

    def spend(self) -> bool:
        """May one more retry be made? Then it is counted."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
