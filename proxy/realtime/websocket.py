"""WebSocket (RFC 6455), as much of it as a relay needs: heads of frames, whole messages, and frames of our own. No I/O.

Frames cross the proxy as they came, masks included, so most of a session is only followed (``Frames``), never taken
apart; what must be understood is read whole first (``MessageReader``).
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from os import urandom

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
#: The longest payload of a control frame (RFC 6455 5.5), bytes.
MOST_CONTROL = 125

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_OPCODES = frozenset({CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG})
_DATA = frozenset({CONTINUATION, TEXT, BINARY})

#: By the second byte of a head: the bytes of the whole frame; 0 where it is too long to be told there.
_SHORT = [0 if second & 0x7F > MOST_CONTROL else 2 + (second & 0x7F) + (second >> 7) * 4 for second in range(256)]

# Close codes (RFC 6455 7.4.1, and IANA's registry for 1012 and 1013).
NORMAL, GOING_AWAY, PROTOCOL_ERROR, UNSUPPORTED_DATA = 1000, 1001, 1002, 1003
POLICY_VIOLATION, TOO_BIG, INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1008, 1009, 1011, 1012, 1013
#: Never sent, only told: a close without a code, and an end without a close.
NO_CODE, ABNORMAL = 1005, 1006


class WebSocketError(Exception):
    """The peer breaks the protocol. ``code``: what its connection is closed with."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def new_key() -> str:
    """A Sec-WebSocket-Key."""
    return base64.b64encode(urandom(16)).decode()


def accept_of(key: str) -> str:
    """The Sec-WebSocket-Accept that answers a key."""
    digest = hashlib.sha1(key.encode("latin-1") + _GUID, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def frame(opcode: int, payload: bytes, *, mask: bool = False) -> bytes:
    """One whole frame; a client's are masked."""
    size = len(payload)
    if size <= MOST_CONTROL:
        head = bytes((0x80 | opcode, size | mask << 7))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 126 | mask << 7)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 127 | mask << 7)) + size.to_bytes(8, "big")
    if not mask:
        return head + payload
    key = urandom(4)
    return head + key + masked(payload, key)


def close_frame(code: int, reason: str = "") -> bytes:
    """A Close of ours, its reason cut to what fits; ``NO_CODE``: without one."""
    if code == NO_CODE:
        return frame(CLOSE, b"")
    text = reason.encode()[: MOST_CONTROL - 2].decode("utf-8", "ignore")
    return frame(CLOSE, code.to_bytes(2, "big") + text.encode())


def text_frame(event: dict[str, object]) -> bytes:
    """An event of ours, as vLLM writes its own."""
    return frame(TEXT, json.dumps(event, separators=(",", ":")).encode())


def masked(payload: bytes, key: bytes) -> bytes:
    """Mask or unmask (RFC 6455 5.3)."""
    size = len(payload)
    keys = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(keys, "little")).to_bytes(size, "little")


