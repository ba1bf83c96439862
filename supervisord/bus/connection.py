"""One connection to a message bus, in our own words. The service knows no D-Bus library, only this module does.

dbus-next has been unmaintained since 2021 (docs/decisions/0003-dbus-next.md). What it does wrong and matters to a
daemon that must outlive its bus is put right here:

- connecting blocks the loop while the bus' backlog is full: here the socket never blocks;
- end of file during authentication makes it spin for ever: here it is an error;
- it takes a full send buffer for a broken connection: here it waits, up to a bound;
- a call has no time limit and may wait for ever on a lost bus: here each has one;
- sending on a lost connection registers a closed descriptor, which may be somebody else's by then: here it is refused;
- sockets are left to the garbage collector: here ``close`` closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from supervisord.bus.errors import BusError, BusUnavailable, CallFailed, NameTaken

if not hasattr(typing, "no_type_check_decorator"):  # gone from Python 3.15; dbus-next only decorates with it
    typing.no_type_check_decorator = lambda decorator: decorator

from dbus_next.aio.message_bus import MessageBus
from dbus_next.constants import MessageFlag, MessageType, NameFlag, RequestNameReply
from dbus_next.message import Message
from dbus_next.signature import Variant

__all__ = ["Call", "Connection", "Variant", "clean_text"]

#: Messages that may wait for a bus daemon that does not read; then it counts as lost. Some 5 MB of signals.
MAX_BACKLOG = 10_000
#: Seconds for connecting and for each call to the bus daemon itself, which answers at once or is stuck.
DAEMON_TIMEOUT = 5.0

_DAEMON = "org.freedesktop.DBus"
_DAEMON_PATH = "/org/freedesktop/DBus"


@dataclass(frozen=True, slots=True)
class Call:
    """A method call that somebody made to us."""

    path: str
    #: None when the caller left it out, which D-Bus allows.
    interface: str | None
    member: str
    signature: str
    body: Sequence[Any]
    sender: str
    serial: int
    reply_expected: bool


def clean_text(text: str) -> str:
    """``text`` without what D-Bus forbids: the bus daemon cuts off whoever sends a NUL or bad UTF-8."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


class _PatientSocket:
    """The writer's view of the socket: "not now" is nothing sent, and the writer comes again."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0


class _Bus(MessageBus):
    """dbus-next's bus with the faults above put right, by its own inner methods."""

    def __init__(self, address: str) -> None:
        super().__init__(bus_address=address)
        self._writer.sock = _PatientSocket(self._sock)

    @property
    def backlog(self) -> int:
        """Messages that are not sent yet."""
        return int(self._writer.messages.qsize())

    def _setup_socket(self) -> None:
        failure: OSError | None = None
        for transport, options in self._bus_address:
            if transport != "unix" or not ("path" in options or "abstract" in options):
                continue
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._sock.setblocking(False)
            try:
                self._sock.connect(options["path"] if "path" in options else f"\0{options['abstract']}")
            except OSError as error:
                self._sock.close()
                failure = error
                continue
            self._fd = self._sock.fileno()
            self._stream = self._sock.makefile("rwb")
            return
        raise failure or ValueError("it names no unix:path= or unix:abstract= socket")

    async def _auth_readline(self) -> str:
        line = b""
        while not line.endswith(b"\r\n"):
            # One byte: what follows the line belongs to the message reader.
            byte = await self._loop.sock_recv(self._sock, 1)
            if not byte:
                raise EOFError("it hung up during authentication")
            line += byte
        return line[:-2].decode()

    def disconnect(self) -> None:
        self._user_disconnect = True
        with contextlib.suppress(OSError):  # the other end may have been first
            self._sock.shutdown(socket.SHUT_RDWR)

    def give_up(self, reason: str) -> None:
        """Behave as if the other end had broken the connection."""
        self._finalize(ConnectionError(reason))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._user_disconnect = True
        self._finalize(ConnectionError("the connection was closed"))  # type: ignore[no-untyped-call]
        for end in (self._stream, self._sock):
            with contextlib.suppress(OSError):
                end.close()


