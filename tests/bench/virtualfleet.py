"""Simulated replicas behind a routing policy, on virtual time: the simulator's own scheduler, and nobody waits.

What the product does around a policy is done here too: requests in flight are counted at the choice, a request whose
replica fails before its first token is tried elsewhere, a stream that breaks later is an error and its client asks
again.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proxy.reading.facts import Facts
from supervisord.core.admission import Candidate, Choice, NotYet
from supervisord.simulator.cache import BlockPool
from supervisord.simulator.scheduler import CostModel, Scheduler, Seq

BYTES_PER_TOKEN = 4
#: Seconds after which a client whose stream broke asks again.
ASKS_AGAIN = 1.0
#: Seconds until the policy is asked again for a request that it held, if nothing ended meanwhile.
HELD_FOR = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One engine."""

    costs: CostModel
    kv_tokens: int
    token_budget: int = 2048
    max_seqs: int = 256
    #: Larger than vLLM's 16, which changes nothing for prompts of thousands of tokens and saves much time.
    block: int = 128


class AnyPolicy(Protocol):
    """A routing policy."""

    def choose(self, facts: Facts, candidates: Sequence[Candidate]) -> Choice | NotYet: ...
    def forget(self, facts: Facts, replica: str) -> None: ...
    def first_byte(self, facts: Facts) -> None: ...
    def finished(self, facts: Facts, cached: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A message: equal names are equal texts. ``reply``: the engine wrote it."""

    name: str
    tokens: int


@dataclass(eq=False, slots=True)
class Request:
    """One request: its messages, what it makes the engine write, and what became of it (seconds of virtual time)."""

    kind: str
    session: str
    parts: tuple[Part, ...]
    output: int
    instructions: int = 0
    sent: float = 0.0
    first: float = 0.0
    done: float = 0.0
    cached: int = 0
    replica: str = ""
    reason: str = ""
    tries: int = 0
    errors: int = 0
    facts: Facts = field(default_factory=Facts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def ttft(self) -> float:
        return self.first - self.sent


def block_keys(parts: Sequence[Part], block: int) -> list[int]:
    """One key per full block of the parts' texts, chained; equal as far as the parts are."""
    keys: list[int] = []
    parent, begin, end_of_block = 0, 0, block
    for part in parts:
        while end_of_block <= begin + part.tokens:
            parent = hash((parent, part.name, end_of_block - begin))
            keys.append(parent)
            end_of_block += block
        begin += part.tokens
    return keys


def prefix_keys(parts: Sequence[Part], salt: str = "") -> tuple[bytes, ...]:
    """Keys as in ``proxy.reading.facts``, but the same in every process: the hashing policies depend on them."""
    state = hashlib.sha256(salt.encode())
    keys = []
    for part in parts:
        state.update(f"{part.name}\0".encode())
        keys.append(state.digest()[:16])
    return tuple(keys)


def facts_of(request: Request, salt: str = "") -> Facts:
    """What the proxy would know of it."""
    if request.kind == "embed":
        return Facts("m", False)
    keys = prefix_keys(request.parts, salt)
    sizes = tuple(itertools.accumulate(part.tokens * BYTES_PER_TOKEN for part in request.parts))
    return Facts("m", True, keys, request.instructions, sizes)


class Replica:
    """One engine in virtual time."""

    def __init__(self, name: str, shape: Shape, fleet: Fleet) -> None:
        self.name, self.shape = name, shape
        self.generation = 0
        self.up = True
        self.in_flight = 0
        self.steps = 0
        self._fleet = fleet
        self._stepping = False
        self._start()

    def _start(self) -> None:
        shape = self.shape
        pool = BlockPool(shape.kv_tokens // shape.block, shape.block)
        self.scheduler = Scheduler(shape.costs, shape.max_seqs, shape.token_budget, pool)
        self.requests: dict[Seq, Request] = {}

    def submit(self, request: Request) -> None:
        answer = Part(f"reply {request.session} {request.parts[-1].name}", request.output)
        keys = block_keys((*request.parts, answer), self.shape.block)
        seq = Seq(request.tokens, request.output, keys)
        self.requests[seq] = request
        self.scheduler.add(seq)
        if not self._stepping:
            self._step()

    def fail(self) -> list[Request]:
        """It is gone with its cache; returns what was in flight."""
        lost = list(self.requests.values())
        self.up, self._stepping = False, False
        self.generation += 1
        self._start()
        return lost

    def _step(self) -> None:
        step = self.scheduler.plan()
        self._stepping = step is not None
        if step is None:
            return
        generation = self.generation

        def commit() -> None:
            if generation != self.generation:
                return
            self.steps += 1
            advanced = self.scheduler.commit(step)
            for seq in advanced:
                request = self.requests[seq]
                if seq.produced <= 1 and not request.first:
                    request.cached = seq.cached
                    self._fleet.first_token(request)
                if seq.done:
                    del self.requests[seq]
                    self._fleet.ended(request)
            self._step()

        self._fleet.at(self._fleet.now + step.seconds, commit)


class Fleet:
    """Replicas, a policy, and the order of events."""

    def __init__(self, shapes: Sequence[Shape], policy: Callable[[Callable[[], float]], AnyPolicy]) -> None:
        self.now = 0.0
        self.most_turns = 1000
        #: Another one makes other keys of the same texts: where a hash puts them is a draw of its own.
        self.salt = ""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.replicas = [Replica("abcdefgh"[n], shape, self) for n, shape in enumerate(shapes)]
        self.policy = policy(lambda: self.now)
        self.finished: list[Request] = []
        self._waiting: list[Request] = []
        self._then: dict[int, Callable[[Request], None]] = {}
        #: Requests for which the policy had nobody yet.
        self._held: list[Request] = []
        self._ticking = False

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def send(self, request: Request, then: Callable[[Request], None] | None = None) -> None:
        """Route a request now; ``then`` is called when its answer is whole."""
        request.sent = self.now
        if then is not None:
            self._then[id(request)] = then
        request.facts = facts_of(request, self.salt)
        self._route(request)

    def restart(self, number: int, seconds: float) -> None:
        """The replica fails now, and is back after ``seconds``."""
        replica = self.replicas[number]
        for request in replica.fail():
            replica.in_flight -= 1
            if request.first:
                request.errors += 1
                request.first = 0.0
                self.policy.finished(request.facts, None)
                request.facts = request.facts._replace()  # a new request of the same text
                self.at(self.now + ASKS_AGAIN, lambda request=request: self._route(request))
            else:
                self.policy.forget(request.facts, replica.name)
                self._route(request)

        def back() -> None:
            replica.up = True
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._route(request)

        self.at(self.now + seconds, back)

    def first_token(self, request: Request) -> None:
        request.first = self.now
        self.policy.first_byte(request.facts)

    def ended(self, request: Request) -> None:
        replica = next(r for r in self.replicas if r.name == request.replica)
        replica.in_flight -= 1
        request.done = self.now
        self.policy.finished(request.facts, None)
        self.finished.append(request)
        then = self._then.pop(id(request), None)
        if then is not None:
            then(request)
        self._ask_again()

    def _tick(self) -> None:
        self._ticking = False
        self._ask_again()

    def _ask_again(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self._route(request)

    def _route(self, request: Request) -> None:
        candidates = [Candidate(r.name, r.in_flight, r.generation, r.shape.kv_tokens) for r in self.replicas if r.up]
        if not candidates:
            self._waiting.append(request)
            return
        choice = self.policy.choose(request.facts, candidates)
        if isinstance(choice, NotYet):
            self._held.append(request)
            if not self._ticking:
                self._ticking = True
                self.at(self.now + HELD_FOR, self._tick)
            return
        replica = next(r for r in self.replicas if r.name == choice.replica)
        replica.in_flight += 1
        request.replica, request.reason = replica.name, choice.reason
        request.tries += 1
        replica.submit(request)
