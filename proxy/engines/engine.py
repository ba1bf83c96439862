"""One connection to an engine: a request out, its answer in, and its bytes straight into the client's transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from proxy.exchange import Client, NoFirstByte, UpstreamBroken
from proxy.http.chunks import ChunkError, Chunks
from proxy.http.headers import HeadError, ResponseHead
from proxy.http.heads import MAX_HEAD, parse_response
from proxy.reading.aborted import event_aborted

_ABORTED = "the engine aborted the request"
#: Bytes of a piece that are looked at again with the next one, where an event is cut in two.
_LONGEST_BEGINNING = 256
#: Bytes of an answer that are kept while nobody takes them.
READ_AHEAD = 64 * 1024


class StaleConnection(Exception):
    """The connection ended before a byte of the answer."""


class EngineConnection(asyncio.Protocol):
    """A connection, which carries one conversation at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        #: Whether it is of no more use.
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self._talk: Conversation | None = None
        self._reading = True
        # One timer for all conversations, which may be early for the one under way, but is never late.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    def send(self, head: bytes, body: Iterable[bytes | memoryview], patience: float) -> Conversation:
        """Begin a conversation. ``patience``: seconds until the head of the answer."""
        talk = self._talk = Conversation(self, head, body, patience)
        self._due = due = self.loop.time() + patience
        if self._timer is None or self._timer_at > due:
            self._set_timer()
        talk.push()
        return talk

    def data_received(self, data: bytes) -> None:
        talk = self._talk
        if talk is None:
            self.cut()  # an engine that speaks first: a goodbye, or nonsense
            return
        try:
            talk.feed(data)
        except (HeadError, ChunkError) as error:
            talk.misunderstood(error)

    def eof_received(self) -> None:
        # It has no more to say. Closing would wait until it has read the rest of a request that it need not read.
        self.closed = True
        self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._talk is not None:
            self._talk.lost(exc)

    def pause_writing(self) -> None:
        if self._talk is not None:
            self._talk.paused = True

    def resume_writing(self) -> None:
        if self._talk is not None:
            self._talk.paused = False
            self._talk.push()

    def hold(self) -> None:
        """Stop reading; one that is free is read, or whoever has it next would wait for a client that is not theirs."""
        if self._reading and self._talk is not None and not self.closed:
            self._reading = False
            self.transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if not self._reading and not self.closed:
            self._reading = True
            self.transport.resume_reading()

    def ends(self) -> None:
        """The conversation is over; the connection is free."""
        self._talk = None
        self.release()

    def cut(self) -> None:
        """Close at once, and drop what was not sent yet: an engine that hangs would never read it."""
        self.closed = True
        if self._talk is not None:
            self._talk.stop()
        self.transport.abort()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self.loop.call_at(self._due, self._tick), self._due

    def _tick(self) -> None:
        self._timer = None
        if self._talk is None or self._talk.head is not None:
            return
        if self.loop.time() < self._due:
            self._set_timer()
        else:
            self._talk.too_late()


