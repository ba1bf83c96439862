"""The loads that routing is measured with; every one is made from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from virtualfleet import Part, Request

#: The instructions and tools that every agent sends first.
SYSTEM = Part("system", 8000)


class Fleet(Protocol):
    """What a load is played on: the virtual fleet, or real processes on a real clock. Times are simulated seconds."""

    #: A conversation ends after so many turns, if not before: for a shorter play of the same loads.
    most_turns: int

    @property
    def now(self) -> float: ...
    def at(self, when: float, action: Callable[[], None]) -> None: ...
    def send(self, request: Request, then: Callable[[Request], None] | None = None) -> None: ...
    def restart(self, number: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Agents:
    """Conversations that send their whole context again every turn. Tokens and seconds; pairs are ranges."""

    count: int
    context: tuple[int, int]
    turns: int
    result: tuple[int, int] = (500, 4000)
    output: tuple[int, int] = (80, 400)
    #: What a tool or a person takes between two turns: the mean of an exponential distribution.
    pause: float = 6.0
    #: The first turns come within so many seconds.
    within: float = 20.0
    system: tuple[Part, ...] = (SYSTEM,)


def agents(fleet: Fleet, rng: random.Random, spec: Agents, name: str = "agent") -> None:
    """Start them: the first turn is ``cold``, the others are ``warm``."""

    def start(number: int) -> None:
        own = random.Random(rng.random())
        system = own.choice(spec.system)
        parts = (system, Part(f"{name} {number}", own.randint(*spec.context) - system.tokens))

        def ask(turn: int, parts: tuple[Part, ...]) -> None:
            kind = "warm" if turn else "cold"
            request = Request(kind, f"{name} {number}", parts, own.randint(*spec.output), instructions=1)
            fleet.send(request, lambda done: answered(turn, done))

        def answered(turn: int, done: Request) -> None:
            if turn + 1 == min(spec.turns, fleet.most_turns):
                return
            reply = Part(f"reply {done.session} {done.parts[-1].name}", done.output)
            result = Part(f"{name} {number} result {turn}", own.randint(*spec.result))
            parts = (*done.parts, reply, result)
            fleet.at(fleet.now + own.expovariate(1 / spec.pause), lambda: ask(turn + 1, parts))

        fleet.at(rng.uniform(0, spec.within), lambda: ask(0, parts))

    for number in range(spec.count):
        start(number)


def burst(fleet: Fleet, rng: random.Random, at: float, count: int, prefix: int, own: int, name: str = "burst") -> None:
    """``count`` questions about one text, all within half a second."""
    for number in range(count):
        parts = (Part(name, prefix), Part(f"{name} {number}", own))
        request = Request("burst", f"{name} {number}", parts, rng.randint(50, 150))
        fleet.at(at + rng.uniform(0, 0.5), lambda request=request: fleet.send(request))


def chats(fleet: Fleet, rng: random.Random, rate: float, until: float) -> None:
    """Short questions of people, and now and then texts to embed."""
    when, number = 0.0, 0
    while (when := when + rng.expovariate(rate)) < until:
        number += 1
        if rng.random() < 0.25:
            request = Request("embed", f"embed {number}", (Part(f"embed {number}", rng.randint(50, 500)),), 1)
        else:
            parts = (Part(f"chat {number}", rng.randint(50, 2000)),)
            request = Request("chat", f"chat {number}", parts, rng.randint(50, 300))
        fleet.at(when, lambda request=request: fleet.send(request))


Workload = Callable[[Fleet, random.Random], None]
FIT = Agents(16, (40_000, 90_000), 12)


def agents_fit(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, FIT)


def agents_over(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, Agents(28, (80_000, 110_000), 12))


def cold_burst(fleet: Fleet, rng: random.Random) -> None:
    burst(fleet, rng, 0.0, 48, 90_000, 500)


def burst_over_agents(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, Agents(12, (40_000, 90_000), 12))
    burst(fleet, rng, 50.0, 32, 60_000, 500)


def mixed(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, Agents(10, (40_000, 90_000), 12))
    chats(fleet, rng, 3.0, 120.0)
    burst(fleet, rng, 30.0, 16, 40_000, 300, "first burst")
    burst(fleet, rng, 80.0, 16, 40_000, 300, "second burst")


def restart(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, FIT)
    fleet.at(50.0, lambda: fleet.restart(0, 30.0))


def slow_replica(fleet: Fleet, rng: random.Random) -> None:
    agents(fleet, rng, FIT)


def documents(fleet: Fleet, rng: random.Random) -> None:
    """Each is asked about once: nobody comes back, so nobody should be held for anybody's sake."""
    for number in range(100):
        parts = (Part(f"document {number}", rng.randint(60_000, 110_000)),)
        request = Request("document", f"document {number}", parts, rng.randint(100, 400))
        fleet.at(rng.uniform(0, 120), lambda request=request: fleet.send(request))


def slow_people(fleet: Fleet, rng: random.Random) -> None:
    """They do not fit into KV and come back too late for it."""
    agents(fleet, rng, Agents(40, (80_000, 110_000), 6, pause=60.0, within=60.0))


def quick_agents(fleet: Fleet, rng: random.Random) -> None:
    """They do not fit into KV, hardly pause, and read much."""
    agents(fleet, rng, Agents(36, (80_000, 110_000), 20, output=(40, 150), pause=1.5, within=10.0))


def skewed_system(fleet: Fleet, rng: random.Random) -> None:
    systems = (*[Part("the usual", 20_000)] * 8, Part("another", 20_000), Part("a third", 20_000))
    shape = Agents(40, (21_000, 30_000), 8, pause=3.0, within=10.0, system=systems)
    agents(fleet, rng, shape)


#: Name, and how much slower the first replica is.
WORKLOADS: dict[str, tuple[Workload, float]] = {
    "agents that fit": (agents_fit, 1.0),
    "agents over KV": (agents_over, 1.0),
    "quick agents over KV": (quick_agents, 1.0),
    "slow people over KV": (slow_people, 1.0),
    "documents over KV": (documents, 1.0),
    "cold burst": (cold_burst, 1.0),
    "burst over agents": (burst_over_agents, 1.0),
    "mixed": (mixed, 1.0),
    "a replica restarts": (restart, 1.0),
    "one slow replica": (slow_replica, 2.5),
    "skewed system prompt": (skewed_system, 1.0),
}
