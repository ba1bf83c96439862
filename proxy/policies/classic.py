"""``roundrobin``, ``affinity`` and ``adaptive``: the policies that look at a request and not at the clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from proxy.policies.policy import Unobserving
from proxy.policies.turns import Counter
from proxy.reading.facts import Facts
from supervisord.core.admission import Candidate, Choice, Explanation, Placement

#: Requests (or conversations) whose replica is remembered per model; about half a kilobyte each.
OWNERS = 8192


class Owners:
    """Who served a key: at most ``capacity`` keys, the least recently used forgotten first.

    An entry names the replica's generation: after a restart, a sleep or a wake its cache is gone and the entry void.
    """

    def __init__(self, capacity: int = OWNERS) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, dict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: bytes, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those candidates that served ``key`` and still have it."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        return [candidate for candidate in candidates if entry.get(candidate.name) == candidate.generation]

    def used(self, key: bytes) -> None:
        """It is not the one to be forgotten next."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def add(self, key: bytes, candidate: Candidate) -> None:
        """``candidate`` serves ``key``, besides the others that did: equal requests of a burst went to several."""
        entry = self._entries.setdefault(key, {})
        entry[candidate.name] = candidate.generation
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def drop(self, key: bytes, replica: str) -> None:
        """``replica`` does not have ``key`` after all."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pop(replica, None)
            if not entry:
                del self._entries[key]

    def replace(self, key: bytes, candidate: Candidate) -> None:
        """``candidate`` alone serves ``key`` from now on."""
        self._entries.pop(key, None)
        self.add(key, candidate)


class RoundRobin(Unobserving):
    """``roundrobin``: takes turns, whatever the request."""

    def __init__(self) -> None:
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        """The next one."""
        return Choice(self._counter.next(candidates).name, "roundrobin")

    def explain(self, facts: Facts, candidates: Sequence[Candidate]) -> Explanation:
        """The next one."""
        return Explanation(self._counter.peek(candidates).name, "roundrobin")


class Affinity(Unobserving):
    """``affinity``: every request of a conversation (same instructions, same first message) goes to one replica.

    A conversation not seen before takes turns; hashing it onto a replica would ignore who is there. A cold burst of
    equal prompts is pinned too, which is what this policy costs: 30.1 s against 18.6 s spread, measured on two cards.
    """

    def __init__(self, capacity: int = OWNERS) -> None:
        self._counter = Counter()
        self._owners = Owners(capacity)

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        """The conversation's replica, or the next one."""
        if facts.opening is None:
            return Choice(self._counter.next(candidates).name, "spread", Placement.COLD)
        owners = self._owners.of(facts.opening, candidates)
        self._owners.used(facts.opening)
        if owners:
            return Choice(owners[0].name, "pinned", Placement.STAYS)
        chosen = self._counter.next(candidates)
        self._owners.replace(facts.opening, chosen)
        return Choice(chosen.name, "spread", Placement.COLD)

    def explain(self, facts: Facts, candidates: Sequence[Candidate]) -> Explanation:
        """The conversation's replica, or the next one."""
        owners = self._owners.of(facts.opening, candidates) if facts.opening is not None else []
        if owners:
            return Explanation(owners[0].name, "pinned")
        return Explanation(self._counter.peek(candidates).name, "spread")

    def forget(self, facts: Facts, replica: str) -> None:
        """The conversation has no replica any more."""
        if facts.opening is not None:
            self._owners.drop(facts.opening, replica)


class Adaptive(Unobserving):
    """``adaptive``: a continuation goes to the replica that has its prefix in the cache, anything else takes turns.

    A request continues an earlier one iff its messages begin with *all* messages of that one and go on. So a shared
    system prompt owns nothing (pinning on it sends all traffic to one replica), and neither does an equal request: a
    cold burst of one prompt takes turns. Where equal requests went to several replicas, the one with the fewest in
    flight continues.
    """

    def __init__(self, capacity: int = OWNERS) -> None:
        self._counter = Counter()
        self._owners = Owners(capacity)

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice:
        """The owner of the longest known prefix, or the next one."""
        key, owners = self._owners_of_prefix(facts, candidates)
        if owners:
            self._owners.used(key)
            chosen = _least_busy(owners)
            choice = Choice(chosen.name, "continuation", Placement.STAYS)
        else:
            chosen = self._counter.next(candidates)
            choice = Choice(chosen.name, "spread", Placement.COLD)
        if facts.whole is not None:
            self._owners.add(facts.whole, chosen)
        return choice

    def forget(self, facts: Facts, replica: str) -> None:
        """The request has no owner there."""
        if facts.whole is not None:
            self._owners.drop(facts.whole, replica)

    def explain(self, facts: Facts, candidates: Sequence[Candidate]) -> Explanation:
        """The owner of the longest known prefix, or the next one."""
        _, owners = self._owners_of_prefix(facts, candidates)
        if owners:
            return Explanation(_least_busy(owners).name, "continuation")
        return Explanation(self._counter.peek(candidates).name, "spread")

    def _owners_of_prefix(self, facts: Facts, candidates: Sequence[Candidate]) -> tuple[bytes, list[Candidate]]:
        if not facts.messages:
            return b"", []  # a burst of raw prompts with one long beginning is no continuation of its shortest
        # From the longest down to the first that is more than instructions: those are shared by strangers.
        for key in reversed(facts.keys[facts.instructions : -1]):
            owners = self._owners.of(key, candidates)
            if owners:
                return key, owners
        return b"", []


def _least_busy(owners: Sequence[Candidate]) -> Candidate:
    return min(owners, key=lambda owner: (owner.in_flight, owner.name))
