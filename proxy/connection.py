"""The client's side of the public port, by aiohttp's server: connections, request bodies, responses."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict

from proxy.body import Body, decoder_for, too_large
from proxy.errors import Dialect, ProxyError, bad_request, error_body
from proxy.exchange import ClientGone
from proxy.headers import Headers
from supervisord.core.spec import ProxySpec

log = logging.getLogger("proxy.access")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

#: Longest request line, and longest header field, bytes.
_MAX_HEAD_LINE = 64 * 1024
#: Seconds that the rest of a refused body is read and dropped, so that the client can read the refusal.
_LINGER = 5.0
#: Turns of the loop after which an accepted connection has a protocol, and what its client has sent was read (asyncio
#: takes four); some to spare.
_TURNS_TO_BEGIN = 10


class ClientServer(web.Server):
    """Makes a connection's protocol; ``spec`` is read for each new one."""

    def __init__(self, handler: Handler, spec: ProxySpec) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.spec = spec
        self._silent: set[ClientConnection] = set()
        self._all_heard = asyncio.Event()

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self.spec)

    def connected(self, connection: ClientConnection) -> None:
        """A client is there, and has asked nothing yet."""
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


class ClientConnection(web.RequestHandler):
    """One client connection: aiohttp's, with a time limit for a request's head and our shape of errors."""

    __slots__ = ("_busy", "_clients", "_head_timeout", "_head_timer")

    def __init__(self, server: ClientServer, spec: ProxySpec) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=spec.keepalive,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to say "none"
            max_line_size=_MAX_HEAD_LINE,
            max_field_size=_MAX_HEAD_LINE,
            lingering_time=_LINGER,
            auto_decompress=False,
        )
        self._head_timeout = spec.client_header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._clients = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._clients.connected(self)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._busy and self._head_timer is None:
            self._expect_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_arrived()
        self._clients.heard(self)
        super().connection_lost(exc)

    def request_begins(self) -> None:
        """A request's head is complete."""
        self._busy = True
        self._head_arrived()
        self._clients.heard(self)

    def request_ends(self) -> None:
        """The next bytes begin another head."""
        self._busy = False

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp itself refuses, malformed HTTP above all: nothing of it reached a handler of ours."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun, it cannot become an error")
        error = ProxyError(status, status, f"cannot parse the request: {(message or 'malformed').splitlines()[0]}")
        log.info("status=%d detail=%r", status, error.message)
        response = web.Response(status=status, body=error_body(error, Dialect.OPENAI), content_type="application/json")
        response.force_close()
        return response

    def _expect_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self._head_timeout, self.force_close)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpClient:
    """See ``proxy.exchange.Client``."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._close_after = False
        self._over = False

    @property
    def started(self) -> bool:
        """Whether a status was sent."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """What aiohttp wants back from a handler."""
        assert self._response is not None
        return self._response

    async def start(self, status: int, reason: str, headers: Headers) -> None:
        """Send the head; at once if more is to come later, with the first bytes of the body if its length is known."""
        self._response = response = web.StreamResponse(status=status, reason=reason, headers=CIMultiDict(headers))
        if self._close_after:
            response.force_close()
        try:
            await response.prepare(self._request)
            if "content-length" not in response.headers and self._request.method != "HEAD":
                await response.write(b"")
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, data: bytes) -> None:
        """Send bytes of the body, waiting while more than aiohttp's 64 kB are unsent."""
        if self._request.method == "HEAD" or not data:
            return
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> None:
        """The response is whole."""
        if self._over:
            return
        self._over = True
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    def close_after(self) -> None:
        """Close the connection when the response has ended."""
        self._close_after = True
        if self._response is not None:
            self._response.force_close()

    def cut(self) -> None:
        """Close the connection in the middle of the response; where only its close would end it, reset it."""
        self._over = True
        transport = self._request.transport
        if transport is None:
            return
        if self._response is not None and not self._response.chunked and self._response.content_length is None:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


async def receive_body(request: web.BaseRequest, spec: ProxySpec, spool_after: int | None) -> tuple[Body, bool]:
    """The request's body, decoded, and whether it was compressed; raises ``ProxyError`` or ``ClientGone``."""
    decoder = decoder_for(",".join(request.headers.getall("Content-Encoding", ())))
    if request.content_length is not None and request.content_length > spec.max_body:
        raise too_large(spec.max_body)
    _answer_expectation(request)
    body = Body(spec.max_body, spool_after)
    try:
        async for data in _received(request):
            for piece in decoder.feed(data) if decoder else (data,):
                body.append(piece)
        if decoder:
            decoder.finish()
    except BaseException:
        body.close()
        raise
    return body, decoder is not None


async def _received(request: web.BaseRequest) -> AsyncIterator[bytes]:
    try:
        while data := await request.content.readany():
            yield data
    except ConnectionError as error:
        raise ClientGone from error
    except (RequestPayloadError, HttpProcessingError) as error:
        raise bad_request(f"cannot read the request body: {error}") from error


def _answer_expectation(request: web.BaseRequest) -> None:
    """100-continue is between the client and us; the engine never sees it (RFC 9110 10.1.1)."""
    expectation = request.headers.get("Expect", "").strip().lower()
    if not expectation or request.version < (1, 1):
        return
    if expectation != "100-continue":
        raise ProxyError(417, "expectation_failed", f"cannot meet the expectation {expectation[:60]!r}")
    if request.transport is not None and not request.content.is_eof():
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
