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
        chosen, oldest = candidates[0], self._last.get(candidates[0].name, 0)
        for candidate in candidates:
            last = self._last.get(candidate.name, 0)
            if last < oldest or (last == oldest and candidate.name < chosen.name):
                chosen, oldest = candidate, last
        return chosen

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """The same, and it has had its turn."""
        chosen = self.peek(candidates)
        self.taken(chosen)
        return chosen

    def taken(self, chosen: Candidate) -> None:
        """It has had its turn."""
        self._turn += 1
        self._last[chosen.name] = self._turn
