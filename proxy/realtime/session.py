"""A realtime session between its two ends: who may speak, whether anybody does, and how it is closed.

The client's events are held until an engine is there to have them; from then on bytes cross both ways as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from proxy.errors import ProxyError
from proxy.exchange import Client, ClientGone, Outcome, Request, Source, UpstreamBroken
from proxy.realtime import websocket
from proxy.realtime.early import Early, Respell
from proxy.realtime.events import close_code_of, error_event
from proxy.realtime.websocket import Frames, Message, WebSocketError, close_code, close_frame, frame, text_frame
from proxy.reply import Reply

#: Seconds of a client's silence after which it is pinged; after as much again it is taken for gone.
PING_AFTER = 20.0
#: Seconds from a Close that one end has sent to the end of the session, whatever the other end does.
CLOSE_PATIENCE = 5.0


class EngineRefused(Exception):
    """An engine answered our handshake with an HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status


class Engine(Protocol):
    """The engine's end, once it has greeted."""

    def attach(
        self, consume: Callable[[bytes], None], source: Source, lost: Callable[[BaseException | None], None]
    ) -> None:
        """What comes goes to ``consume``; ``source`` is held while the engine does not read; ``lost``: its end.

        What came with its greeting comes at once; it is held from then on, until it is released.
        """
        ...

    def write(self, data: bytes) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...

    def cut(self) -> None:
        """Close at once."""
        ...


class _Over(Exception):
    """Both ends know that the session is over."""


