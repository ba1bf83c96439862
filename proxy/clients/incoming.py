"""One request as it comes: its body, from the bytes of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from proxy.clients.response import HttpClient, Transport
from proxy.clients.trusted import Told
from proxy.errors import ProxyError, bad_request
from proxy.exchange import Source
from proxy.http.chunks import ChunkError, Chunks
from proxy.http.headers import RequestHead


class Connection(Protocol):
    """What a request needs of its connection."""

    gone: bool
    peer: str
    discarding: bool
    task: asyncio.Task[None] | None
    loop: asyncio.AbstractEventLoop

    @property
    def transport(self) -> Transport: ...

    @property
    def buffered(self) -> bool: ...

    def hold(self) -> None: ...
    def release(self) -> None: ...
    def take_buffer(self) -> bytes: ...
    def put_back(self, data: bytes) -> None: ...
    def discard(self) -> None: ...
    def body_limit(self, began: float, size: int) -> None: ...
    def no_limit(self) -> None: ...
    def request_ends(self, request: HttpRequest, client: HttpClient) -> None: ...


class HttpRequest:
    """See ``proxy.exchange.Request``."""

    __slots__ = (
        "_began",
        "_chunks",
        "_connection",
        "_consume",
        "_error",
        "_left",
        "_size",
        "_told",
        "_tunnel",
        "_waiter",
        "complete",
        "head",
        "receiving",
    )

    def __init__(self, connection: Connection, head: RequestHead, told: Told | None = None) -> None:
        """``told``: what a trusted proxy says of it."""
        self.head = head
        self.receiving = False
        self.complete = head.length == 0
        self._connection = connection
        self._told = told
        self._left = head.length or 0
        self._chunks = Chunks() if head.length is None else None
        self._consume: Callable[[bytes], None] = _ignore
        self._tunnel: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: ProxyError | None = None
        self._began, self._size = 0.0, 0

    @property
    def peer(self) -> str:
        """The client's address."""
        return self._connection.peer if self._told is None else self._told.client

    @property
    def host(self) -> bytes:
        """The host that the client asked for."""
        return (self._told.host if self._told is not None else b"") or self.head.field(b"host")

    @property
    def secure(self) -> bool:
        """Whether it came by TLS."""
        if self._told is not None and self._told.secure is not None:
            return self._told.secure
        return self._connection.transport.get_extra_info("sslcontext") is not None

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._connection.gone

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Its handler's task."""
        return self._connection.task

    def ask_for_body(self) -> None:
        """Send 100 Continue, unless the body is coming already."""
        if not self.complete and not self._connection.buffered:
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def take(self, consume: Callable[[bytes], None]) -> bool:
        """Give what has come of the body to ``consume``; returns whether that was all.

        Raises a ``ProxyError``: that of ``consume``, or 400.
        """
        if not self.complete:
            self._consume, self.receiving = consume, True
            self._began = self._connection.loop.time()
            self.feed(self._connection.take_buffer())
            if self._error is not None:
                raise self._error
        return self.complete

    async def receive(self) -> None:
        """Give it the rest as it comes; raises a ``ProxyError`` as ``take``, or 408."""
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._connection.no_limit()
            if not self.complete:
                self.receiving = False
                self._connection.discard()

    def take_over(self, consume: Callable[[bytes], None]) -> Source:
        """See ``proxy.exchange.Request``."""
        self._tunnel, self.receiving, self.complete = consume, True, False
        self.feed(self._connection.take_buffer())
        return self._connection

    def feed(self, data: bytes) -> None:
        """Bytes from the connection, while ``receiving``."""
        if self._tunnel is not None:
            self._tunnel(data)
            return
        try:
            if self._chunks is not None:
                for piece in self._chunks.take_out(data):
                    self._consume(piece)
                if self._chunks.done:
                    self._ends(self._chunks.excess)
                self._size += len(data)
            else:
                size = len(data)
                left = self._left
                if size >= left:
                    self._consume(data[:left])
                    self._ends(data[left:])
                else:
                    self._left -= size
                    self._size += size
                    if size:
                        self._consume(data)
        except ChunkError as error:
            self.fail(bad_request(f"cannot read the request body: {error}"))
        except ProxyError as error:
            self.fail(error)
        if self.receiving:
            self._connection.body_limit(self._began, self._size)

    def fail(self, error: ProxyError) -> None:
        """The body is no more wanted."""
        self._error = error
        self.receiving = False
        self._connection.discard()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def skip(self) -> bool:
        """Drop the body if all of it is here already; returns whether it was."""
        if self._error is None and self._tunnel is None and not self._connection.discarding:
            self._consume, self._waiter = _ignore, None
            self.receiving = True
            self.feed(self._connection.take_buffer())
            self.receiving = False
        return self.complete

    def ends(self, client: HttpClient) -> None:
        """The handler is done with it."""
        self._connection.request_ends(self, client)

    def _ends(self, rest: bytes) -> None:
        self.complete, self.receiving = True, False
        self._connection.put_back(rest)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore(data: bytes) -> None:
    """For bodies that nobody wants."""