def close_code(payload: bytes) -> int:
    """What a Close says."""
    return int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NO_CODE


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a frame; ``size``: its own bytes, ``length``: those of the payload that follows."""

    opcode: int
    final: bool
    reserved: int
    key: bytes | None
    size: int
    length: int


def read_head(data: bytes | bytearray, at: int) -> FrameHead | None:
    """The head that begins at ``at``; None while it is not whole."""
    there = len(data) - at
    if there < 2:
        return None
    first, second = data[at], data[at + 1]
    length, size = second & 0x7F, 2
    if length == 126:
        size = 4
    elif length == 127:
        size = 10
    key_at = size
    if second & 0x80:
        size += 4
    if there < size:
        return None
    if key_at > 2:
        length = int.from_bytes(data[at + 2 : at + key_at], "big")
    key = bytes(data[at + key_at : at + size]) if second & 0x80 else None
    return FrameHead(first & 0x0F, bool(first & 0x80), first & 0x70, key, size, length)


class Frames:
    """Follows one direction of a connection from frame to frame, past what is in them.

    It judges nothing: the peer at the other end does, and closes with the code it likes.
    """

    __slots__ = ("_closing", "_head", "_key", "_left", "_open", "close", "messages")

    def __init__(self) -> None:
        #: Data frames so far.
        self.messages = 0
        #: The code of the Close that went by; None while there was none.
        self.close: int | None = None
        self._head = b""
        self._left = 0
        self._open = False
        self._closing: bytearray | None = None
        self._key: bytes | None = None

    @property
    def between_frames(self) -> bool:
        """Whether a control frame of ours may be put in here."""
        return not self._left and not self._head and self.close is None

    @property
    def between_messages(self) -> bool:
        """Whether an event of ours may be put in here."""
        return self.between_frames and not self._open

    def feed(self, data: bytes) -> None:
        """Bytes that pass by."""
        at, end = 0, len(data)
        if self._head:
            data = self._head + data
            end, self._head = len(data), b""
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                if self._closing is not None:
                    self._closing += data[at : at + step]
                self._left -= step
                at += step
            else:
                # A short frame that is here as a whole, looked at in place: a client may send nothing but such.
                if end - at > 1 and (short := _SHORT[data[at + 1]]) and end - at >= short and data[at] & 0x0F != CLOSE:
                    if data[at] & 0x0F in _DATA:
                        self.messages += 1
                        self._open = data[at] < 0x80
                    at += short
                    continue
                head = read_head(data, at)
                if head is None:
                    self._head = data[at:]
                    return
                at += head.size
                self._begins(head)
            if not self._left and self._closing is not None:
                self._closes()

    def _begins(self, head: FrameHead) -> None:
        self._left = head.length
        if head.opcode in _DATA:
            self.messages += 1
            self._open = not head.final
        elif head.opcode == CLOSE and head.length <= MOST_CONTROL:
            self._closing, self._key = bytearray(), head.key

    def _closes(self) -> None:
        payload = bytes(self._closing or b"")
        self._closing = None
        if self.close is None:
            self.close = close_code(payload if self._key is None else masked(payload, self._key))


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, or a control frame, and the bytes that it came in."""

    opcode: int
    payload: bytes
    raw: bytes


class MessageReader:
    """Bytes to whole messages of at most ``limit`` bytes. ``masks``: the peer is a client, which must mask."""

    def __init__(self, limit: int, *, masks: bool) -> None:
        self.limit = limit
        self._masks = masks
        self._buffer = bytearray()
        #: Frames of a message whose end has not come: as they came, and what they say.
        self._raw = bytearray()
        self._payload = bytearray()
        self._opcode: int | None = None

    @property
    def held(self) -> int:
        """Bytes that wait to be read or taken."""
        return len(self._buffer) + len(self._raw)

    def feed(self, data: bytes) -> None:
        """Bytes that came."""
        self._buffer += data

    def next(self) -> Message | None:
        """The next message or control frame, None while it is not whole; raises ``WebSocketError``."""
        while (head := read_head(self._buffer, 0)) is not None:
            self._check(head)
            end = head.size + head.length
            if len(self._buffer) < end:
                return None
            raw = bytes(memoryview(self._buffer)[:end])
            del self._buffer[:end]
            payload = raw[head.size :]
            if head.key is not None:
                payload = masked(payload, head.key)
            if head.opcode >= CLOSE:
                return Message(head.opcode, payload, raw)
            if self._opcode is None:
                self._opcode = head.opcode
            self._raw += raw
            self._payload += payload
            if head.final:
                message = Message(self._opcode, bytes(self._payload), bytes(self._raw))
                self._opcode, self._raw, self._payload = None, bytearray(), bytearray()
                return message
        return None

    def rest(self) -> bytes:
        """All that was not given out, as it came; the reader is empty afterwards."""
        rest = bytes(self._raw + self._buffer)
        self._opcode, self._raw, self._payload, self._buffer = None, bytearray(), bytearray(), bytearray()
        return rest

    def _check(self, head: FrameHead) -> None:
        if head.reserved:
            raise WebSocketError("a reserved bit is set, and no extension was agreed on")
        if head.opcode not in _OPCODES:
            raise WebSocketError(f"there is no opcode {head.opcode}")
        if (head.key is not None) is not self._masks:
            raise WebSocketError("a frame is not masked" if self._masks else "a frame is masked")
        if head.opcode >= CLOSE:
            if not head.final or head.length > MOST_CONTROL or (head.opcode == CLOSE and head.length == 1):
                raise WebSocketError("a control frame is fragmented, too long, or half a close code")
        elif (head.opcode == CONTINUATION) is (self._opcode is None):
            raise WebSocketError("a message begins within another, or goes on without a beginning")
        elif len(self._payload) + head.length > self.limit:
            raise WebSocketError(f"the message is longer than {self.limit} bytes", TOO_BIG)
        elif len(self._raw) - len(self._payload) > self.limit:  # empty frames would be kept without end
            raise WebSocketError("the message comes in too many frames", TOO_BIG)
