"""The client's side of the public port: one asyncio protocol per connection, one request at a time, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol, cast

from proxy.clients.incoming import HttpRequest
from proxy.clients.networks import ClientNetworks
from proxy.clients.response import HttpClient
from proxy.clients.trusted import told
from proxy.errors import Dialect, ProxyError, error_body, error_headers
from proxy.exchange import Source
from proxy.http.headers import HeadError
from proxy.http.heads import parse_request, too_long
from supervisord.core.spec import ProxySpec

#: Bytes of a response that may be unsent before its source is held.
WRITE_BUFFER = 64 * 1024
#: Bytes received beyond the request in hand before reading stops (and with it the sight of the client's leaving).
READ_AHEAD = 256 * 1024
#: Seconds that a connection being closed is given: to send what it has, and for a refused client to read why.
LINGER = 5.0
#: A body must come with so many bytes a second on the whole, after its first ``client_body_timeout`` seconds.
SLOWEST_BODY = 1024


class Server(Protocol):
    """What a connection needs of the port that it belongs to (see ``proxy.clients.connected``)."""

    @property
    def spec(self) -> ProxySpec: ...

    @property
    def networks(self) -> ClientNetworks | None: ...

    @property
    def trusted(self) -> ClientNetworks | None: ...

    #: Handlers that are ending after their connection.
    tasks: set[asyncio.Task[None]]

    @property
    def handler(self) -> Callable[[HttpRequest, HttpClient], Coroutine[Any, Any, None]]: ...

    @property
    def connections(self) -> Collection[ClientConnection]: ...

    def connected(self, connection: ClientConnection) -> None: ...

    def heard(self, connection: ClientConnection) -> None: ...

    def lost(self, connection: ClientConnection) -> None: ...

    def refused(self, peer: str, error: ProxyError) -> None:
        """A client was answered without having asked anything that could be understood."""
        ...

    def one_too_many(self, connection: ClientConnection) -> ProxyError | None: ...

    def unwelcome(self, connection: ClientConnection, client: str) -> ProxyError | None: ...

    def count(self, connection: ClientConnection, client: str) -> ProxyError | None: ...

    def uncount(self, connection: ClientConnection) -> None: ...

    def add_surplus(self, connection: ClientConnection) -> bool: ...

    def stranger(self, transport: asyncio.BaseTransport) -> ProxyError | None: ...

    def date(self) -> bytes: ...


class ClientConnection(asyncio.Protocol):
    """Bytes to requests and back; see the module."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        #: The client's address, for the log; ``unix`` where it has none.
        self.peer = ""
        #: The client that it counts for, where there is a limit.
        self.counted_as = b""
        #: Whether it is, or was a request ago, a trusted proxy's, and so does not count for itself.
        self.of_proxy = False
        #: Whether nobody is there to be answered.
        self.gone = False
        self._lost = False
        #: Whether the request in hand is of a trusted proxy's client.
        self._proxied = False
        #: The networks of which the client was found to be.
        self._networks = server.networks
        self._request: HttpRequest | None = None
        #: The handler of the request in hand.
        self.task: asyncio.Task[None] | None = None
        self._buffer = b""
        self._head_began = self._heard = False
        self._reading = True
        #: Whether what comes is dropped.
        self.discarding = False
        self._closing = False
        #: Whether the client does not read what it is sent.
        self.write_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._source: Source | None = None
        # One timer for all limits, of which one applies at a time: None while a request is answered.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self.transport.set_write_buffer_limits(WRITE_BUFFER)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else "unix"
        server = self._server
        one_too_many = server.one_too_many(self)
        server.connected(self)
        if (stranger := server.stranger(self.transport)) is not None:
            # Without lingering: strangers hold no connections, which others could want.
            self.refuse(stranger, linger=False)
        elif one_too_many is not None:
            self.refuse(one_too_many, linger=server.add_surplus(self))
        else:
            self._limit(server.spec.client_header_timeout)

    def data_received(self, data: bytes) -> None:
        request = self._request
        if self.discarding:
            return
        if request is None:
            self._head_comes(self._buffer + data if self._buffer else data)
        elif request.receiving:
            request.feed(data)
        else:
            self._buffer += data
            if len(self._buffer) > READ_AHEAD and self._reading:
                self._reading = False
                self.transport.pause_reading()

    def eof_received(self) -> None:
        # vLLM takes a half-close for the client's leaving, and so does the protocol of its clients.
        self._leave()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._server.lost(self)
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._source is not None:
            self._source.hold()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._source is not None:
            self._source.release()

    # what requests and responses ask for

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        while self.write_paused and not self._lost:
            self._drained = self.loop.create_future()
            await self._drained

    def connect(self, source: Source | None) -> None:
        """Tell ``source`` when the client reads and when not."""
        self._source = source
        if source is not None and self.write_paused:
            source.hold()

    def date(self) -> bytes:
        """See ``ClientServer.date``."""
        return self._server.date()

    def hold(self) -> None:
        """Stop reading."""
        if self._reading and not self.gone:
            self._reading = False
            self.transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if not self._reading and not self.gone:
            self._reading = True
            self.transport.resume_reading()

    @property
    def buffered(self) -> bool:
        """Whether anything came after the head of the request in hand."""
        return bool(self._buffer)

    def take_buffer(self) -> bytes:
        """What came after the head of the request in hand."""
        data, self._buffer = self._buffer, b""
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        return data

    def put_back(self, data: bytes) -> None:
        """What came after the body: the next request."""
        self._buffer = data

    def discard(self) -> None:
        """Nothing that comes from now on can be understood, or is wanted."""
        self.discarding = True
        self._buffer = b""

    def body_limit(self, began: float, size: int) -> None:
        """A body is on its way since ``began``: it may pause, and be slow, but not for ever."""
        timeout = self._server.spec.client_body_timeout
        self._limit_at(min(self.loop.time(), began + size / SLOWEST_BODY) + timeout)

    def no_limit(self) -> None:
        """A request is being answered."""
        self._deadline = None

    def request_ends(self, request: HttpRequest, client: HttpClient) -> None:
        """The handler is done."""
        self._request = self.task = self._source = None
        if self._proxied:
            self._proxied = False
            self._server.uncount(self)
        if self._lost:
            return
        if self._closing or not client.over:
            self.transport.abort()
        elif client.closes or not (request.complete or request.skip()):
            self._close(linger=not request.complete or bool(self._buffer))
        elif self.gone:
            self._close(linger=False)
        else:
            self._limit(self._server.spec.keepalive)
            if self._buffer or not self._reading:
                self._head_comes(self.take_buffer())

    def close(self) -> None:
        """Close if idle, after what was sent is read; a request in hand is not waited for."""
        self._leave()
        if not self._lost:
            self._close(linger=False)

    # inside

    def _head_comes(self, data: bytes) -> None:
        if data.startswith(b"\r\n"):  # RFC 9112 2.2: an empty line before a request is not an error
            data = data[2:]
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = data
            if (error := too_long(data)) is not None:
                self._refuse_head(error)
            elif data and not self._head_began:  # the time for a head counts from its first byte
                self._head_began = True
                self._limit(self._server.spec.client_header_timeout)
            return
        self._buffer, self._head_began = data[end + 4 :], False
        if self._networks is not self._server.networks:
            self._networks = self._server.networks
            if (stranger := self._server.stranger(self.transport)) is not None:
                self.refuse(stranger)
                return
        try:
            head = parse_request(data[: end + 4])
            trusted = self._server.trusted
            heard = told(self.peer, head.hearsay, trusted) if trusted is not None and trusted.has(self.peer) else None
        except HeadError as error:
            self._refuse_head(error)
            return
        if heard is not None:
            self._proxied = self.of_proxy = True
            if (unwelcome := self._server.unwelcome(self, heard.client)) is not None:
                self.refuse(unwelcome, client=heard.client)
                return
        elif self.of_proxy:
            self.of_proxy = False
            if (one_too_many := self._server.count(self, self.peer)) is not None:
                self.refuse(one_too_many)
                return
        self._deadline = None
        if not self._heard:
            self._heard = True
            self._server.heard(self)
        request = self._request = HttpRequest(self, head, heard)
        self.task = self.loop.create_task(self._server.handler(request, HttpClient(self, head)))

    def _refuse_head(self, error: HeadError) -> None:
        message = str(error).splitlines()[0] if str(error) else "malformed"
        self.refuse(ProxyError(error.status, error.status, f"cannot parse the request: {message}"))

    def refuse(self, error: ProxyError, *, linger: bool = True, client: str = "") -> None:
        """Answer what is no request, and close. ``client``: whose it was, where that is not the peer."""
        self._server.refused(client or self.peer, error)
        body = error_body(error, Dialect.OPENAI)
        lines = "".join(f"{name}: {value}\r\n" for name, value in error_headers(error))
        head = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n{lines}Content-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + self.date() + b"Connection: close\r\n\r\n" + body)
        self._close(linger=linger)

    def _leave(self) -> None:
        self.gone = True
        if self._source is not None:
            self._source.hold()  # nothing can be written from now on, and the handler has its next turn later
        if self.task is not None:
            self._server.tasks.add(self.task)
            self.task.add_done_callback(self._server.tasks.discard)
            self.task.cancel()
        elif not self._lost and not self.discarding:
            self._close(linger=False)

    def _close(self, *, linger: bool) -> None:
        """Close after what was sent. ``linger``: the client may still be sending, and a reset would lose the answer."""
        self.discard()
        self._closing = True
        self._limit(LINGER)
        if linger and not self.gone and self.transport.can_write_eof():
            self.transport.write_eof()
            if not self._reading:
                self._reading = True
                self.transport.resume_reading()
        else:
            self.transport.close()

    def _limit(self, seconds: float) -> None:
        self._limit_at(self.loop.time() + seconds)

    def _limit_at(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is not None and self._timer_at > deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._set_timer(deadline)

    def _set_timer(self, at: float) -> None:
        # The time is kept here: uvloop's handle of a timer that is due already does not know it.
        self._timer, self._timer_at = self.loop.call_at(at, self._tick), at

    def _tick(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._deadline > self.loop.time():
            self._set_timer(self._deadline)
        elif self._request is not None and self._request.receiving:
            self._deadline = None
            self._request.fail(ProxyError(408, "request_timeout", "the request body comes too slowly"))
        else:
            self.transport.abort()


_PHRASES = {
    400: "Bad Request",
    403: "Forbidden",
    414: "URI Too Long",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}
