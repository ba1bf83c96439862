"""The way to the engines: one pool of kept connections per replica, over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from proxy.engines.connectors import LOCAL_ERRORS, Connector
from proxy.engines.engine import Conversation, EngineConnection, StaleConnection
from proxy.engines.enginesocket import EngineSocket
from proxy.engines.keys import EngineKeys
from proxy.exchange import Client, ConnectFailed, Exchange, LocalFault
from proxy.http.body import Body
from proxy.http.headers import ResponseHead
from proxy.realtime.upgrade import engine_request
from proxy.realtime.websocket import Message, new_key
from supervisord.core.admission import Lease, Running
from supervisord.core.spec import ProxySpec

#: Seconds an idle connection is kept. vLLM's server (uvicorn) closes after 5; one near that limit loses a request.
KEEPALIVE = 4.0

P = TypeVar("P", bound=asyncio.Protocol)


class Upstreams:
    """Sends exchanges to replicas. ``spec`` gives the timeouts, ``keys`` what engines ask for."""

    def __init__(self, spec: ProxySpec, keys: EngineKeys) -> None:
        self._spec = spec
        self._keys = keys
        self._pools: dict[str, _Pool] = {}

    async def send(self, place: Lease | Running, exchange: Exchange) -> EngineAnswer:
        """See ``proxy.exchange.Upstream``.

        A kept connection can have been closed by the engine while the request was on its way. That says nothing about
        the replica, so a request that dies on a *reused* connection before any response byte is sent once more on a new
        one; on a new one it is ``ConnectFailed``.
        """
        pool, body = self._pool(place), exchange.body
        splice = exchange.splice_for(place)
        size = body.size if splice is None else body.spliced_size(splice)
        key = self._key(place, exchange)
        head = exchange.head.for_engine(exchange.id, size, decoded=exchange.decoded, key=key)
        whole = body.after(head) if splice is None else None
        kept = pool.take()
        while True:
            connection = kept or await pool.open(EngineConnection, self._spec.connect_timeout)
            patience = self._spec.first_byte_timeout
            if whole is not None:
                talk = connection.send(whole, (), patience)
            else:
                talk = connection.send(head, body.pieces(splice), patience)
            try:
                return EngineAnswer(await talk.head_comes(), talk, pool, body)
            except StaleConnection:
                connection.cut()
                if kept is None:
                    raise ConnectFailed(f"{place.endpoint} closed the connection without an answer") from None
                kept = None
            except BaseException:
                connection.cut()
                raise

    async def session(self, lease: Lease, exchange: Exchange, target: str) -> tuple[EngineSocket, Message]:
        """See ``proxy.realtime.endpoint.Sockets``."""
        engine = await self._pool(lease).open(EngineSocket, self._spec.connect_timeout)
        try:
            challenge = new_key()
            request = engine_request(exchange.head, target, exchange.id, challenge, key=self._key(lease, exchange))
            return engine, await engine.open(request, challenge)
        except BaseException:
            engine.cut()
            raise

    def configure(self, spec: ProxySpec) -> None:
        """Take new timeouts. The pool of a replica that is gone stays: empty, because idle connections are not kept."""
        self._spec = spec

    async def close(self) -> None:
        """Close every idle connection; those in use are closed by their users."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _key(self, place: Lease | Running, exchange: Exchange) -> str:
        # A client that showed us no key of ours must know the engine's.
        return self._keys.of(place.replica) if exchange.outcome.key else ""

    def _pool(self, place: Lease | Running) -> _Pool:
        pool = self._pools.get(place.endpoint)
        if pool is None:
            pool = self._pools[place.endpoint] = _Pool(place.endpoint)
        return pool


class EngineAnswer:
    """See ``proxy.exchange.Answer``."""

    __slots__ = ("_body", "_pool", "_talk", "head")

    def __init__(self, head: ResponseHead, talk: Conversation, pool: _Pool, body: Body) -> None:
        self.head = head
        self._talk, self._pool, self._body = talk, pool, body

    @property
    def poured(self) -> int:
        """Bytes of the body that ``pour`` passed on."""
        return self._talk.size

    @property
    def tail(self) -> bytes:
        """The last four of them."""
        return self._talk.tail

    @property
    def beginning(self) -> bytes:
        """What has come of the body already and nobody has taken yet."""
        return self._talk.beginning

    @property
    def ending(self) -> bytes:
        """What the engine sent last."""
        return b"".join(self._talk.recent)

    def accept(self) -> None:
        """Give the request's body back, unless the engine has not read all of it yet."""
        if self._talk.sent:
            self._body.close()

    async def begins(self) -> None:
        """Wait for the first byte of the body, or its end."""
        await self._talk.begins()

    def at_hand(self) -> bytes | None:
        """The whole body, if it is here already."""
        return self._talk.at_hand()

    async def read(self, limit: int) -> bytes:
        """The body, or its first bytes once they are ``limit``."""
        return await self._talk.read(limit)

    async def pour(self, client: Client) -> None:
        """The body to ``client``, chunks as the chunks that they are where both sides have chunks."""
        await self._talk.pour(client)

    def close(self) -> None:
        """Cut unless the exchange is over, and the connection fit for another."""
        connection = self._talk.connection
        if not connection.closed and self._talk.over:
            self._pool.put(connection)
        else:
            connection.cut()


class _Pool:
    """The connections to one replica that are not in use, the last used first."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._connector = Connector(endpoint)
        self._idle: deque[tuple[float, EngineConnection]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def take(self) -> EngineConnection | None:
        """A kept connection that is still fit."""
        oldest = self._loop.time() - KEEPALIVE
        while self._idle:
            since, connection = self._idle.pop()
            if since > oldest and not connection.closed:
                return connection
            connection.cut()
        return None

    async def open(self, factory: Callable[[], P], timeout: float) -> P:
        """A new connection; raises ``ConnectFailed`` or ``LocalFault``."""
        try:
            return await self._connector.open(factory, timeout)
        except OSError as error:
            if error.errno in LOCAL_ERRORS:
                raise LocalFault(f"cannot open a connection to {self._endpoint}: {error}") from error
            raise ConnectFailed(f"cannot reach {self._endpoint}: {error}") from error

    def put(self, connection: EngineConnection) -> None:
        """Keep a connection for a while."""
        self._idle.append((self._loop.time(), connection))
        if self._timer is None:
            self._timer = self._loop.call_later(KEEPALIVE, self._sweep)

    def close(self) -> None:
        """Close them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            self._idle.pop()[1].cut()

    def _sweep(self) -> None:
        self._timer = None
        oldest = self._loop.time() - KEEPALIVE
        while self._idle and (self._idle[0][0] <= oldest or self._idle[0][1].closed):
            self._idle.popleft()[1].cut()
        if self._idle:
            self._timer = self._loop.call_at(self._idle[0][0] + KEEPALIVE, self._sweep)
