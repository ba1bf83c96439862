"""One request and its answer as the relay handles them, and the three sides it talks to.

HTTP and the network are behind ``Request`` and ``Client`` (clients/) and ``Upstream`` (engines/):
what stands here can be replaced or tested without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from proxy.http.body import Body, Splice
from proxy.http.headers import RequestHead, ResponseHead
from proxy.reading.facts import Facts
from proxy.reading.request import ModelName, UnplacedName
from proxy.reading.usage import Usage
from proxy.routes import Route
from supervisord.core.admission import Lease, Placement, Running


class ConnectFailed(Exception):
    """No connection, or it died before a response byte: another replica may have the request."""


class NoFirstByte(Exception):
    """The engine has the request and has been silent for too long; it may be working on it, so nobody else gets it."""


class LocalFault(Exception):
    """This process cannot open a connection (file descriptors, ports, memory): not the replica's fault."""


class UpstreamBroken(Exception):
    """The connection to the engine died, or made no sense, after the first response byte."""


class ClientGone(Exception):
    """The client's connection is closed."""


class Request(Protocol):
    """A request whose head has come."""

    head: RequestHead

    @property
    def peer(self) -> str:
        """The client's address, ``unix`` where it has none."""
        ...

    @property
    def host(self) -> bytes:
        """The host that the client asked for."""
        ...

    @property
    def secure(self) -> bool:
        """Whether it came by TLS."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the whole body was received."""
        ...

    def ask_for_body(self) -> None:
        """Send 100 Continue, unless the body is coming already."""
        ...

    def take(self, consume: Callable[[bytes], None]) -> bool:
        """Give what has come of the body to ``consume``; returns whether that was all, else ``receive`` follows.

        A ``ProxyError`` of ``consume`` is passed on, and 400 is raised here.
        """
        ...

    async def receive(self) -> None:
        """Give it the rest as it comes; raises as ``take``, and 408."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        ...

    def take_over(self, consume: Callable[[bytes], None]) -> Source:
        """The connection speaks another protocol from now on: what comes is given to ``consume``, without an end.

        Returns what stops and resumes the reading.
        """
        ...


class Answer(Protocol):
    """An engine's response whose head has come."""

    @property
    def head(self) -> ResponseHead: ...

    @property
    def poured(self) -> int:
        """Bytes of the body that ``pour`` passed on."""
        ...

    @property
    def tail(self) -> bytes:
        """The last four of them."""
        ...

    @property
    def beginning(self) -> bytes:
        """What has come of the body already and nobody has taken yet, with its framing."""
        ...

    @property
    def ending(self) -> bytes:
        """What came last of what ``pour`` passed on, a few events at least, with its framing."""
        ...

    def accept(self) -> None:
        """This is what the client gets: nobody else will need the request's body, which may be given back."""
        ...

    async def begins(self) -> None:
        """Wait for the first byte of the body, or its end; raises ``UpstreamBroken``."""
        ...

    def at_hand(self) -> bytes | None:
        """The whole body, if it is here already and was told how long it is; then nobody else can take it."""
        ...

    async def read(self, limit: int) -> bytes:
        """The body, or its first bytes once they are ``limit``; raises ``UpstreamBroken``."""
        ...

    async def pour(self, client: Client) -> None:
        """Pass the body on as it comes and no faster than the client reads; raises ``UpstreamBroken``."""
        ...

    def close(self) -> None:
        """Keep the connection if the response was read to its end, else cut it at once."""
        ...


class Upstream(Protocol):
    """The way to the engines."""

    async def send(self, place: Lease | Running, exchange: Exchange) -> Answer:
        """Send the request to that replica and wait for the response's head.

        Raises ``ConnectFailed``, ``NoFirstByte``, ``LocalFault`` or ``UpstreamBroken``. Cancelling cuts the connection.
        """
        ...


class Source(Protocol):
    """Where bytes for a client come from."""

    def hold(self) -> None:
        """Stop reading: the client does not."""
        ...

    def release(self) -> None:
        """Go on."""
        ...


