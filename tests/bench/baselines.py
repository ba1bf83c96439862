"""What others do, written anew from descriptions of their behaviour, to measure against on the same replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.policies.held import Held
from proxy.policies.policy import Unobserving
from proxy.policies.turns import Counter
from proxy.reading.facts import Facts
from supervisord.core.admission import Candidate, Choice


def _hash(key: bytes, name: str = "") -> int:
    return int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8], "big")


class LeastInFlight(Unobserving):
    """The fewest requests in flight (nginx least_conn); equal ones take turns."""

    def __init__(self) -> None:
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        least = min(c.in_flight for c in candidates)
        return Choice(self._counter.next([c for c in candidates if c.in_flight == least]).name, "least")


class SessionHash(Unobserving):
    """A conversation's opening, hashed onto the replicas (rendezvous hashing: few move when one goes)."""

    def __init__(self) -> None:
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        key = facts.opening
        if key is None:
            return Choice(self._counter.next(candidates).name, "turn")
        return Choice(max(candidates, key=lambda c: _hash(key, c.name)).name, "hash")


class BoundedHash(Unobserving):
    """The first message, hashed; a replica with more than 1.25 times the mean in flight is passed over for the next."""

    def __init__(self) -> None:
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        key = facts.opening
        if key is None:
            return Choice(self._counter.next(candidates).name, "turn")
        bound = 1.25 * (sum(c.in_flight for c in candidates) + 1) / len(candidates)
        ranked = sorted(candidates, key=lambda c: _hash(key, c.name))
        return Choice(next((c for c in ranked if c.in_flight + 1 <= bound), ranked[0]).name, "hash")


class CacheAware(Unobserving):
    """SGLang's router: the longest matching prefix if it is at least 30% of the text, else the smallest tree.

    Out of balance (64 more in flight than the least, and 1.5 times as many) it takes the shortest queue instead.
    """

    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5

    def __init__(self) -> None:
        self._trees: dict[str, Held] = {}
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        trees = {c.name: self._trees.setdefault(c.name, Held(0)) for c in candidates}
        most, least = max(c.in_flight for c in candidates), min(c.in_flight for c in candidates)
        length = facts.sizes[-1] if facts.sizes else 0
        matches = {c.name: trees[c.name].longest(facts)[0] for c in candidates}
        best = max(matches.values())
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            among = [c for c in candidates if c.in_flight == least]
        elif length and best / length > self.THRESHOLD:
            among = [c for c in candidates if matches[c.name] == best]
        else:
            smallest = min(tree.clock for tree in trees.values())
            among = [c for c in candidates if trees[c.name].clock == smallest]
        chosen = self._counter.next(among).name
        if facts.keys:
            trees[chosen].add(facts, length - matches[chosen])
        return Choice(chosen, "cache_aware")


class NewTokensTimesLoad(Unobserving):
    """The least of (tokens that are not cached there) x (requests in flight + 1)."""

    def __init__(self) -> None:
        self._trees: dict[str, Held] = {}
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        length = facts.sizes[-1] if facts.sizes else 1
        costs = {}
        for c in candidates:
            tree = self._trees.setdefault(c.name, Held(0))
            costs[c.name] = (max(1, length - tree.longest(facts)[0])) * (c.in_flight + 1)
        best = min(costs.values())
        chosen = self._counter.next([c for c in candidates if costs[c.name] == best]).name
        if facts.keys:
            self._trees[chosen].add(facts, 0.0)
        return Choice(chosen, "tokens x load")
