"""The engine's end of a realtime session: our handshake with it, its greeting, and then its bytes as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from proxy.exchange import ConnectFailed, Source
from proxy.http.headers import HeadError
from proxy.http.heads import MAX_HEAD, parse_response
from proxy.realtime.session import EngineRefused
from proxy.realtime.upgrade import check_answer
from proxy.realtime.websocket import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    Message,
    MessageReader,
    WebSocketError,
    close_code,
    frame,
)

#: Seconds from our handshake to the engine's greeting. It does nothing for either but answer: no model is asked.
PATIENCE = 30.0
#: Bytes of an engine's first message; vLLM's has 80.
MOST_GREETING = 64 * 1024


class EngineSocket(asyncio.Protocol):
    """A connection to an engine; see ``proxy.realtime.session.Engine``."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._closed = False
        self._reading = True
        self._feed: Callable[[bytes], None] = self._to_head
        self._head = b""
        self._key = ""
        self._messages = MessageReader(MOST_GREETING, masks=False)
        self._greeting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._on_lost: Callable[[BaseException | None], None] = self._lost_early
        #: Who must stop while the engine does not read.
        self._source: Source | None = None
        self._write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    async def open(self, request: bytes, key: str) -> Message:
        """Shake hands; returns the engine's first message. Raises ``ConnectFailed`` or ``EngineRefused``."""
        self._key = key
        self.transport.write(request)
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._greeting
        except TimeoutError:
            raise ConnectFailed(f"no session within {PATIENCE:g} s") from None

    def attach(
        self, consume: Callable[[bytes], None], source: Source, lost: Callable[[BaseException | None], None]
    ) -> None:
        """See ``proxy.realtime.session.Engine``."""
        self._feed, self._on_lost, self._source = consume, lost, source
        if rest := self._messages.rest():
            consume(rest)
        if self._closed:
            lost(None)
        elif self._write_paused:
            source.hold()

    def write(self, data: bytes) -> None:
        """Send bytes as they are; to nobody, where the engine is gone and the session has not heard of it yet."""
        if not self._closed:
            self.transport.write(data)

    def hold(self) -> None:
        """Stop reading."""
        if self._reading and not self._closed:
            self._reading = False
            self.transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if not self._reading and not self._closed:
            self._reading = True
            self.transport.resume_reading()

    def cut(self) -> None:
        """Close at once, and drop what was not sent yet: an engine that hangs would never read it."""
        self._feed, self._on_lost, self._source = _ignore, _no_matter, None
        if self._greeting.done() and not self._greeting.cancelled():
            self._greeting.exception()
        self.transport.abort()

    # what the transport says

    def data_received(self, data: bytes) -> None:
        self._feed(data)

    def eof_received(self) -> None:
        self.transport.abort()  # closing would wait until it has read what it need not read any more

    def connection_lost(self, exc: BaseException | None) -> None:
        self._closed = True
        self._on_lost(exc)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._source is not None:
            self._source.hold()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._source is not None:
            self._source.release()

    # until the greeting

    def _to_head(self, data: bytes) -> None:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD:
                self._fail(ConnectFailed("the head of its answer does not end"))
            return
        try:
            head = parse_response(self._head[: end + 4], upgrades=True)
            if head.status == 101:
                check_answer(head, self._key)
        except HeadError as error:
            self._fail(ConnectFailed(f"cannot understand its answer to the handshake: {error}"))
            return
        if head.status != 101:
            self._fail(EngineRefused(head.status, head.reason))
            return
        self._feed = self._to_messages
        self._to_messages(self._head[end + 4 :])

    def _to_messages(self, data: bytes) -> None:
        self._messages.feed(data)
        try:
            while not self._greeting.done() and (message := self._messages.next()) is not None:
                if message.opcode in (TEXT, BINARY):
                    self._greeting.set_result(message)
                elif message.opcode == PING:
                    self.write(frame(PONG, message.payload, mask=True))
                elif message.opcode == CLOSE:
                    self._fail(ConnectFailed(f"it closed the session at once ({close_code(message.payload)})"))
        except WebSocketError as error:
            self._fail(ConnectFailed(f"cannot understand its first message: {error}"))
        if self._greeting.done():
            self.hold()

    def _lost_early(self, exc: BaseException | None) -> None:
        if not self._greeting.done():
            self._fail(ConnectFailed(f"it closed the connection without a session: {exc or 'the engine closed it'}"))

    def _fail(self, error: Exception) -> None:
        if not self._greeting.done():
            self._greeting.set_exception(error)
        self._feed = _ignore


def _ignore(data: bytes) -> None:
    """For bytes that nobody wants."""


def _no_matter(exc: BaseException | None) -> None:
    """For an end that is known already."""