class Connection:
    """An open connection; make one with ``open``. It is used in the loop's thread only."""

    def __init__(self, bus: _Bus, address: str) -> None:
        self._bus = bus
        self._address = address
        #: Resolves, and never raises, when the connection is gone; the result says why.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        bus._disconnect_future.add_done_callback(self._on_disconnect)

    @classmethod
    async def open(cls, address: str, on_call: Callable[[Connection, Call], None]) -> Connection:
        """Connect to the bus at ``address``; ``on_call`` gets every call made to us. Raises ``BusUnavailable``."""
        bus: _Bus | None = None
        try:
            bus = _Bus(address)
            connection = cls(bus, address)
            bus.add_message_handler(lambda message: connection._on_message(message, on_call))
            async with asyncio.timeout(DAEMON_TIMEOUT):
                await bus.connect()
        except BaseException as error:
            if bus is not None:
                bus.close()
            if not isinstance(error, Exception):
                raise
            raise BusUnavailable(f"cannot connect to the bus at {address}: {_reason(error)}") from error
        return connection

    @property
    def alive(self) -> bool:
        return bool(self._bus.connected)

    @property
    def unique_name(self) -> str:
        return str(self._bus.unique_name)

    async def request_name(self, name: str) -> None:
        """Own ``name`` or raise ``NameTaken``, or ``BusError`` where we may not; there is no queueing."""
        try:
            [answer] = await self._daemon("RequestName", "su", [name, NameFlag.DO_NOT_QUEUE])
        except CallFailed as error:
            raise BusError(f"cannot own the bus name {name}: {error.text}") from error
        if answer in (RequestNameReply.PRIMARY_OWNER.value, RequestNameReply.ALREADY_OWNER.value):
            return
        pid: int | None = None
        with contextlib.suppress(CallFailed):  # the owner left in this very moment
            [pid] = await self._daemon("GetConnectionUnixProcessID", "s", [name])
        raise NameTaken(name, pid)

    async def release_name(self, name: str) -> None:
        """Give ``name`` back. The bus daemon answers in order: all that was sent before has reached it then."""
        await self._daemon("ReleaseName", "s", [name])

    def signal(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> None:
        """Send a signal to everybody; nothing happens on a lost connection."""
        self._send(Message.new_signal(path, interface, member, signature, body))

    def reply(self, call: Call, signature: str, body: list[Any]) -> None:
        """Answer ``call``. Raises where ``body`` does not fit ``signature``; nothing happens on a lost connection."""
        if call.reply_expected:
            self._send(
                Message(
                    message_type=MessageType.METHOD_RETURN,
                    destination=call.sender,
                    reply_serial=call.serial,
                    signature=signature,
                    body=body,
                )
            )

    def reply_error(self, call: Call, error: str, text: str) -> None:
        """Answer ``call`` with an error of that D-Bus name."""
        if call.reply_expected:
            self._send(
                Message(
                    message_type=MessageType.ERROR,
                    destination=call.sender,
                    reply_serial=call.serial,
                    error_name=error,
                    signature="s",
                    body=[clean_text(text)],
                )
            )

    def close(self) -> None:
        """Close; may be called again."""
        self._bus.close()

    async def _daemon(self, member: str, signature: str, body: list[Any]) -> list[Any]:
        if not self.alive:
            raise BusUnavailable(f"cannot call {member} on the bus at {self._address}: the connection is lost")
        message = Message(_DAEMON, _DAEMON_PATH, _DAEMON, member, signature=signature, body=body)
        try:
            async with asyncio.timeout(DAEMON_TIMEOUT):
                answer = await self._bus.call(message)
        except Exception as error:
            raise BusUnavailable(f"cannot call {member} on the bus at {self._address}: {_reason(error)}") from error
        assert answer is not None, "only calls that want no answer get none"
        if answer.message_type is MessageType.ERROR:
            raise CallFailed(str(answer.error_name), str(answer.body[0]) if answer.body else "")
        return list(answer.body)

    def _send(self, message: Message) -> None:
        if not self.alive:
            return
        if self._bus.backlog >= MAX_BACKLOG:
            self._bus.give_up("it takes no messages any more")
            return
        self._bus.send(message).add_done_callback(_retrieve)

    def _on_message(self, message: Message, on_call: Callable[[Connection, Call], None]) -> bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False  # dbus-next matches replies with our calls itself
        on_call(
            self,
            Call(
                path=message.path,
                interface=message.interface,
                member=message.member,
                signature=message.signature,
                body=tuple(message.body),
                sender=message.sender,
                serial=message.serial,
                reply_expected=MessageFlag.NO_REPLY_EXPECTED not in message.flags,
            ),
        )
        return True

    def _on_disconnect(self, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if not self.lost.done():
            self.lost.set_result("closed" if error is None else _reason(error))


def _reason(error: BaseException) -> str:
    match error:
        case TimeoutError():
            return f"no answer within {DAEMON_TIMEOUT:g} s"
        case EOFError() if not str(error):
            return "it hung up"
        case OSError() if error.strerror:
            return error.strerror
        case _:
            return str(error) or type(error).__name__


def _retrieve(future: asyncio.Future[None]) -> None:
    """Look at a send's outcome, or asyncio complains; that the connection broke is told by ``lost``."""
    if not future.cancelled():
        future.exception()
