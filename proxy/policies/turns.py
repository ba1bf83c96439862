"""Taking turns."""

from __future__ import annotations

from collections.abc import Sequence

from supervisord.core.admission import Candidate


class Counter:
    """Takes turns: the replica that was not chosen for longest, of new ones the first by name.

    Unlike an index into a list, this has no place that can go stale when replicas come and go.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def peek(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate whose turn it is."""
        chosen = candidates[0]
        for candidate in candidates:
            if self.goes_before(candidate, chosen):
                chosen = candidate
        return chosen

    def goes_before(self, one: Candidate, other: Candidate) -> bool:
        """Whether it is the turn of ``one`` rather than of the ``other``."""
        last, others = self._last.get(one.name, 0), self._last.get(other.name, 0)
        return last < others or (last == others and one.name < other.name)

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """The same, and it has had its turn."""
        chosen = self.peek(candidates)
        self.taken(chosen)
        return chosen

    def taken(self, chosen: Candidate) -> None:
        """It has had its turn."""
        self._turn += 1
        self._last[chosen.name] = self._turn