class Conversation:
    """A request and its answer."""

    __slots__ = (
        "_backlog",
        "_begun",
        "_chunks",
        "_client",
        "_ended",
        "_error",
        "_events",
        "_gathered",
        "_left",
        "_limit",
        "_out",
        "_patience",
        "_pieces",
        "_size",
        "_tail",
        "_waiter",
        "_within",
        "connection",
        "done",
        "feed",
        "head",
        "paused",
        "recent",
        "sent",
    )

    def __init__(
        self, connection: EngineConnection, head: bytes, body: Iterable[bytes | memoryview], patience: float
    ) -> None:
        self.connection = connection
        #: The head of the answer, once it has come.
        self.head: ResponseHead | None = None
        #: Whether the request is written, and whether the answer is whole.
        self.sent = self.done = False
        self.paused = False
        self._out = head
        self._pieces: Iterator[bytes | memoryview] | None = iter(body)
        self._patience = patience
        #: Takes bytes from the engine; raises ``HeadError`` or ``ChunkError`` where they make no sense.
        self.feed: Callable[[bytes], None] = self._to_head
        self._begun = self._ended = self._events = False
        #: Whether what came last of a stream of events ended within a line.
        self._within = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: What came and is not understood yet.
        self._backlog = b""
        # The framing of the body: chunks, or bytes that are left, or neither.
        self._chunks: Chunks | None = None
        self._left: int | None = None
        self._size, self._tail = 0, b""
        #: The last pieces that came while the body was poured: at its end, what the engine says of the usage.
        self.recent = (b"", b"", b"")
        # Who takes the body.
        self._client: Client | None = None
        self._gathered, self._limit = bytearray(), 0

    @property
    def over(self) -> bool:
        """Whether request and answer are whole and the connection can be used again."""
        return self.done and self.sent and self.head is not None and self.head.keep_alive

    @property
    def size(self) -> int:
        """Bytes of the body so far."""
        return self._chunks.size if self._chunks is not None else self._size

    @property
    def beginning(self) -> bytes:
        """What came and nobody has taken yet: of a body, until it is read or poured."""
        return self._backlog

    @property
    def tail(self) -> bytes:
        """The last four of them."""
        return self._chunks.tail if self._chunks is not None else self._tail

    def push(self) -> None:
        """Write as much of the request as the transport takes."""
        if self._pieces is None:
            return
        transport = self.connection.transport
        for piece in self._pieces:
            if self._out:
                transport.writelines((self._out, piece))
                self._out = b""
            else:
                transport.write(piece)
            if self.paused:
                return
        if self._out:  # all of the request is in one piece
            transport.write(self._out)
        self._pieces = None
        self.sent = True

    async def head_comes(self) -> ResponseHead:
        """Wait for the answer's head; raises ``StaleConnection``, ``NoFirstByte`` or ``UpstreamBroken``."""
        while self.head is None:
            if self._error is None:  # as ``_wait``; every request comes by here
                self._waiter = self.connection.loop.create_future()
                await self._waiter
            if self._error is not None:
                raise self._error
        return self.head

    async def begins(self) -> None:
        """Wait for the first byte of the body, or its end; raises ``UpstreamBroken``."""
        while not self._backlog and not self.done:
            if self._ended:
                self._at_end()
            else:
                await self._wait()
            if self._error is not None:
                raise self._error

    def at_hand(self) -> bytes | None:
        """The whole body, if it is here already and was told how long it is; then nobody else can take it."""
        if self._left is None or len(self._backlog) != self._left or self._ended or self.done:
            return None
        whole, self._backlog = self._backlog, b""
        self._finish(b"")
        return whole

    async def read(self, limit: int) -> bytes:
        """The body, or its first bytes once they are ``limit``; raises ``UpstreamBroken``."""
        self._limit = limit
        self._attach(self._to_gathered)
        while not self.done and len(self._gathered) < limit:
            await self._wait()
        return bytes(self._gathered)

    async def pour(self, client: Client) -> None:
        """Pass the body on as it comes; raises ``UpstreamBroken``."""
        self._client = client
        framed = client.chunked and self._chunks is not None
        try:
            self._attach(self._to_client_framed if framed else self._to_client)
            client.connect(self.connection)
            while not self.done:
                await self._wait()
        finally:
            client.connect(None)
            self.feed = _ignore
            if framed and self._chunks is not None and (size := self._chunks.open_bytes) is not None:
                client.left_open(size)

    def misunderstood(self, error: Exception) -> None:
        """What came from the engine makes no sense."""
        self._fail(UpstreamBroken(f"cannot understand the engine's answer: {error}"))

    def lost(self, exc: BaseException | None) -> None:
        """The connection has ended."""
        if self.done or self._error is not None:
            return
        self._ended = True
        if self.head is None:
            if self._begun:
                self._fail(UpstreamBroken("the connection broke within the head of the answer"))
            else:
                self._fail(StaleConnection())
        elif exc is not None:
            self._fail(UpstreamBroken(f"the connection broke within the answer: {exc or type(exc).__name__}"))
        elif self.feed != self._to_backlog:
            self._at_end()
        else:
            self._wake()

    def stop(self) -> None:
        """Nobody wants the rest."""
        self._pieces = None
        self.feed = _ignore

    # where the bytes go, in the order in which they come

    def _to_head(self, data: bytes) -> None:
        self._begun = True
        data = self._backlog + data if self._backlog else data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head = parse_response(data[: end + 4])
            data = data[end + 4 :]
            if head.status < 200:  # RFC 9110 15.2: an interim answer; ours to drop, for we asked for none
                continue
            self.head, self._backlog = head, b""
            self._events = head.is_event_stream
            if head.chunked:
                self._chunks = Chunks()
            self._left = head.length
            if head.length == 0:
                self._finish(data)
            else:
                self.feed = self._to_backlog
                self._to_backlog(data)
            return
        if len(data) > MAX_HEAD or (b"\n" in data and data.count(b"\n") != data.count(b"\r\n")):
            raise HeadError("its head does not end")
        self._backlog = data

    def _to_backlog(self, data: bytes) -> None:
        self._backlog = backlog = self._backlog + data if self._backlog else data
        if len(backlog) > READ_AHEAD:
            self.connection.hold()
        self._wake()

    def _to_gathered(self, data: bytes) -> None:
        for piece in self._payload(data):
            self._gathered += piece
        if len(self._gathered) >= self._limit and not self.done:
            self.connection.hold()
            self._wake()

    def _to_client_framed(self, data: bytes) -> None:
        chunks, client = self._chunks, self._client
        assert chunks is not None
        assert client is not None
        if self._events and self._is_aborted(data):
            self._fail(UpstreamBroken(_ABORTED))
            return
        self.recent = (self.recent[1], self.recent[2], data)
        framed = chunks.pass_on(data)
        if framed:
            client.send_framed(framed)
        if framed is not data and chunks.done:  # whole chunks alone are not the end
            self._finish(chunks.excess)

    def _to_client(self, data: bytes) -> None:
        assert self._client is not None
        if self._events and self._is_aborted(data):
            self._fail(UpstreamBroken(_ABORTED))
            return
        self.recent = (self.recent[1], self.recent[2], data)
        for piece in self._payload(data):
            self._client.send(piece)

    def _is_aborted(self, data: bytes) -> bool:
        """``data``, not passed on yet, holds the event with which an engine gives a stream up: that is no end of it."""
        within, self._within = self._within, not data.endswith(b"\n")
        if within:  # the event came in two pieces
            data = self.recent[2][-_LONGEST_BEGINNING:] + data
        return event_aborted(data)

    def _payload(self, data: bytes) -> list[bytes]:
        """The bytes of the body in ``data``, and what that means."""
        if self._chunks is not None:
            pieces = self._chunks.take_out(data)
            if self._chunks.done:
                self._finish(self._chunks.excess)
            return pieces
        if self._left is not None:
            data, rest = (data, b"") if len(data) <= self._left else (data[: self._left], data[self._left :])
            self._left -= len(data)
            if not self._left:
                self._finish(rest)
        self._size += len(data)
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        return [data] if data else []

    # how it ends

    def _attach(self, feed: Callable[[bytes], None]) -> None:
        if self.done:
            return
        self.feed = feed
        data, self._backlog = self._backlog, b""
        if data:
            try:
                feed(data)
            except ChunkError as error:
                self.misunderstood(error)
        if self._ended:
            self._at_end()
        self.connection.release()

    def _at_end(self) -> None:
        """All that the engine sent is understood."""
        if self.done or self._error is not None:
            return
        if self._chunks is None and self._left is None:
            self._finish(b"")  # RFC 9112 6.3: the end of the connection is the end of the body
        else:
            self._fail(UpstreamBroken("the connection broke within the answer: the engine closed it"))

    def _finish(self, excess: bytes) -> None:
        self.done = True
        self.feed = _ignore
        if excess or not self.over:
            self.connection.closed = True  # it says more than was asked, or before it was: not to be used again
        else:
            self.connection.ends()
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.feed = _ignore
        self._wake()

    def too_late(self) -> None:
        """The head of the answer has not come in time."""
        self._fail(NoFirstByte(f"no response byte within {self._patience:g} s"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Wait for the next event; raises what went wrong."""
        if self._error is None:
            self._waiter = self.connection.loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error


def _ignore(data: bytes) -> None:
    """For bytes that nobody wants."""
