"""Room for long conversations: how many may be live on a replica before they push each other out of its cache.

When the live contexts of a replica are more than its KV cache, every turn of every one of them is computed anew, and
all are slow. A conversation that is let in keeps its seat between its turns; a new one that finds no room waits for a
seat to be left: by a conversation that was silent for a while.

``Holding`` is the prefill policy with seats. It is measured here and not in the product: a policy there cannot answer
"nobody yet", and is not told how much KV a replica has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.facts import Facts
from proxy.policies.held import Held
from proxy.policies.policy import Clock
from proxy.policies.prefill import BYTES_PER_TOKEN, Prefill
from supervisord.core.admission import Candidate, Choice

#: Prompts of fewer tokens need no seat.
LONG = 20_000
#: The share of a cache that seats may take: conversations grow, and small requests pass through.
SHARE = 0.85
#: Seconds of silence after which a conversation loses its seat if another waits for one.
SILENCE = 30.0


@dataclass(eq=False, slots=True)
class Seat:
    """One live conversation on one replica."""

    held: Held
    tokens: float
    last: float
    key: bytes = b""
    in_flight: int = 0


class Seats:
    """All seats of one model."""

    def __init__(self) -> None:
        self._seats: dict[bytes, Seat] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def of(self, facts: Facts) -> Seat | None:
        """The seat of the conversation that this request goes on (or asks again)."""
        for key in reversed(facts.keys[facts.instructions :]):
            seat = self._seats.get(key)
            if seat is not None:
                return seat
        return None

    def take(self, facts: Facts, seat: Seat | None, held: Held, length: float, new: float, now: float) -> Seat:
        """The request goes to ``held`` and its conversation sits there."""
        assert facts.whole is not None
        if seat is None or seat.held is not held:
            if seat is not None:
                self._leave(seat)
            seat = Seat(held, new, now, facts.whole)
        else:
            del self._seats[seat.key]
            seat.tokens += max(0.0, min(new, length - seat.tokens))
        other = self._seats.get(facts.whole)
        if other is not None and other is not seat:
            self._leave(other)
        seat.key, seat.last = facts.whole, now
        seat.in_flight += 1
        self._seats[seat.key] = seat
        return seat

    def left(self, seat: Seat, now: float) -> None:
        """A request of it is over."""
        seat.in_flight -= 1
        seat.last = now

    def room(self, held: Held, tokens: float, capacity: float, now: float) -> bool:
        """Whether a new conversation of ``tokens`` tokens fits; silent ones make room. An empty replica takes any."""
        mine = [seat for seat in self._seats.values() if seat.held is held]
        used = sum(seat.tokens for seat in mine)
        silent = [seat for seat in mine if not seat.in_flight and now - seat.last >= SILENCE]
        for seat in sorted(silent, key=lambda seat: (seat.last, seat.key)):
            if used + tokens <= SHARE * capacity:
                break
            self._leave(seat)
            used -= seat.tokens
        return used + tokens <= SHARE * capacity or used <= 0

    def keep(self, current: Sequence[Held]) -> None:
        """Forget the seats of caches that are gone."""
        for seat in [seat for seat in self._seats.values() if not any(seat.held is held for held in current)]:
            self._leave(seat)

    def _leave(self, seat: Seat) -> None:
        if self._seats.get(seat.key) is seat:
            del self._seats[seat.key]


class Holding:
    """``prefill`` that answers None where a new long conversation has no room: ask again when something ended."""

    def __init__(self, clock: Clock, kv_tokens: float) -> None:
        self._clock, self._kv_tokens = clock, kv_tokens
        self._prefill = Prefill(clock)
        self._seats = Seats()
        self._sitting: dict[int, Seat] = {}
        #: Those that wait, in the order in which they came.
        self._held: dict[int, Facts] = {}

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice | None:
        """Where it goes, if there is room."""
        now = self._clock()
        length = facts.sizes[-1] / BYTES_PER_TOKEN if facts.sizes else 0.0
        if length < LONG:
            return self._prefill.choose(facts, candidates)
        offers = {c.name: self._prefill._offer(facts, length, c, now) for c in candidates}
        self._seats.keep([replica.held for replica in self._prefill._replicas.values()])
        seat = self._seats.of(facts)
        if seat is None:
            candidates = [
                c
                for c in candidates
                if self._seats.room(offers[c.name].replica.held, offers[c.name].new, self._kv_tokens, now)
            ]
            if not candidates or next(iter(self._held), id(facts)) != id(facts):
                self._held[id(facts)] = facts
                return None
        self._held.pop(id(facts), None)
        choice = self._prefill.choose(facts, candidates)
        offer = offers[choice.replica]
        self._sitting[id(facts)] = self._seats.take(facts, seat, offer.replica.held, length, offer.new, now)
        return choice

    def forget(self, facts: Facts, replica: str) -> None:
        self._rise(facts)
        self._prefill.forget(facts, replica)

    def first_byte(self, facts: Facts) -> None:
        self._prefill.first_byte(facts)

    def finished(self, facts: Facts, cached: float | None) -> None:
        self._rise(facts)
        self._held.pop(id(facts), None)
        self._prefill.finished(facts, cached)

    def _rise(self, facts: Facts) -> None:
        seat = self._sitting.pop(id(facts), None)
        if seat is not None:
            self._seats.left(seat, self._clock())
