"""What every routing policy is asked and told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from proxy.reading.facts import Facts
from supervisord.core.admission import Candidate, Choice, Explanation, NotYet

#: Monotonic, seconds.
Clock = Callable[[], float]


class Policy(Protocol):
    """Chooses, is told what became of it, and remembers what it needs for the next choice.

    Requests are told apart by the identity of their ``Facts``: every call about one passes the same object.
    """

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice | NotYet:
        """One of ``candidates`` (never empty, in any order), and why. Counts as sent from here on.

        ``NotYet``: the request is held, and this is asked again.
        """
        ...

    def explain(self, facts: Facts, candidates: Sequence[Candidate]) -> Explanation:
        """What ``choose`` would answer. Nothing is counted, and no later choice is another for it."""
        ...

    def forget(self, facts: Facts, replica: str) -> None:
        """The replica chosen for this request failed before it answered: it served nothing."""
        ...

    def first_byte(self, facts: Facts) -> None:
        """The first byte that the engine computed has come: of a stream its first event, else the whole answer."""
        ...

    def finished(self, facts: Facts, cached: float | None, tokens: int | None = None) -> None:
        """The request is over, whatever came of it; called for every request that may have been chosen for.

        The first call counts. ``cached``: the share of its prompt that the engine found in its cache, 0 to 1, and
        ``tokens``: how long its prompt was, where the engine told.
        """
        ...


class Unobserving:
    """The part of a policy that does not care what becomes of a request."""

    def forget(self, facts: Facts, replica: str) -> None:
        """Nothing is remembered."""

    def first_byte(self, facts: Facts) -> None:
        """Nothing is learned from it."""

    def finished(self, facts: Facts, cached: float | None, tokens: int | None = None) -> None:
        """Nothing is learned from it."""
