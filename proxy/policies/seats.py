"""Room for long conversations: how many may be live on a replica before they push each other out of its cache.

When the live contexts of a replica are more than its KV cache holds, every turn of every one of them is computed anew
and all are slow. So a long conversation takes a seat on its replica and keeps it between its turns, and one that finds
no room waits, first come, first served, until a seat is given up:

- by one that was silent for longer than its cache is worth keeping (pauses.py: learned; none where conversations come
  back late or never, and then nobody is held);
- by one that does not fit any more because those that sat down before it have grown;
- or until it has waited for ``longest_hold``, and then it goes where it costs least.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.policies.held import Held
from proxy.policies.pauses import LONGEST, Pauses, about
from proxy.reading.facts import Facts
from supervisord.core.admission import Candidate, NotYet

#: Prompts of fewer tokens need no seat; where that is less, prompts of a smaller share of a cache.
LONG, LONG_SHARE = 20_000, 1 / 30
#: The share of a cache up to which seats are given (conversations grow, and small requests pass through), and up to
#: which those who sit may grow.
SHARE, FULL = 0.85, 1.0
#: Seconds after which one that is held goes all the same, at most.
LONGEST_HOLD = 120.0
#: Seconds after which a conversation that is silent is forgotten, how often that is looked for, and how many are in one
#: go, which is part of a decision: the others are in the next.
FORGOTTEN, SWEEP, SWEPT = 300.0, 1.0, 8
#: Seconds between two that are let in, before it was seen.
_USUAL_INTERVAL = 30.0
_INTERVALS = 8


@dataclass(eq=False, slots=True)
class Place:
    """One replica, for one request. Where its cache does not tell how much it holds, there is always room."""

    candidate: Candidate
    held: Held
    #: Tokens of the request that it does not have.
    new: float


P = TypeVar("P", bound=Place)


@dataclass(eq=False, slots=True)
class Seat:
    """One long conversation, and the replica that it was on last."""

    key: bytes
    held: Held
    #: What it takes of the cache, and what of its prompt it shares with others.
    tokens: float
    shared: float
    #: The end of its last turn, and about how many seconds its whole prefill takes.
    last: float
    prefill: float
    #: Grows with every conversation that sits down.
    number: int = 0
    turns: int = 0
    in_flight: int = 0
    seated: bool = False
    #: An answer has told of the tokens here: no estimates any more.
    told: bool = False


@dataclass(eq=False, slots=True)
class _Row:
    """Those that sit in one cache, in the order in which they sat down."""

    seats: dict[Seat, None] = field(default_factory=dict)
    #: Tokens that all of them take. It is asked for of every row, and changes in one.
    used: float = 0.0

    def changed(self) -> None:
        """Somebody came, went or grew."""
        self.used = sum([seat.tokens for seat in self.seats])


class Seats:
    """All long conversations of one model."""

    def __init__(self) -> None:
        self._all: dict[bytes, Seat] = {}
        #: Those that sit, by the cache that they are in; and those whose request is under way.
        self._rows: dict[Held, _Row] = {}
        self._taken: dict[int, Seat] = {}
        #: Those without a request under way, and of these the ones of which it is not known yet whether they come back;
        #: who fell silent first is first.
        self._silent: OrderedDict[Seat, None] = OrderedDict()
        self._pausing: OrderedDict[Seat, None] = OrderedDict()
        #: Who is held, and since when, in the order in which they came. Facts keep their identity from being reused.
        self._queue: dict[int, tuple[Facts, float]] = {}
        #: What becomes of a conversation after its first turn and after later ones: many have only one.
        self._first, self._later = Pauses(), Pauses()
        self._let_in: deque[float] = deque(maxlen=_INTERVALS)
        self._swept = -math.inf
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Conversations that sit."""
        return sum(len(row.seats) for row in self._rows.values())

    @property
    def held(self) -> int:
        """Requests that wait for a seat."""
        return len(self._queue)

    def concern(self, facts: Facts, length: float, candidates: Sequence[Candidate]) -> bool:
        """Whether seats have anything to do with this request: it is held, or long for one whose KV is known."""
        if length:
            for candidate in candidates:
                kv_tokens = candidate.kv_tokens
                if kv_tokens and (length >= LONG or length >= LONG_SHARE * kv_tokens):
                    return True
        return id(facts) in self._queue

    def waited(self, facts: Facts, now: float) -> float:
        """How long this request has been held."""
        entry = self._queue.get(id(facts))
        return now - entry[1] if entry is not None else 0.0

    def seat_of(self, facts: Facts, now: float) -> Seat | None:
        """That of the conversation that this request goes on, or asks again; for ``ask`` and ``take``."""
        self._sweep(now)
        return self._seat_of(facts)

    def ask(
        self, facts: Facts, seat: Seat | None, places: Sequence[P], longest_hold: float, now: float
    ) -> Sequence[P] | NotYet:
        """Where a long request may go now: home, where there is room, or nowhere yet.

        One that has been held for ``longest_hold`` seconds goes anywhere.
        """
        if seat is not None and seat in self._pausing:
            del self._pausing[seat]
            self._pauses(seat).add(now - seat.last)
        if seat is not None and seat.seated:
            at_home = self._at_home(seat, places)
            if at_home:
                return at_home
            self._rise(seat)
        boundless = [place for place in places if place.candidate.kv_tokens is None]
        if boundless:
            return boundless
        since = self._queue.setdefault(id(facts), (facts, now))[1]
        if now - since >= longest_hold:
            return places
        if next(iter(self._queue)) == id(facts):
            free = [place for place in places if self._has_room(place, now)]
            if free:
                return free
        return self._not_yet(facts)

    def outlook(self, facts: Facts, places: Sequence[P], now: float) -> Sequence[P] | NotYet:
        """What ``ask`` would answer to a request that comes now; nobody rises for it, and it is not held."""
        seat = self._seat_of(facts)
        at_home = self._at_home(seat, places) if seat is not None and seat.seated else []
        if at_home:
            return at_home
        boundless = [place for place in places if place.candidate.kv_tokens is None]
        free = [] if self._queue else [place for place in places if self._in_the_way(place, now) is not None]
        return boundless or free or NotYet(self._reason(len(self._queue) + 1), self._likely_in(len(self._queue) + 1))

    def take(self, facts: Facts, seat: Seat | None, place: Place, length: float, prefill: float, now: float) -> None:
        """The request goes to ``place``. ``prefill``: the seconds that all of its ``length`` tokens take."""
        if self._queue.pop(id(facts), None) is not None:
            self._let_in.append(now)
        assert facts.whole is not None
        if seat is None:
            seat = Seat(facts.whole, place.held, place.new, length - place.new, now, prefill)
            self._sit(seat)
        else:
            self._forget(seat, rise=False)
            if seat.seated and seat.held is place.held:
                seat.tokens += max(0.0, min(place.new, length - seat.tokens))
                self._rows[seat.held].changed()
            else:
                self._rise(seat)
                if seat.held is place.held:
                    seat.tokens = max(seat.tokens, place.new)
                else:
                    seat.held, seat.tokens = place.held, place.new
                    seat.shared, seat.told = length - place.new, False
                self._sit(seat)
        seat.key, seat.prefill = facts.whole, about(prefill)
        seat.turns += 1
        seat.in_flight += 1
        self._silent.pop(seat, None)
        self._pausing.pop(seat, None)
        self._all[seat.key] = seat
        self._taken[id(facts)] = seat

    def left(
        self, facts: Facts, now: float, *, tokens: int | None = None, scale: float = 1.0, retried: bool = False
    ) -> None:
        """The request is over, or held no longer; ``retried``: it failed there and is about to be tried elsewhere.

        ``tokens``: of its prompt, where the answer told; ``scale``: how many it had for each that was taken for one.
        """
        self._queue.pop(id(facts), None)
        seat = self._taken.pop(id(facts), None)
        if seat is not None:
            seat.in_flight -= 1
            seat.last = now
            if not seat.in_flight:
                self._silent[seat] = None
                if not retried:
                    self._pausing[seat] = None
            if tokens:
                if not seat.told:
                    seat.shared, seat.told = seat.shared * scale, True
                seat.tokens = max(0.0, tokens - seat.shared)
                if seat.seated:
                    self._rows[seat.held].changed()

    def _seat_of(self, facts: Facts) -> Seat | None:
        """That of the conversation that this request goes on, or asks again."""
        if self._all:
            keys = facts.keys
            for at in range(len(keys) - 1, facts.instructions - 1, -1):
                seat = self._all.get(keys[at])
                if seat is not None:
                    return seat
        return None

    def _pauses(self, seat: Seat) -> Pauses:
        return self._first if seat.turns <= 1 else self._later

    def _sit(self, seat: Seat) -> None:
        seat.seated, seat.number = True, next(self._numbers)
        row = self._rows.get(seat.held)
        if row is None:
            row = self._rows[seat.held] = _Row()
        row.seats[seat] = None
        row.changed()

    def _rise(self, seat: Seat) -> None:
        if seat.seated:
            seat.seated = False
            row = self._rows[seat.held]
            del row.seats[seat]
            row.changed()
            if not row.seats:
                del self._rows[seat.held]

    def _at_home(self, seat: Seat, places: Sequence[P]) -> list[P]:
        """Where one that sits may go: its own place, while it fits there, and any with free room."""
        for home in places:
            if home.held is seat.held:
                if seat.in_flight or self._still_fits(seat, home.candidate.kv_tokens):
                    return [place for place in places if place is home or self._has_free_room(place)]
                break
        return []

    def _still_fits(self, seat: Seat, kv_tokens: int | None) -> bool:
        """With those that sat down before it; the first always does."""
        row = self._rows[seat.held]
        if kv_tokens is None or row.used <= FULL * kv_tokens:
            return True  # also with those that sat down after it
        used = 0.0
        for other in row.seats:
            if other is seat:
                break
            used += other.tokens
        return not used or used + seat.tokens <= FULL * kv_tokens

    def _has_free_room(self, place: Place) -> bool:
        """Whether a conversation can move there without anybody making room."""
        kv_tokens, row = place.candidate.kv_tokens, self._rows.get(place.held)
        return kv_tokens is None or (row.used if row is not None else 0.0) + place.new <= SHARE * kv_tokens

    def _has_room(self, place: Place, now: float) -> bool:
        """Whether the request fits; those who are silent for too long make room."""
        leaving = self._in_the_way(place, now)
        for seat in leaving or ():
            self._rise(seat)
        return leaving is not None

    def _in_the_way(self, place: Place, now: float) -> list[Seat] | None:
        """Who has been silent for too long and must rise for the request to fit; None: it does not fit all the same.

        Where nobody's cache is worth keeping, everybody does: the engine's own queue is as good as this one.
        """
        if self._has_free_room(place):
            return []
        row = self._rows.get(place.held)
        if row is None:
            return []  # it is larger than the cache, and alone with it
        used, room = row.used, SHARE * (place.candidate.kv_tokens or 0)
        leaving: list[Seat] = []
        anybody_is_kept = False
        # Who came back after the first turn is no less likely to after later ones.
        first, later = self._first, self._later if self._later.tell else self._first
        for seat in row.seats:
            patience = (first if seat.turns <= 1 else later).patience(seat.prefill)
            if patience > (0.0 if seat.in_flight else now - seat.last):
                anybody_is_kept = True
            elif not seat.in_flight:
                leaving.append(seat)
        leaving.sort(key=_silent_since)
        for at, seat in enumerate(leaving):
            if used + place.new <= room:
                leaving = leaving[:at]
                break
            used -= seat.tokens
        return None if anybody_is_kept and used + place.new > room else leaving

    def _not_yet(self, facts: Facts) -> NotYet:
        at = list(self._queue).index(id(facts)) + 1
        return NotYet(self._reason(at), self._likely_in(at))

    def _reason(self, at: int) -> str:
        return f"held for KV: {len(self)} long conversations have their seats, this is number {at} of those who wait"

    def _likely_in(self, at: int) -> float:
        times = self._let_in
        return at * ((times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else _USUAL_INTERVAL)

    def _sweep(self, now: float) -> None:
        if now - self._swept < SWEEP:
            return
        late = _silent_for(LONGEST, self._pausing, now)
        for seat in late:
            del self._pausing[seat]
            self._pauses(seat).add(math.inf)
        forgotten = _silent_for(FORGOTTEN, self._silent, now)
        for seat in forgotten:
            del self._silent[seat]
            self._forget(seat, rise=True)
        if len(late) < SWEPT and len(forgotten) < SWEPT:
            self._swept = now

    def _forget(self, seat: Seat, *, rise: bool) -> None:
        if self._all.get(seat.key) is seat:
            del self._all[seat.key]
        if rise:
            self._rise(seat)


def _silent_since(seat: Seat) -> tuple[float, int]:
    return seat.last, seat.number


def _silent_for(seconds: float, seats: OrderedDict[Seat, None], now: float) -> list[Seat]:
    """Those that have been silent for longer, the first ``SWEPT`` of them."""
    found: list[Seat] = []
    for seat in seats:
        if now - seat.last <= seconds or len(found) == SWEPT:
            break
        found.append(seat)
    return found