class Session:
    """``idle_timeout``: seconds without an event after which the session is closed; None: never."""

    def __init__(self, request: Request, reply: Reply, outcome: Outcome, *, idle_timeout: float | None) -> None:
        self._request, self._reply, self._outcome = request, reply, outcome
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._client: Client | None = None
        self._source: Source | None = None
        self._engine: Engine | None = None
        self._early = Early(self._control)
        self._first: asyncio.Future[None] | None = None
        # What went to the engine, and what went to the client.
        self._came, self._sent = Frames(), Frames()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._interruption: Exception | None = None
        self._done = False
        #: Whether the client waits for a model, which is no idleness of its own.
        self.waiting = False
        self._reading = True
        self._heard = self._active = self._loop.time()
        self._pinged = 0.0
        self._events = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

    # its life, as the handler sees it

    async def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, unless the session ends before; raises ``ClientGone``, ``ProxyError`` and what ``work`` raises.

        Whatever ends it, the client's end is closed afterwards, or left to ``fail``.
        """
        try:
            await self._carry(work)
            self._say_goodbye()
        except WebSocketError as error:
            self._outcome.code = "websocket_error"
            self._outcome.details.append(str(error))
            self.close(error.code, str(error))
        except (ClientGone, asyncio.CancelledError):
            if self.opened:
                self._outcome.close = websocket.ABNORMAL
            raise
        finally:
            self._done = True
            for timer in (self._timer, self._closing):
                if timer is not None:
                    timer.cancel()

    @property
    def opened(self) -> bool:
        """Whether the client was answered 101."""
        return self._client is not None

    def open(self, lines: bytes, *, read_first: bool = False) -> None:
        """Answer 101 with ``lines``. ``read_first``: the first event will be asked for."""
        if not read_first:
            self._early.not_asked_for()
        client = self._client = self._reply.switch(lines, self)
        self._heard = self._active = self._loop.time()
        self._tick()
        self._source = self._request.take_over(self._from_client)
        client.connect(self)  # who does not read its pongs sends no more pings
        self._hold_if_full()

    def say(self, event: dict[str, object]) -> None:
        """An event of ours."""
        self._send(text_frame(event))

    async def first_event(self) -> bytes:
        """What the client says first; raises ``WebSocketError``."""
        while (message := self._early.first) is None:
            self._first = self._loop.create_future()
            self.release()
            await self._first
            self._first = None
            self._hold_if_full()
        if message.opcode != websocket.TEXT:
            raise WebSocketError("events are texts", websocket.UNSUPPORTED_DATA)
        return message.payload

    async def run(self, engine: Engine, greeting: bytes, respell: Respell | None) -> None:
        """Let both ends talk until one has ended; raises ``UpstreamBroken``. ``greeting``: bytes for the client."""
        assert self._client is not None
        self._active = self._loop.time()
        self._engine = engine
        if greeting:
            self._send(greeting)
        for data in self._early.hand_over(respell):
            self._to_engine(data)
        self.release()
        self._client.connect(engine)
        try:
            engine.attach(self._from_engine, self, self._engine_lost)
            if not self._client.full:  # of pongs, which it does not read; it is told when that has changed
                engine.release()
            await self._ended
        finally:
            self._client.connect(None)
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # looked at, also where something else ended it at the same time

    def fail(self, error: ProxyError) -> None:
        """Tell the client what went wrong, and close."""
        if self._sent.between_messages:
            self.say(error_event(error))
        self.close(close_code_of(error), error.message)

    def close(self, code: int, reason: str = "") -> None:
        """Close the client's end, unless it is. Within a frame only a cut is left."""
        if self._sent.close is not None:
            return
        if self._sent.between_frames:
            self._send(close_frame(code, reason))
            self._outcome.close = code
        elif self._client is not None:
            self._client.cut()
            self._outcome.close = websocket.ABNORMAL

    # the client's reading, as the engine holds it

    def hold(self) -> None:
        """Read no more from the client."""
        self._reading = False
        if self._source is not None:
            self._source.hold()

    def release(self) -> None:
        """Read on."""
        if not self._reading:
            self._reading, self._heard = True, self._loop.time()
        if self._source is not None:
            self._source.release()

    # bytes

    def _from_client(self, data: bytes) -> None:
        if self._done:
            return
        self._heard = self._loop.time()
        self._outcome.bytes_received += len(data)
        if self._engine is None:
            self._hold_early(data)
        elif self._early.over:
            self._to_engine(data)
        else:
            for piece in self._early.pass_on(data):
                self._to_engine(piece)

    def _hold_early(self, data: bytes) -> None:
        try:
            self._early.hold(data)
        except WebSocketError as error:
            self._interrupt(error)
        if self._early.first is not None and self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._hold_if_full()

    def _control(self, message: Message) -> None:
        """A control frame while no engine is there."""
        if message.opcode == websocket.PING:
            self._send(frame(websocket.PONG, message.payload))
        elif message.opcode == websocket.CLOSE:
            self._came.close = close_code(message.payload)
            self._interrupt(_Over())

    def _hold_if_full(self) -> None:
        """Who sends so much early is not read, nor its leaving seen, until an engine is there."""
        expected = self._first is not None and not self._first.done()
        if self._engine is None and not expected and self._early.full:
            self.hold()

    def _to_engine(self, data: bytes) -> None:
        assert self._engine is not None
        self._came.feed(data)
        self._engine.write(data)
        self._look_for_close()

    def _from_engine(self, data: bytes) -> None:
        self._send(data)
        self._look_for_close()

    def _send(self, data: bytes) -> None:
        assert self._client is not None
        self._sent.feed(data)
        self._outcome.bytes_sent += len(data)
        self._client.send_framed(data)

    # the end

    async def _carry(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            if self._request.gone and self._came.close is not None:
                return  # it said so before it left
            if self._request.gone or self._interruption is None:
                raise
            assert self._task is not None
            self._task.uncancel()
            if not isinstance(self._interruption, _Over):
                raise self._interruption from None

    def _interrupt(self, reason: Exception) -> None:
        """End the session, wherever its handler is: as a timeout does it, by a cancellation that ``_carry`` knows."""
        if self._interruption is None and not self._done and self._task is not None:
            self._interruption = reason
            self._task.cancel()

    def _look_for_close(self) -> None:
        came, sent = self._came.close, self._sent.close
        if came is None and sent is None:
            return
        if came is not None and sent is not None:
            self._finish()
        elif self._closing is None:
            self._closing = self._loop.call_later(CLOSE_PATIENCE, self._finish)

    def _engine_lost(self, exc: BaseException | None) -> None:
        if self._came.close is not None or self._sent.close is not None:
            self._finish()
        elif not self._ended.done():
            self._ended.set_exception(UpstreamBroken(f"the session broke: {exc or 'the engine closed the connection'}"))

    def _finish(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _say_goodbye(self) -> None:
        if not self.opened:
            return
        self._outcome.close = self._sent.close if self._came.close is None else self._came.close
        if not self._request.gone:
            self.close(websocket.NORMAL if self._came.close is None else self._came.close)

    # who is there

    def _tick(self) -> None:
        now, idle = self._loop.time(), self._idle_timeout
        events = self._early.count + self._came.messages + self._sent.messages
        if events != self._events or self.waiting:
            self._events, self._active = events, now
        if idle is not None and now - self._active >= idle:
            self._interrupt(ProxyError(408, "realtime_idle", f"the session has had no event for {idle:g} s"))
            return
        if self._pinged > self._heard:
            if now - self._pinged >= PING_AFTER and self._reading:
                self._interrupt(ClientGone())
                return
        elif now - self._heard >= PING_AFTER and self._sent.between_frames:
            self._pinged = now
            self._send(frame(websocket.PING, b""))
        self._timer = self._loop.call_later(PING_AFTER if idle is None else min(PING_AFTER, idle / 4), self._tick)
