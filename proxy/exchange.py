"""One request and its answer as the relay handles them, and the three sides it talks to.

The HTTP libraries are behind ``Client`` (server.py) and ``Upstream`` (upstream.py); what stands here can be replaced or
tested without either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from proxy.body import Body, Splice
from proxy.facts import Facts
from proxy.headers import Headers
from proxy.request import ModelName
from proxy.routes import Route
from supervisord.core.admission import Lease


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


class Answer(Protocol):
    """An engine's response whose head has come."""

    status: int
    reason: str
    headers: Headers

    async def read(self) -> bytes:
        """What came since the last call, empty at the end; raises ``UpstreamBroken``."""
        ...

    def close(self) -> None:
        """Keep the connection if the response was read to its end, else cut it at once."""
        ...


class Upstream(Protocol):
    """The way to the engines."""

    async def send(self, lease: Lease, exchange: Exchange) -> Answer:
        """Send the request to the lease's replica and wait for the response's head; then the body may be given back.

        Raises ``ConnectFailed``, ``NoFirstByte``, ``LocalFault`` or ``UpstreamBroken``. Cancelling cuts the connection.
        """
        ...


class Client(Protocol):
    """The way back to the client. Every coroutine waits while the client does not read; raises ``ClientGone``."""

    @property
    def started(self) -> bool:
        """Whether a status was sent."""
        ...

    async def start(self, status: int, reason: str, headers: Headers) -> None:
        """Send the head of the response."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None:
        """The response is whole."""
        ...

    def close_after(self) -> None:
        """Close the connection when the response has ended."""
        ...

    def cut(self) -> None:
        """Break the connection, so that the client sees that the response is not whole."""
        ...


@dataclass(slots=True)
class Outcome:
    """What became of a request; filled in as it happens, logged once at its end."""

    #: The status sent, 499 for a client that left first, 0 before any.
    status: int = 0
    #: Our error code, the engine's being its own matter.
    code: str = ""
    model: str = ""
    replica: str = ""
    reason: str = ""
    #: Bytes of the response's body.
    bytes_sent: int = 0
    #: The clock when the first response byte came from the engine.
    first_byte: float | None = None
    #: The share of the prompt that the engine found in its cache, 0 to 1, where it told.
    cached: float | None = None
    #: What went wrong, for the log.
    details: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Exchange:
    """One request with its complete body, and what became of it (for the log)."""

    id: str
    route: Route
    #: Path and query as they came.
    target: str
    #: Headers for the engine, without a length.
    headers: Headers
    body: Body
    facts: Facts
    #: The name to admit: what the client wrote, or the only model there is.
    model: str
    model_name: ModelName | None
    outcome: Outcome

    def splice_for(self, lease: Lease) -> Splice | None:
        """The change to the body where the replica does not answer to the client's name for the model."""
        if self.model_name is None or not lease.served_names or self.facts.model is None:
            return None
        if self.facts.model in lease.served_names:
            return None
        return self.model_name.replaced_by(lease.served_names[0])
