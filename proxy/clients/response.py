"""Writing one response: its head, its framing, its end, straight into the connection's transport."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from proxy.exchange import ClientGone, Source
from proxy.http.headers import RequestHead, ResponseHead

#: A stream that breaks within a chunk is told so inside that chunk, which must be filled: more than this is cut.
_MOST_PADDING = 64 * 1024


class Connection(Protocol):
    """What a response needs of its connection."""

    gone: bool
    write_paused: bool

    @property
    def transport(self) -> Transport: ...
    async def drained(self) -> None: ...
    def connect(self, source: Source | None) -> None: ...
    def date(self) -> bytes: ...


class Transport(Protocol):
    """The part of ``asyncio.Transport`` that is used."""

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def get_extra_info(self, name: str) -> Any: ...


class HttpClient:
    """See ``proxy.exchange.Client``."""

    __slots__ = (
        "_bodiless",
        "_connection",
        "_http11",
        "_length",
        "_open",
        "_pending",
        "chunked",
        "closes",
        "over",
        "send_framed",
        "started",
    )

    def __init__(self, connection: Connection, request: RequestHead) -> None:
        self._connection = connection
        self._http11 = request.http11
        self._bodiless = request.method == "HEAD"
        self._length: int | None = None
        self._pending = b""
        self._open: int | None = None
        self.started = self.chunked = self.over = False
        #: Whether the connection ends with this response.
        self.closes = not request.keep_alive
        self.send_framed: Callable[[bytes], None] = connection.transport.write

    async def start(self, head: ResponseHead, lines: bytes, *, at_once: bool) -> None:
        """Send the head; ``at_once`` false: with the first bytes of the body, or with the end."""
        self._begin(head, lines)
        if at_once:
            self._flush()
            if self._connection.write_paused:
                await self.drained()

    def whole(self, head: ResponseHead, lines: bytes, body: bytes) -> int:
        """Send the whole response, whose length its head tells; returns how many bytes of the body: none to a HEAD."""
        self._begin(head, lines)
        sent = 0 if self._bodiless else len(body)
        if sent:
            self._pending += body
        self.over = True
        self._flush()
        return sent

    def _begin(self, head: ResponseHead, lines: bytes) -> None:
        """The head, to be sent with what follows."""
        if self._connection.gone:
            raise ClientGone
        self.started = True
        if head.status in (204, 304):
            self._bodiless, framing = True, b""
        elif head.length is not None:
            self._length, framing = head.length, b"Content-Length: %d\r\n" % head.length
        elif self._bodiless:
            framing = b""
        elif self._http11:
            self.chunked, framing = True, b"Transfer-Encoding: chunked\r\n"
        else:
            self.closes, framing = True, b""
        if self.closes:
            framing += b"Connection: close\r\n"
        elif not self._http11:
            framing += b"Connection: keep-alive\r\n"
        if not head.has_date:
            framing += self._connection.date()
        line = _status_line(head.status, head.reason, http11=self._http11)
        self._pending = b"%b%b%b\r\n" % (line, lines, framing)

    def switch(self, lines: bytes) -> None:
        """Answer 101: what is sent from now on is another protocol, and its end that of the connection."""
        if self._connection.gone:
            raise ClientGone
        self.started = self.closes = self.over = True
        head = b"HTTP/1.1 101 Switching Protocols\r\n%b%b\r\n" % (lines, self._connection.date())
        self._connection.transport.write(head)

    def send(self, data: bytes) -> None:
        """Send bytes of the body without waiting."""
        if self._bodiless or not data:
            return
        if self.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending:
            data = self._pending + data
            self._pending = b""
        self.send_framed(data)

    async def write(self, data: bytes) -> None:
        """Send bytes of the body, waiting while the client does not read."""
        if self._connection.gone:
            raise ClientGone
        if self._open is not None:
            data = self._fill(data)
        self.send(data)
        if self._connection.write_paused:
            await self.drained()

    def end(self) -> None:
        """The response is whole."""
        if self.over:
            return
        self.over = True
        if self.chunked and not self._bodiless:
            self._pending += b"0\r\n\r\n"
        self._flush()

    @property
    def full(self) -> bool:
        """Whether the client does not read what it was sent."""
        return self._connection.write_paused

    def connect(self, source: Source | None) -> None:
        """Tell ``source`` from now on when the client reads and when not."""
        self._connection.connect(source)

    def left_open(self, size: int) -> None:
        """What was sent last is a chunk that lacks ``size`` bytes and its line break."""
        self._open = size

    def close_after(self) -> None:
        """Close the connection when the response has ended."""
        self.closes = True

    def cut(self) -> None:
        """Close the connection in the middle of the response; where only its close would end it, reset it."""
        self.over = False
        transport = self._connection.transport
        if self.started and not self.chunked and self._length is None and not self._bodiless:
            sock = transport.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):  # it may be closed already
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    def _fill(self, data: bytes) -> bytes:
        """Fill the open chunk with ``data`` and line breaks, which mean nothing between events; returns the rest."""
        missing, self._open = self._open or 0, None
        padding = missing - len(data)
        if padding > _MOST_PADDING:
            self.cut()
            raise ClientGone
        self.send_framed(data[:missing] + b"\n" * padding + b"\r\n")
        return data[missing:]

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        await self._connection.drained()
        if self._connection.gone:
            raise ClientGone

    def _flush(self) -> None:
        if self._pending:
            self.send_framed(self._pending)
            self._pending = b""


@lru_cache(256)
def _status_line(status: int, reason: str, *, http11: bool) -> bytes:
    return b"HTTP/1.%d %d %b\r\n" % (http11, status, reason.encode("latin-1"))
