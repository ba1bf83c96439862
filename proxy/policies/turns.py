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
        return min(candidates, key=lambda candidate: (self._last.get(candidate.name, 0), candidate.name))

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """The same, and it has had its turn."""
        chosen = self.peek(candidates)
        self.taken(chosen)
        return chosen

    def taken(self, chosen: Candidate) -> None:
        """It has had its turn."""
        self._turn += 1
        self._last[chosen.name] = self._turn
