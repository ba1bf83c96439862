"""What a client says in a session before it can be passed on as it is: held, looked at, handed over in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from proxy.realtime import websocket
from proxy.realtime.websocket import Message, MessageReader, WebSocketError, frame

#: Bytes of an event that must be read before an engine is there. One of vLLM's that names a model has 50.
MOST_FIRST = 1024 * 1024
#: Bytes of events that are held until an engine is there; then the client is not read any more.
MOST_EARLY = 256 * 1024
#: vLLM takes no longer message (uvicorn's limit).
MOST_MESSAGE = 16 * 1024 * 1024

#: Gives an event that names a model the name that the engine knows, None for one that names none.
Respell = Callable[[bytes], bytes | None]


class Early:
    """``on_control`` has the control frames that come while no engine is there to answer them."""

    def __init__(self, on_control: Callable[[Message], None]) -> None:
        self._on_control = on_control
        self._reader = MessageReader(MOST_FIRST, masks=True)
        self._held: deque[Message] = deque()
        self._held_size = 0
        self._respell: Respell | None = None
        #: Events so far.
        self.count = 0

    def not_asked_for(self) -> None:
        """Nobody must understand the first event, so it may be as long as any."""
        self._reader.limit = MOST_MESSAGE

    @property
    def first(self) -> Message | None:
        """The first event, once it has come."""
        return self._held[0] if self._held else None

    @property
    def full(self) -> bool:
        """Whether no more should come."""
        return self._held_size + self._reader.held > MOST_EARLY

    def hold(self, data: bytes) -> None:
        """Bytes that came while no engine is there; raises ``WebSocketError``."""
        self._reader.feed(data)
        while (message := self._reader.next()) is not None:
            if message.opcode >= websocket.CLOSE:
                self._on_control(message)
                continue
            self.count += 1
            self._reader.limit = MOST_MESSAGE  # that was the first
            self._held.append(message)
            self._held_size += len(message.raw) + len(message.payload)

    def hand_over(self, respell: Respell | None) -> Iterator[bytes]:
        """An engine is there: what was held for it. ``respell``: what it is to be told of the model, if anything."""
        self._respell = respell
        while self._held:
            yield self._spelled(self._held.popleft())
        yield from self.pass_on(b"")

    @property
    def over(self) -> bool:
        """Whether all has been handed over, and nothing that follows needs to be looked at."""
        return self._respell is None

    def pass_on(self, data: bytes) -> Iterator[bytes]:
        """Bytes that came since, unless it is ``over``: as far as they can go on already."""
        self._reader.feed(data)
        try:
            while self._respell is not None and (message := self._reader.next()) is not None:
                yield self._spelled(message)
        except WebSocketError:
            self._respell = None  # the engine is there, and judges
        if self._reader.held > MOST_FIRST:
            self._respell = None  # no event that names a model is so long
        if self._respell is None and self._reader.held:
            yield self._reader.rest()

    def _spelled(self, message: Message) -> bytes:
        if self._respell is None or message.opcode != websocket.TEXT:
            return message.raw
        spelled = self._respell(message.payload)
        if spelled is None:
            return message.raw
        self._respell = None
        return message.raw if spelled == message.payload else frame(websocket.TEXT, spelled, mask=True)
