"""What a replica is believed to have in its prefix cache, and who served which request whole.

All of it is bounded: keys are kept in two halves, and when the younger one is full the older one is forgotten. That
keeps those used since at least half the capacity ago, for the price of a plain dictionary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

from proxy.reading.facts import Facts

V = TypeVar("V")

#: Prefixes that are remembered per replica, and whole requests per model. Together 110 bytes each at most, as measured
#: by tests/bench/bench_routing_decision.py.
PREFIXES, WHOLES = 65_536, 131_072


class Halves(Generic[V]):
    """At most ``capacity`` keys with a value; the least recently put are forgotten first, by halves."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        #: The two halves, to look at.
        self.young: dict[bytes, V] = {}
        self.old: dict[bytes, V] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def get(self, key: bytes) -> V | None:
        value = self.young.get(key)
        return self.old.get(key) if value is None else value

    def put(self, key: bytes, value: V) -> None:
        self.young[key] = value
        if len(self.young) >= self._half:
            self._turn()

    def put_all(self, keys: Sequence[bytes], value: V) -> None:
        """One value for many keys; what is more than the capacity is cut off."""
        young = self.young
        for key in keys if len(keys) <= self._half else keys[: self._half]:
            young[key] = value
        if len(young) >= self._half:
            self._turn()

    def last_of(self, keys: Sequence[bytes], end: int, start: int) -> int:
        """The place of the last of ``keys[start:end]`` that has a value, -1 for none."""
        young, old = self.young, self.old
        for at in range(end - 1, start - 1, -1):
            if keys[at] in young or keys[at] in old:
                return at
        return -1

    def drop(self, key: bytes) -> None:
        self.young.pop(key, None)
        self.old.pop(key, None)

    def _turn(self) -> None:
        self.young, self.old = {}, self.young


class Held:
    """The prefixes that one replica computed since it last lost its cache.

    How much of them it still has is learned: ``clock`` counts the tokens it computed, and each prefix is stamped with
    it. A prefix that was found gone although it was ``d`` tokens old says that the cache holds less than ``d``; one
    that was found there says that it holds more.
    """

    def __init__(self, generation: int, capacity: int = PREFIXES, holds: float = math.inf) -> None:
        self.generation = generation
        #: Tokens computed so far.
        self.clock = 0.0
        #: Tokens that the cache is believed to hold.
        self.holds = holds
        self._stamps: Halves[float] = Halves(capacity)

    def __len__(self) -> int:
        return len(self._stamps)

    def longest(self, facts: Facts, hint: int = -1, *, gone: bool = False) -> tuple[int, float]:
        """The bytes of the longest prefix that is there, and how many tokens ago it was used; (0, 0) for none."""
        messages, age = self.reach(facts, hint, gone=gone)
        return (facts.sizes[messages - 1], age) if messages else (0, 0.0)

    def reach(self, facts: Facts, hint: int = -1, *, gone: bool = False) -> tuple[int, float]:
        """The messages of the longest prefix that is there, and how many tokens ago it was used; (0, 0) for none.

        ``hint``: the place of a key that is likely to be the last. ``gone``: also of those that were computed here but
        are believed to have made room for others.
        """
        keys, clock = facts.keys, self.clock
        oldest = 0.0 if gone else clock - self.holds
        young, old = self._stamps.young, self._stamps.old
        # Every use of a prefix is one of all its own prefixes, so what is there comes before what is not. Most have
        # the whole conversation but for its newest messages, or next to nothing: those two ends are looked at first.
        low, high, age, step = 0, len(keys), 0.0, 1
        at = hint if hint >= 0 else 0
        while low < high:
            key = keys[at]
            stamp = young.get(key)
            if stamp is None:
                stamp = old.get(key)
            if stamp is not None and stamp >= oldest:
                low, age = at + 1, clock - stamp
            else:
                high = at
            if high - low > 2 * step:
                at, step = low + step - 1, 2 * step
            else:
                at = (low + high) // 2
        return low, age

    def has(self, key: bytes) -> bool:
        """Whether this prefix was computed here, whether or not it is believed to be there still."""
        return key in self._stamps.young or key in self._stamps.old

    def add(self, facts: Facts, new: float, reach: int | None = None) -> None:
        """The replica computes this prompt, ``new`` tokens of which it did not have.

        ``reach``: of how many messages it may have something, as far as that is known.

        All of its prefixes are used. Those that were stamped not long ago are left alone, which is most of the work
        saved: of a conversation of 200 messages two are new. What is late is at most a quarter of what the cache holds.
        """
        self.clock += new
        keys = facts.keys
        young = self._stamps.young
        first = len(keys) if reach is None else reach
        while first and keys[first - 1] not in young:
            first -= 1
        if first and self.holds < math.inf:
            oldest = self.clock - self.holds / 4
            # The first message of its own, and one half-way: strangers share the instructions only.
            own = min(facts.instructions, first - 1)
            if young.get(keys[own], -1.0) < oldest or young.get(keys[first // 2], -1.0) < oldest:
                first = 0
        self._stamps.put_all(keys[first:] or keys[-1:], self.clock)

    def drop(self, key: bytes) -> None:
        """The replica does not have this prefix after all."""
        self._stamps.drop(key)

    def observed(self, age: float, there: bool) -> None:
        """A prefix of this age was found, or was not."""
        if there:
            self.holds = max(self.holds, age)
        elif age <= self.holds:  # one that was lost for another reason shall not decide alone
            less = 0.9 * age
            self.holds = less if self.holds == math.inf else (self.holds + less) / 2
