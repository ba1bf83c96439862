"""``prefill``: every request goes where it is predicted to have its first token soonest, and conversations stay home.

A replica's cost for a request is the prefill work it still has to do, plus the prefill of what it does not have of this
prompt, plus a little for every request it runs: all in seconds, from what was observed. A conversation stays with the
replica that served it while that costs little more than the best; else it moves, and its new home owns it. Everything
that shares only a system prompt, and bursts of one prompt, goes by cost alone: a prefix counts as there as soon as a
request with it was sent, so on idle replicas a burst spreads and on busy ones it gathers.

Where an engine tells what its KV cache holds, no more long conversations are let in than fit (seats.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from proxy.policies.held import PREFIXES, WHOLES, Halves, Held
from proxy.policies.pending import Charge, Pending
from proxy.policies.policy import Clock
from proxy.policies.seats import LONGEST_HOLD, Place, Seats
from proxy.policies.timing import PrefillTime, Sample, Speed
from proxy.policies.tokens import TokenSize
from proxy.policies.turns import Counter
from proxy.reading.facts import Facts
from supervisord.core.admission import Bid, Candidate, Choice, Explanation, NotYet, Placement

#: Seconds that a running request adds to the cost: its share of every step.
PER_RUNNING = 0.02
#: A conversation stays while its home costs at most this much more than the best: seconds, and share of the best.
SLACK_SECONDS, SLACK_SHARE = 0.5, 0.25
#: Costs that differ by less are equal, and equal ones take turns: seconds, and share of the best.
EQUAL_SECONDS, EQUAL_SHARE = 0.01, 0.01
#: Fewer tokens of a known prefix say nothing about what a cache holds.
_TELLING = 512
#: A miss that would take less than so many times a hit cannot be told from it by the time.
_TELLING_RATIO = 3.0
# A member of an Enum takes longer to look up than a call takes.
_STAYS, _COLD = Placement.STAYS, Placement.COLD
#: A turn adds no more messages than these, most often.
_NEAR = 8
#: How many replicas a reason names.
_NAMED = 8


class _Replica:
    """What is known of one replica."""

    def __init__(self, generation: int, capacity: int) -> None:
        self._capacity = capacity
        self.held = Held(generation, capacity)
        #: As the only owner of a request. One for all of them: of 100k it makes 6 MB less, which the collector of
        #: garbage would go through every time.
        self.alone = (self.held,)
        self.pending = Pending()
        self.speed = Speed()

    def restarted(self, generation: int) -> None:
        """Its cache is gone; how much that holds, and how fast the replica is, are as before."""
        self.held = Held(generation, self._capacity, self.held.holds)
        self.alone = (self.held,)
        self.pending = Pending()


@dataclass(slots=True)
class _Sent:
    """One request under way. ``facts`` keeps its identity from being used again."""

    facts: Facts
    replica: _Replica
    held: Held
    pending: Pending
    charge: Charge
    length: float
    new: float
    #: Share of the prompt that was computed here before, whether or not it is believed to be there still; and its age.
    known: float
    age: float


@dataclass(eq=False, slots=True)
class _Offer(Place):
    """What one candidate would cost."""

    replica: _Replica
    #: Messages of the longest prefix that is there, their bytes, and how many tokens ago it was used.
    reach: int
    there: int
    age: float
    #: Seconds that its new tokens take, and those to its first token.
    seconds: float
    cost: float

    def ever_reached(self, facts: Facts, known: int) -> tuple[int, float]:
        """The messages and their age of the longest prefix that was computed there, whether or not it still is."""
        if self.held.holds == inf:
            return self.reach, self.age  # nothing has ever made room
        return self.held.reach(facts, known, gone=True)


class Prefill:
    """``capacity``: prefixes remembered per replica; ``wholes``: whole requests per model.

    ``longest_hold``: seconds that a long conversation waits where it would push others out of the cache; 0: none does.
    """

    def __init__(
        self, clock: Clock, capacity: int = PREFIXES, wholes: int = WHOLES, *, longest_hold: float = LONGEST_HOLD
    ) -> None:
        self._clock = clock
        #: May be changed at any time.
        self.longest_hold = longest_hold
        self._seats = Seats()
        self._token = TokenSize()
        self._capacity = capacity
        self._replicas: dict[str, _Replica] = {}
        self._owners: Halves[tuple[Held, ...]] = Halves(wholes)
        self._sent: dict[int, _Sent] = {}
        self._time = PrefillTime()
        self._counter = Counter()

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice | NotYet:
        """The home of the conversation, or the cheapest; not yet, if it has to wait for a seat."""
        now = self._clock()
        if id(facts) in self._sent:
            self._release(facts, now)
        length = facts.sizes[-1] / self._token.size if facts.sizes else 0.0
        known = self._known(facts, candidates)
        open_to: Sequence[_Offer] = self._offers(facts, length, candidates, now, known)
        waited, seat = 0.0, None
        takes_a_seat = self.longest_hold > 0 and self._seats.concern(facts, length, candidates)
        if takes_a_seat:
            waited = self._seats.waited(facts, now)
            seat = self._seats.seat_of(facts, now)
            free = self._seats.ask(facts, seat, open_to, self.longest_hold, now)
            if isinstance(free, NotYet):
                return free
            open_to = free
        chosen, why, placement = self._decide(facts, open_to, known)
        if placement is not _STAYS:
            self._counter.taken(chosen.candidate)
        self._send(facts, length, chosen, now, known)
        if takes_a_seat:
            self._seats.take(facts, seat, chosen, length, self._time.seconds(length, length), now)
        reason = _reason(why, open_to)
        return Choice(chosen.candidate.name, f"held {waited:.1f}s for KV, {reason}" if waited else reason, placement)

    def explain(self, facts: Facts, candidates: Sequence[Candidate]) -> Explanation:
        """As ``choose``, and what each replica would cost."""
        now = self._clock()
        length = facts.sizes[-1] / self._token.size if facts.sizes else 0.0
        known = self._known(facts, candidates)
        offers = self._offers(facts, length, candidates, now, known)
        bids = tuple(self._bid(offer, now) for offer in sorted(offers, key=lambda offer: offer.cost))
        open_to: Sequence[_Offer] = offers
        if self.longest_hold and self._seats.concern(facts, length, candidates):
            free = self._seats.outlook(facts, offers, now)
            if isinstance(free, NotYet):
                return Explanation("", free.reason, bids)
            open_to = free
        chosen, why, _ = self._decide(facts, open_to, known)
        return Explanation(chosen.candidate.name, _reason(why, open_to), bids)

    def _bid(self, offer: _Offer, now: float) -> Bid:
        pending = offer.replica.pending.seconds(now)
        return Bid(offer.candidate.name, offer.cost, pending, offer.seconds, round(offer.there / self._token.size))

    def _decide(self, facts: Facts, offers: Sequence[_Offer], known: int) -> tuple[_Offer, str, Placement]:
        cheapest = offers[0]
        for offer in offers:
            if offer.cost < cheapest.cost:
                cheapest = offer
        best = cheapest.cost
        home = self._home(facts, offers, known) if known >= 0 else None
        if home is not None and home.cost <= best + max(SLACK_SECONDS, SLACK_SHARE * best):
            return home, f"continuation of {home.candidate.name}, stays", _STAYS
        level = best + max(EQUAL_SECONDS, EQUAL_SHARE * best)
        chosen = cheapest
        for offer in offers:
            equal = offer.cost <= level and offer is not chosen
            if equal and self._counter.goes_before(offer.candidate, chosen.candidate):
                chosen = offer
        if home is None:
            return chosen, "cold", _COLD
        return chosen, f"continuation of {home.candidate.name}, moves", Placement.MOVES

    def forget(self, facts: Facts, replica: str) -> None:
        """It has no owner there, and nothing is learned from it."""
        now = self._clock()
        sent = self._release(facts, now)
        self._seats.left(facts, now, retried=True)
        if sent is None or facts.whole is None:
            return
        sent.held.drop(facts.whole)
        left = tuple(held for held in self._owners.get(facts.whole) or () if held is not sent.held)
        if left:
            self._owners.put(facts.whole, left)
        else:
            self._owners.drop(facts.whole)

    def first_byte(self, facts: Facts) -> None:
        """Its prefill is done."""
        sent = self._sent.get(id(facts))
        if sent is not None:
            sent.pending.done(sent.charge, self._clock())

    def finished(self, facts: Facts, cached: float | None, tokens: int | None = None) -> None:
        """Learn from it, if it had an answer, and let it go."""
        now = self._clock()
        sent = self._release(facts, now)
        scale = tokens / sent.length if tokens and sent is not None and sent.length else 1.0
        self._seats.left(facts, now, tokens=tokens, scale=scale)
        if sent is None:
            return
        if tokens and facts.sizes:
            self._token.add(facts.sizes[-1], tokens)
        new = sent.new
        took = sent.charge.own if sent.charge.streams else None
        if cached is None and took is not None:
            cached = self._inferred(sent, took)
        if cached is not None:
            new = max(1.0, sent.length * (1 - cached))
            sent.held.clock += new - sent.new
            if sent.known * sent.length >= _TELLING:
                sent.held.observed(sent.age, cached >= sent.known / 2)
        if took is not None:
            predicted = self._time.seconds(new, sent.length)
            sent.replica.speed.add(took / max(predicted, 1e-3))
            # A slow replica's seconds, told as those of an ordinary one: the model is of the model.
            self._time.add(Sample(new, sent.length, took / sent.replica.speed.factor))

    def _inferred(self, sent: _Sent, took: float) -> float | None:
        """Was the known prefix there? Told from the time, where that differs enough; engines tell it only if asked."""
        if sent.known * sent.length < _TELLING:
            return None
        factor = sent.replica.speed.factor
        hit = factor * self._time.seconds(max(1.0, sent.length * (1 - sent.known)), sent.length)
        miss = factor * self._time.seconds(sent.length, sent.length)
        if miss < _TELLING_RATIO * hit:
            return None
        return sent.known if took < (hit * miss) ** 0.5 else 0.0

    @property
    def under_way(self) -> int:
        """Requests that were sent and are not over."""
        return len(self._sent)

    @property
    def held(self) -> int:
        """Requests that wait for a seat."""
        return self._seats.held

    @property
    def seats(self) -> int:
        """Long conversations that have a seat."""
        return len(self._seats)

    def pending_seconds(self, replica: str) -> float:
        """The prefill work that a replica still has to do."""
        known = self._replicas.get(replica)
        return known.pending.seconds(self._clock()) if known is not None else 0.0

    def _known(self, facts: Facts, candidates: Sequence[Candidate]) -> int:
        """The place of the longest known request that this one goes on from, -1 for none that any of them served."""
        keys, own, last = facts.keys, facts.instructions, len(facts.keys) - 1
        if last <= own:
            return -1
        # Most go on from one of few messages less. Of a prompt that goes on from none there may be hundreds of keys, to
        # look for which takes longer than all else of a decision; but whoever has a longer one of them has the shorter.
        near = max(own, last - _NEAR)
        known = self._owners.last_of(keys, last, near)
        if known < 0 and near > own:
            for candidate in candidates:
                replica = self._replicas.get(candidate.name)
                if replica is not None and replica.held.has(keys[own]):
                    return self._owners.last_of(keys, near, own)
        return known

    def _offers(
        self, facts: Facts, length: float, candidates: Sequence[Candidate], now: float, known: int
    ) -> list[_Offer]:
        token_size = self._token.size
        all_new, all_seconds = max(1.0, length), 0.0
        offers: list[_Offer] = []
        for candidate in candidates:
            replica = self._replicas.get(candidate.name)
            if replica is None:
                replica = self._replicas[candidate.name] = _Replica(candidate.generation, self._capacity)
            elif replica.held.generation != candidate.generation:
                replica.restarted(candidate.generation)
            held = replica.held
            reach, age = held.reach(facts, known)
            if reach:
                there = facts.sizes[reach - 1]
                new = max(1.0, length - there / token_size)
                seconds = self._time.seconds(new, length)
            else:
                # Most have nothing of a prompt, and for all of them its prefill takes the same.
                all_seconds = all_seconds or self._time.seconds(all_new, length)
                there, new, seconds = 0, all_new, all_seconds
            seconds *= replica.speed.factor
            cost = replica.pending.seconds(now) + seconds + PER_RUNNING * candidate.in_flight
            offers.append(_Offer(candidate, held, new, replica, reach, there, age, seconds, cost))
        return offers

    def _home(self, facts: Facts, offers: Sequence[_Offer], known: int) -> _Offer | None:
        """The cheapest that served, whole, the longest request that this one goes on from and any of them served."""
        keys = facts.keys
        helds = [offer.held for offer in offers]
        # From the longest down to the first that is more than instructions: those are shared by strangers.
        at = end = known
        while at >= 0:
            home: _Offer | None = None
            for owner in self._owners.get(keys[at]) or ():
                if owner in helds:
                    offer = offers[helds.index(owner)]
                    if home is None or (offer.cost, offer.candidate.name) < (home.cost, home.candidate.name):
                        home = offer
            if home is not None:
                return home
            if at == known:
                # Who served one of the turns before has been sent its messages; there may be hundreds of turns.
                end = max([offer.ever_reached(facts, known)[0] for offer in offers])
            at = self._owners.last_of(keys, min(at, end), facts.instructions)
        return None

    def _send(self, facts: Facts, length: float, offer: _Offer, now: float, at: int) -> None:
        replica = offer.replica
        held = replica.held
        reach, age = offer.ever_reached(facts, at)
        charge = Charge(offer.seconds, facts.stream)
        replica.pending.add(charge, now)
        share = facts.sizes[reach - 1] / facts.sizes[-1] if reach else 0.0
        self._sent[id(facts)] = _Sent(facts, replica, held, replica.pending, charge, length, offer.new, share, age)
        if facts.keys:
            held.add(facts, offer.new, reach)
            whole = facts.keys[-1]
            owners = self._owners.get(whole)
            if owners is None:
                self._owners.put(whole, replica.alone)
            else:
                # One that was restarted is in no candidate any more: let it go.
                others = [r.held for r in self._replicas.values() if r is not replica and r.held in owners]
                self._owners.put(whole, (held, *others) if others else replica.alone)

    def _release(self, facts: Facts, now: float) -> _Sent | None:
        sent = self._sent.pop(id(facts), None)
        if sent is not None and sent.charge.open:
            sent.pending.release(sent.charge, now)
        return sent


def _reason(why: str, offers: Sequence[_Offer]) -> str:
    costs: list[tuple[float, str]] = []
    for offer in offers:
        costs.append((offer.cost, offer.candidate.name))
    costs.sort()
    return f"{why}: " + ", ".join([f"{name} {cost:.2f}s" for cost, name in costs[:_NAMED]])
