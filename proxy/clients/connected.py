"""The clients of a port: who is connected, who has said something, and how all of them are closed."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any

from proxy.clients.connection import ClientConnection
from proxy.clients.crowd import Crowd, client_of
from proxy.clients.incoming import HttpRequest
from proxy.clients.networks import ClientNetworks
from proxy.clients.response import HttpClient
from proxy.clients.tls import TlsConnection
from proxy.errors import ProxyError
from supervisord.core.spec import ProxySpec

Handler = Callable[[HttpRequest, HttpClient], Coroutine[Any, Any, None]]
#: Told of every client that was answered without a request: its address, and what it was told.
Refusals = Callable[[str, ProxyError], None]

#: Refused clients that are given time to read why, at a time: so many, and one for so many of ``max_connections``.
_FEWEST_LINGERING, _SERVED_PER_LINGERING = 8, 8
#: Turns of the loop after which an accepted connection has a protocol, and what its client has sent was read (asyncio
#: takes four); some to spare.
_TURNS_TO_BEGIN = 10


class ClientServer:
    """The connections of a port; ``spec`` is read whenever a limit is needed."""

    #: Whose clients may connect; None: everybody.
    networks: ClientNetworks | None
    #: Whose word on their clients is believed; None: nobody's.
    trusted: ClientNetworks | None
    #: What new connections speak TLS with; None: they do not.
    tls: ssl.SSLContext | None = None

    def __init__(self, handler: Handler, refused: Refusals, spec: ProxySpec) -> None:
        self.handler = handler
        self.refused = refused
        self.configure(spec)
        self.connections: set[ClientConnection] = set()
        #: Handlers that are ending after their connection.
        self.tasks: set[asyncio.Task[None]] = set()
        self._all_lost = asyncio.Event()
        self._crowd = Crowd()
        #: Those of the connections that were one too many, until they are closed.
        self._surplus: set[ClientConnection] = set()
        self._silent: set[ClientConnection] = set()
        self._all_heard = asyncio.Event()
        self._date, self._date_of = b"", 0

    def __call__(self) -> asyncio.Protocol:
        connection = ClientConnection(self)
        return connection if self.tls is None else TlsConnection(self.tls, connection, self)

    def configure(self, spec: ProxySpec) -> None:
        """Take new limits; ``allow_clients`` holds for new connections, and for the next request of those that are."""
        self.spec = spec
        self.networks = ClientNetworks(spec.allow_clients) if spec.allow_clients else None
        self.trusted = ClientNetworks(spec.trusted_proxies) if spec.trusted_proxies else None

    def stranger(self, transport: asyncio.BaseTransport) -> ProxyError | None:
        """Why the client of a connection is not served; None where it is. Its folder decides who reaches a socket.

        A trusted proxy may connect: its clients are looked at, request by request.
        """
        if self.networks is None or transport.get_extra_info("socket").family == socket.AF_UNIX:
            return None
        peer = transport.get_extra_info("peername")  # none when it has left already
        if peer and (self.networks.has(peer[0]) or (self.trusted is not None and self.trusted.has(peer[0]))):
            return None
        return _not_allowed(peer[0] if peer else "-")

    def one_too_many(self, connection: ClientConnection) -> ProxyError | None:
        """Why a new connection is not served; where it is, it is counted as its client's until it is lost."""
        spec = self.spec
        if len(self.connections) - len(self._surplus) >= spec.max_connections:
            full = f"this port serves {spec.max_connections} connections at a time"
            return ProxyError(503, "too_many_connections", full, retry_after=1.0)
        if self.trusted is not None and self.trusted.has(connection.peer):
            connection.of_proxy = True
            return None
        return self.count(connection, connection.peer)

    def unwelcome(self, connection: ClientConnection, client: str) -> ProxyError | None:
        """Why the request of a trusted proxy's client is not served; where it is, it is counted until it ends."""
        if self.networks is not None and not self.networks.has(client):
            return _not_allowed(client)
        self.uncount(connection)  # for itself, from the time before its network was trusted
        return self.count(connection, client)

    def count(self, connection: ClientConnection, client: str) -> ProxyError | None:
        """Why a client (its address) is not served; where it is, the connection counts as its, until ``uncount``."""
        limit = self.spec.max_connections_per_client
        if limit and (who := client_of(client)):
            if self._crowd.has(who) >= limit:
                full = f"this port serves {limit} connections of one client at a time"
                return ProxyError(429, "too_many_connections", full, retry_after=1.0)
            self._crowd.add(who)
            connection.counted_as = who
        return None

    def uncount(self, connection: ClientConnection) -> None:
        """It counts as nobody's any more."""
        if connection.counted_as:
            self._crowd.remove(connection.counted_as)
            connection.counted_as = b""

    def add_surplus(self, connection: ClientConnection) -> bool:
        """A new connection was one too many; returns whether there is room to let its client read why.

        Where there is none it is closed with the answer under way, which a client that is sending may not see.
        """
        lingering = len(self._surplus)
        self._surplus.add(connection)
        return lingering < max(_FEWEST_LINGERING, self.spec.max_connections // _SERVED_PER_LINGERING)

    def turned_away(self, transport: asyncio.BaseTransport, error: ProxyError) -> None:
        """A client was disconnected before it could be answered."""
        peer = transport.get_extra_info("peername")
        self.refused(peer[0] if peer else "-", error)

    async def close(self, patience: float) -> None:
        """Close the connections; those that have not sent everything after ``patience`` seconds are cut."""
        for connection in list(self.connections):
            connection.close()
        if not await self._closed_within(patience):
            for connection in list(self.connections):
                connection.transport.abort()
            await self._closed_within(patience)
        if self.tasks:
            await asyncio.wait(self.tasks)

    def connected(self, connection: ClientConnection) -> None:
        """A client is there, and has asked nothing yet."""
        self.connections.add(connection)
        self._silent.add(connection)

    def heard(self, connection: ClientConnection) -> None:
        """Its first request has begun, or it is gone."""
        self._silent.discard(connection)
        if not self._silent:
            self._all_heard.set()

    async def everybody_heard(self) -> None:
        """Returns when every client that was let in has begun its first request, or is gone."""
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)
        while self._silent:
            self._all_heard.clear()
            await self._all_heard.wait()

    def lost(self, connection: ClientConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        self._surplus.discard(connection)
        self.uncount(connection)
        self.heard(connection)
        if not self.connections:
            self._all_lost.set()

    async def _closed_within(self, patience: float) -> bool:
        try:
            async with asyncio.timeout(patience):
                while self.connections:
                    self._all_lost.clear()
                    await self._all_lost.wait()
        except TimeoutError:
            return False
        return True

    def date(self) -> bytes:
        """The Date line of a response that has none (RFC 9110 6.6.1)."""
        now = int(time.time())
        if now != self._date_of:
            self._date, self._date_of = f"Date: {formatdate(now, usegmt=True)}\r\n".encode(), now
        return self._date


def _not_allowed(address: str) -> ProxyError:
    return ProxyError(403, "client_not_allowed", f"clients at {address} are not served here")
