"""TLS on the public port: a layer between a socket and its connection, protocol to the one, transport to the other.

It is not the loop's own: that one binds the certificate to the listener instead of the connection, cannot half-close (a
client that is refused while it sends would lose the answer), and is under way with its handshake before a client can be
turned away. Nothing is buffered here, so the limits of the socket's transport hold as they do without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from enum import Enum, auto
from typing import Any, Protocol, cast

from proxy.errors import ProxyError

log = logging.getLogger("proxy.tls")

#: Bytes that go through OpenSSL's buffers at a time: they never shrink again.
_SLICE = 64 * 1024
#: The longest record's text.
_RECORD = 16 * 1024


class Door(Protocol):
    """What is asked of the port at the door (see ``proxy.clients.connected``)."""

    def stranger(self, transport: asyncio.BaseTransport) -> ProxyError | None: ...

    def turned_away(self, transport: asyncio.BaseTransport, error: ProxyError) -> None: ...


class Connection(Protocol):
    """The connection of a client (see ``proxy.clients.connection``)."""

    @property
    def peer(self) -> str: ...
    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def connection_lost(self, exc: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def refuse(self, error: ProxyError) -> None: ...


class _State(Enum):
    NEW = auto()  # nothing came yet
    HANDSHAKE = auto()
    OPEN = auto()
    PLAIN = auto()  # the client speaks no TLS, and is told so
    SHUT = auto()  # nothing goes either way any more


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """One client. The limit on the handshake's time is the connection's on the head of the first request."""

    def __init__(self, context: ssl.SSLContext, connection: Connection, door: Door) -> None:
        super().__init__()
        self._connection: Connection | None = connection
        self._door = door
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._socket: asyncio.Transport
        self._state = _State.NEW
        # What the connection says before the handshake is through: that it takes no more clients.
        self._early: list[bytes] = []
        self._ends_early = False

    # what the socket's transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)  # uvloop's are none by name
        connection, stranger = self._connection, self._door.stranger(transport)
        assert connection is not None
        if stranger is not None:
            # An answer would take a handshake, which is more than a stranger is worth.
            self._connection, self._state = None, _State.SHUT
            self._door.turned_away(transport, stranger)
            self._socket.close()
        else:
            connection.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._state is _State.NEW:
            self._begins(data)
        for at in range(0, len(data), _SLICE):
            if self._state is _State.HANDSHAKE or self._state is _State.OPEN:
                self._take(data[at : at + _SLICE] if len(data) > _SLICE else data)

    def eof_received(self) -> None:
        # Without a close_notify it may be somebody else's end: no more is believed than that nobody is there.
        if self._connection is not None:
            self._connection.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._state = _State.SHUT
        if self._connection is not None:
            self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    # what the connection asks of its transport

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._state is _State.OPEN:
            self._encrypt(data)
        elif self._state is _State.PLAIN:
            self._socket.write(data)
        elif self._state is not _State.SHUT:
            self._early.append(bytes(data))

    def can_write_eof(self) -> bool:
        """With a close_notify and the socket's own end: what the client still sends is dropped as it comes."""
        return True

    def write_eof(self) -> None:
        if self._state in (_State.NEW, _State.HANDSHAKE):
            self._ends_early = True
        elif not self._socket.is_closing():
            self._say_goodbye()
            self._socket.write_eof()

    def close(self) -> None:
        """Close after what was sent, and after saying so: an end without that is a broken answer."""
        self._say_goodbye()
        self._socket.close()

    def abort(self) -> None:
        """Close without saying so."""
        self._state = _State.SHUT
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._socket.is_closing()

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:  # by asyncio's names for them
            case "sslcontext":
                return self._tls.context
            case "ssl_object":
                return self._tls
            case _:
                return self._socket.get_extra_info(name, default)

    # inside

    def _begins(self, data: bytes) -> None:
        if b"A" <= data[:1] <= b"Z":  # a method of HTTP; TLS begins with a 22
            assert self._connection is not None
            self._state = _State.PLAIN
            self._connection.refuse(ProxyError(400, "https_required", "this port speaks TLS: use https://"))
        else:
            self._state = _State.HANDSHAKE

    def _take(self, data: bytes) -> None:
        connection = self._connection
        assert connection is not None
        self._incoming.write(data)
        try:
            if self._state is _State.HANDSHAKE and not self._handshake():
                return
            text, ended = self._decrypt()
        except ssl.SSLError as error:
            self._breaks(error)
            return
        self._flush()  # what the protocol itself has to say
        if text:
            connection.data_received(text)
        if ended:
            # What it asked for together with its goodbye must have begun, or nobody would be told of it.
            asyncio.get_running_loop().call_soon(self._ends, connection)

    def _ends(self, connection: Connection) -> None:
        connection.eof_received()
        self.close()

    def _handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        self._state = _State.OPEN
        self._flush()
        for data in self._early:
            self.write(data)
        self._early.clear()
        if self._ends_early:
            self.write_eof()
        return self._state is _State.OPEN

    def _decrypt(self) -> tuple[bytes, bool]:
        """All that came, and whether the client has said its goodbye."""
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(_RECORD):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            return b"".join(pieces) if len(pieces) != 1 else pieces[0], False
        return b"".join(pieces), True

    def _encrypt(self, data: bytes | bytearray | memoryview[Any]) -> None:
        try:
            if len(data) <= _RECORD:
                if data:
                    self._tls.write(data)
                    self._socket.write(self._outgoing.read())
                return
            view = memoryview(data)
            while view:
                view = view[self._tls.write(view[:_SLICE]) :]  # a record at a time
                if self._outgoing.pending >= _SLICE or not view:
                    self._socket.write(self._outgoing.read())
        except ssl.SSLError as error:
            self._breaks(error)

    def _say_goodbye(self) -> None:
        if self._state is _State.OPEN:
            with contextlib.suppress(ssl.SSLError):  # most often: the client has not said its own yet
                self._tls.unwrap()
            self._flush()
        self._state = _State.SHUT

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    def _breaks(self, error: ssl.SSLError) -> None:
        connection = self._connection
        assert connection is not None
        during = "the handshake" if self._state is _State.HANDSHAKE else "the connection"
        log.info("%s of %s fails: %s", during, connection.peer, error.reason or error)
        self._flush()  # the alert
        self._state = _State.SHUT
        connection.eof_received()
        self._socket.close()