class Client(Protocol):
    """The way back to the client. Every coroutine waits while the client does not read; raises ``ClientGone``."""

    @property
    def started(self) -> bool:
        """Whether a status was sent."""
        ...

    @property
    def chunked(self) -> bool:
        """Whether the body goes out in chunks."""
        ...

    @property
    def over(self) -> bool:
        """Whether the whole response was sent."""
        ...

    #: Sends bytes without waiting, as they are: chunks, where ``chunked``.
    send_framed: Callable[[bytes], None]

    def switch(self, lines: bytes) -> None:
        """Answer 101, after which ``send_framed`` is the way to the client."""
        ...

    def send(self, data: bytes) -> None:
        """Send bytes of the body without waiting."""
        ...

    def connect(self, source: Source | None) -> None:
        """Tell ``source`` from now on when the client reads and when not."""
        ...

    def left_open(self, size: int) -> None:
        """What was sent last is a chunk that lacks ``size`` bytes and its line break."""
        ...

    async def start(self, head: ResponseHead, lines: bytes, *, at_once: bool) -> None:
        """Send the head of the response, or with ``at_once`` false together with the first bytes of the body.

        ``lines``: the fields, without those that frame the body.
        """
        ...

    async def write(self, data: bytes) -> None: ...

    def whole(self, head: ResponseHead, lines: bytes, body: bytes) -> int:
        """Send the whole response, whose length its head tells; returns how many bytes of the body: none to a HEAD."""
        ...

    def end(self) -> None:
        """The response is whole."""
        ...

    @property
    def full(self) -> bool:
        """Whether the client does not read what it was sent: whoever goes on must wait."""
        ...

    async def drained(self) -> None:
        """Wait until it is not ``full``."""
        ...

    def close_after(self) -> None:
        """Close the connection when the response has ended."""
        ...

    def cut(self) -> None:
        """Break the connection, so that the client sees that the response is not whole."""
        ...


class Stage(StrEnum):
    """What a request is waiting for."""

    BODY = "body"  # for the rest of it
    QUEUE = "queue"  # for a replica: a wake, a start
    PREFILL = "prefill"  # for the engine's first computed byte
    STREAM = "stream"  # for the rest of the answer


@dataclass(slots=True)
class Outcome:
    """What became of a request; filled in as it happens, logged once at its end."""

    #: The status sent, 499 for a client that left first, 0 before any.
    status: int = 0
    #: Our error code, the engine's being its own matter.
    code: str = ""
    #: The name of the API key that let it in; empty where none is asked for.
    key: str = ""
    model: str = ""
    replica: str = ""
    reason: str = ""
    #: What routing knew of the prompt's whereabouts; None while no replica was chosen.
    placement: Placement | None = None
    #: Whether the client asked for a stream.
    stream: bool = False
    #: Bytes of the request's body, decoded, and of the response's.
    bytes_received: int = 0
    bytes_sent: int = 0
    #: How far it got: where a client that left was when it did.
    stage: Stage = Stage.BODY
    #: Seconds in the queue, for a replica to be there.
    queued: float = 0.0
    #: Replicas that it was sent to, one after the other.
    attempts: int = 0
    #: The clock when the first response byte came from the engine, and when the first that took computing did.
    first_byte: float | None = None
    computed: float | None = None
    #: The tokens that the engine counted, where it told.
    usage: Usage | None = None
    #: The code that a WebSocket was closed with.
    close: int | None = None
    #: What went wrong, for the log.
    details: list[str] = field(default_factory=list)


class Finished(NamedTuple):
    """The frame of a request that is over."""

    method: str
    #: The row of the allow-list, never the client's own text; ``-`` where there is none.
    route: str
    id: str
    #: The client's address.
    peer: str
    #: The clock at its head and at its end.
    started: float
    ended: float


Observer = Callable[[Finished, Outcome], None]


@dataclass(slots=True)
class Exchange:
    """One request with its complete body, and what became of it (for the log)."""

    id: str
    route: Route
    head: RequestHead
    body: Body
    #: Whether the body was compressed and is not any more.
    decoded: bool
    facts: Facts
    #: The name to admit: what the client wrote, or the only model there is.
    model: str
    model_name: ModelName | UnplacedName | None
    outcome: Outcome
    #: The replicas that alone can answer it; None: any.
    only: frozenset[str] | None = None
    #: Told what a good answer begins with, while its lease is held.
    learn: Callable[[Lease, bytes], None] | None = None
    #: Whether its policy knows that it is over.
    told: bool = False

    def splice_for(self, place: Lease | Running) -> Splice | None:
        """The change to the body where the replica does not answer to the client's name for the model."""
        if self.model_name is None or not place.served_names or self.facts.model is None:
            return None
        if self.facts.adapter or self.facts.model in place.served_names:
            return None
        return self.model_name.replaced_by(place.served_names[0])
