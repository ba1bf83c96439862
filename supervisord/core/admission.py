"""The one question the proxy asks the supervisor: may this request go, and where?

The answer is given and counted in one synchronous step: a ``Lease`` is in flight from the moment it is
returned, so no sleep, stop or eviction can slip between the decision and the forwarding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class RefusalCode(StrEnum):
    """The ``code`` of the OpenAI error object that a refused client gets."""

    MODEL_NOT_FOUND = "model_not_found"  # 404
    MODEL_STARTING = "model_starting"
    MODEL_WAKING = "model_waking"
    QUEUE_FULL = "queue_full"
    NO_LIVE_REPLICA = "no_live_replica"
    ROUTER_SHUTTING_DOWN = "router_shutting_down"
    MODEL_HELD = "model_held"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    WAKE_FAILED = "wake_failed"


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request gets this answer now: 404 for ``model_not_found``, else 503 with Retry-After."""

    code: RefusalCode
    message: str
    #: Seconds, from measured wake and service times and the depth; None where waiting does not help.
    retry_after: float | None = None


# Those that are made for every request are tuples by name, which takes half the time of a frozen dataclass.


class Candidate(NamedTuple):
    """A replica that may be chosen now, as a routing policy sees it."""

    name: str
    in_flight: int
    #: Grows by one whenever the replica lost its cache (restart, sleep, wake): older prefixes are cold.
    generation: int
    #: Tokens that its KV cache holds; None: the engine did not tell.
    kv_tokens: int | None = None


class Placement(StrEnum):
    """What a policy knew of the replicas that have a request's prefix in their cache."""

    STAYS = "stays"  # it goes on where its prefix is
    MOVES = "moves"  # somebody has its prefix, and it goes elsewhere
    COLD = "cold"  # nobody is known to have it
    BLIND = "blind"  # the policy does not look


class Choice(NamedTuple):
    """What a policy answers: the name of one of the candidates, and why (for the log and ``x-vllmctl-route``)."""

    replica: str
    reason: str
    placement: Placement = Placement.BLIND


@dataclass(frozen=True, slots=True)
class Bid:
    """What one replica would cost a request, in predicted seconds to its first token."""

    replica: str
    seconds: float
    #: Of these: the work before it, and its own prefill; the rest is its share of what runs there.
    pending: float
    prefill: float
    #: Tokens of the prompt that its cache is believed to have.
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request would go now. ``replica`` is empty where it would wait; ``bids``: of a policy that predicts."""

    replica: str
    reason: str
    bids: tuple[Bid, ...] = ()


@dataclass(frozen=True, slots=True)
class NotYet:
    """What a policy answers that wants this request to wait although there are candidates.

    Those it holds are let in in the order in which they came; requests that it does not hold pass them. It is asked
    again whenever a request has ended, and at least once a second. It holds nobody for the sake of a cache that is
    gone, and nobody where it is told of no KV: a replica that was brought back serves somebody.
    """

    #: Why, for the log.
    reason: str
    #: Seconds until it is likely to be let in, for Retry-After.
    likely_in: float


#: A routing policy with one request's facts bound. Pure of I/O; chooses one of the candidates (never an empty list).
Chooser = Callable[[Sequence[Candidate]], Choice | NotYet]


class Lease(NamedTuple):
    """Permission to send one request to one replica. Must be returned exactly once, by ``finish``."""

    id: int
    model: str
    replica: str
    #: ``http://host:port`` or ``unix:/path``.
    endpoint: str
    #: The names the engine answers to; empty when not known. A request for another name has its ``model``
    #: spliced to the first.
    served_names: tuple[str, ...]
    reason: str
    placement: Placement = Placement.BLIND


@dataclass(frozen=True, slots=True)
class Wait:
    """The request is queued (first come, first served): until a replica is ready, or while its policy holds it."""

    ticket: int
    #: Resolves to a ``Lease`` (already counted) or a ``Refuse``; raises what its policy raised.
    outcome: asyncio.Future[Lease | Refuse]
    #: Why its policy holds it; empty when it waits for a replica.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """A replica whose process can be asked, awake or not."""

    model: str
    replica: str
    #: See ``Lease``.
    endpoint: str
    #: Another one after every start: what the process before had in its memory is gone.
    run: str
    served_names: tuple[str, ...] = ()


class Ending(StrEnum):
    """How a lease ended, for health, idle clocks and counters."""

    COMPLETED = "completed"  # the engine answered, whatever its status
    CLIENT_GONE = "client_gone"  # the client left; the upstream request was cancelled: not the replica's fault
    CONNECT_FAILED = (
        "connect_failed"  # no connection, or it died before a response byte: the replica is demoted at once
    )
    STREAM_BROKEN = "stream_broken"  # died after the first byte


class Admission(Protocol):
    """What the proxy needs of the supervisor. Every method is synchronous and never blocks."""

    def admit(
        self,
        model: str,
        choose: Chooser,
        *,
        exclude: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
    ) -> Lease | Wait | Refuse:
        """Decide for one request of ``model`` (a name, an alias, or an adapter that an engine serves).

        ``exclude``: replicas that already failed it. ``only``: the replicas that can answer it at all, None for any;
        one that rests is brought back, whoever else is awake.
        """
        ...

    def candidates(self, model: str) -> Sequence[Candidate]:
        """Those that a request of ``model`` may go to now; wakes and counts nothing."""
        ...

    def finish(self, lease: Lease, ending: Ending, detail: str = "") -> None:
        """Return a lease. ``detail`` is the reason of a failure, for the log."""
        ...

    def abandon(self, wait: Wait) -> None:
        """The waiting client left, or waited long enough: give its place up (and its lease, if it was just granted)."""
        ...

    def running(self) -> Sequence[Running]:
        """The replicas whose processes can be asked; this is no lease: it wakes nobody, and keeps nobody awake."""
        ...

    def listing(self) -> Sequence[ListedModel]:
        """Every configured model for ``/v1/models``, from what is known; wakes and asks nobody."""
        ...


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One row of ``/v1/models``."""

    name: str
    aliases: tuple[str, ...]
    #: The model's state as a person sees it (``ready``, ``asleep``, ``stopped`` ...).
    state: str
    #: The engine's real context length in tokens, None until an engine told it.
    max_model_len: int | None
    #: Seconds since the epoch.
    created: int
    simulated: bool
    routing: str
    #: Seconds the last wake took, None before the first.
    wake_seconds: float | None
    #: What else its engines answer to: adapters.
    adapters: tuple[str, ...] = ()
