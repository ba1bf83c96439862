"""The typed client of the supervisor's D-Bus interfaces: what vllmctl is built on, and any Python program may be.

It speaks raw messages and matches the replies itself: dbus-next's ``call()`` has no time limit and hangs when the bus
is gone. Every wait here ends with the reply, with its time limit, or with the loss of the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from dbus_next.aio.message_bus import MessageBus
from dbus_next.constants import MessageFlag, MessageType
from dbus_next.errors import AuthError, InvalidAddressError
from dbus_next.message import Message
from dbus_next.signature import Variant

from supervisord.bus import names
from supervisord.bus.errors import BusError, BusUnavailable, CallFailed
from supervisord.bus.snapshot import (
    Change,
    DaemonLeft,
    DaemonReturned,
    FailoverSeen,
    FleetStatus,
    Mirror,
    Objects,
)
from supervisord.control import ControlError, ErrorCode, Verb

_DBUS = "org.freedesktop.DBus"
_DBUS_PATH = "/org/freedesktop/DBus"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"

#: Seconds for connecting to the bus, which answers at once or is stuck.
CONNECT_TIMEOUT = 5.0

#: Errors of the bus that mean: nobody owns our name, or its owner went away before it answered.
_ABSENT = frozenset(
    f"{_DBUS}.Error.{name}" for name in ("ServiceUnknown", "NameHasNoOwner", "NoReply", "Disconnected", "TimedOut")
)
#: ... and: the bus tried to start it, and that failed (``Spawn.ExecFailed`` ...; systemd's own words follow).
_ACTIVATION_FAILED = (f"{_DBUS}.Error.Spawn.", "org.freedesktop.systemd1.")


class DaemonAbsent(BusError):
    """The bus works, but the supervisor is not on it (any more)."""

    def __init__(self, message: str, *, vanished: bool = False, start_failed: bool = False) -> None:
        super().__init__(message)
        #: It was there and left before it answered.
        self.vanished = vanished
        #: The bus tried to start it; the text says why that failed.
        self.start_failed = start_failed


class StillWorking(BusError):
    """The time limit passed before the supervisor answered; its work goes on."""


class _Bus(MessageBus):
    """dbus-next's bus, which leaves its socket open when it cannot connect, and spins when the bus hangs up on it."""

    def _setup_socket(self) -> None:
        try:
            super()._setup_socket()  # type: ignore[no-untyped-call]
        except BaseException:
            self.close()
            raise

    async def _auth_readline(self) -> str:
        line = b""
        while not line.endswith(b"\r\n"):
            # One byte: what follows the line belongs to the message reader.
            byte = await self._loop.sock_recv(self._sock, 1)
            if not byte:
                raise EOFError("it hung up during authentication")
            line += byte
        return line[:-2].decode()

    def close(self) -> None:
        """Close the socket, connected or not; a second time does nothing."""
        if not hasattr(self, "_sock") or self._sock.fileno() < 0:
            return
        self._user_disconnect = True
        if hasattr(self, "_disconnect_future"):
            self._finalize(None)  # type: ignore[no-untyped-call]
        with suppress(OSError):  # what was not yet sent cannot be flushed any more
            self._stream.close()
        self._sock.close()


class Client:
    """One connection to the bus. Made by ``connect``."""

    def __init__(self, bus: _Bus) -> None:
        self._bus = bus
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._watches: list[Watch] = []
        self._lost: str | None = None
        bus.add_message_handler(self._on_message)
        self._disconnect = asyncio.create_task(self._wait_for_disconnect(), name="bus disconnect")

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """A client of the bus at ``address`` (``unix:path=...``) for the block; raises ``BusUnavailable``."""
        bus: _Bus | None = None
        try:
            bus = _Bus(bus_address=address)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await bus.connect()
        except (OSError, EOFError, AuthError, InvalidAddressError) as error:
            if bus is not None:
                bus.close()
            raise BusUnavailable(f"cannot connect to the bus at {address}: {_reason(error)}") from error
        except BaseException:
            if bus is not None:
                bus.close()
            raise
        client = cls(bus)
        try:
            yield client
        finally:
            bus.close()
            await client._disconnect

    async def fleet(self, *, start_daemon: bool = False, timeout: float | None = 10.0) -> FleetStatus:
        """Everything, in one call. ``start_daemon`` lets the bus start the supervisor where it does not run."""
        return Mirror(await self._managed_objects(start_daemon, timeout)).fleet()

    async def command(self, path: str, verb: Verb, level: int = 0, *, timeout: float | None = None) -> None:
        """Ask the model or replica at ``path`` to do ``verb``; returns when it is done.

        Raises ``ControlError`` when the supervisor says that it failed, ``StillWorking`` after ``timeout`` seconds.
        """
        interface = names.MODEL_INTERFACE if path.startswith(names.MODELS_PATH + "/") else names.REPLICA_INTERFACE
        await self._call(
            Message(
                destination=names.BUS_NAME,
                path=path,
                interface=interface,
                member=verb.value.capitalize(),
                signature="u" if verb is Verb.SLEEP else "",
                body=[level] if verb is Verb.SLEEP else [],
                flags=MessageFlag.NO_AUTOSTART,
            ),
            timeout,
        )

    async def reload(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """Have the configuration read again; returns what changed, one sentence each."""
        reply = await self._call(
            Message(
                destination=names.BUS_NAME,
                path=names.ROOT_PATH,
                interface=names.MANAGER_INTERFACE,
                member="Reload",
                flags=MessageFlag.NO_AUTOSTART,
            ),
            timeout,
        )
        return tuple(str(change) for change in reply.body[0])

    @asynccontextmanager
    async def watch(self, *, start_daemon: bool = False, timeout: float | None = 10.0) -> AsyncIterator[Watch]:
        """The fleet, kept current by signals for the time of the block."""
        for rule in (
            f"type='signal',sender='{names.BUS_NAME}',path_namespace='{names.ROOT_PATH}'",
            f"type='signal',sender='{_DBUS}',interface='{_DBUS}',member='NameOwnerChanged',arg0='{names.BUS_NAME}'",
        ):
            await self._call(
                Message(
                    destination=_DBUS,
                    path=_DBUS_PATH,
                    interface=_DBUS,
                    member="AddMatch",
                    signature="s",
                    body=[rule],
                ),
                timeout,
            )
        watch = Watch(self, timeout)
        self._watches.append(watch)
        try:
            await watch._read(start_daemon)
            yield watch
        finally:
            self._watches.remove(watch)

    async def _managed_objects(self, start_daemon: bool, timeout: float | None, watch: Watch | None = None) -> Objects:
        message = Message(
            destination=names.BUS_NAME,
            path=names.ROOT_PATH,
            interface=_OBJECT_MANAGER,
            member="GetManagedObjects",
            flags=MessageFlag.NONE if start_daemon else MessageFlag.NO_AUTOSTART,
            serial=self._bus.next_serial(),
        )
        if watch is not None:
            watch._snapshot_serial = message.serial
        reply = await self._call(message, timeout)
        objects: Objects = _unwrap(reply.body[0])
        if names.MANAGER_INTERFACE not in objects.get(names.ROOT_PATH, {}):
            # ObjectManager lists what is below its own object: the Manager's properties may need a call of their own.
            reply = await self._call(
                Message(
                    destination=names.BUS_NAME,
                    path=names.ROOT_PATH,
                    interface=_PROPERTIES,
                    member="GetAll",
                    signature="s",
                    body=[names.MANAGER_INTERFACE],
                    flags=MessageFlag.NO_AUTOSTART,
                ),
                timeout,
            )
            objects.setdefault(names.ROOT_PATH, {})[names.MANAGER_INTERFACE] = _unwrap(reply.body[0])
        return objects

    async def _call(self, message: Message, timeout: float | None) -> Message:
        if self._lost is not None:
            raise BusUnavailable(self._lost)
        if not message.serial:
            message.serial = self._bus.next_serial()
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._replies[message.serial] = reply
        try:
            self._bus.send(message).add_done_callback(_retrieve)
            answer = await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            raise StillWorking(f"no answer within {timeout:g} s") from None
        finally:
            self._replies.pop(message.serial, None)
        if answer.message_type is MessageType.ERROR:
            raise _error(answer)
        return answer

    def _on_message(self, message: Message) -> bool:
        if message.message_type is MessageType.SIGNAL:
            for watch in self._watches:
                watch._feed(message)
            return False
        if message.message_type is MessageType.METHOD_CALL:
            return False  # nobody has reason to call us; dbus-next answers that
        if message.message_type is MessageType.METHOD_RETURN:
            for watch in self._watches:
                watch._on_reply(message.reply_serial)
        reply = self._replies.pop(message.reply_serial, None)
        if reply is not None and not reply.done():
            reply.set_result(message)
        return True

    async def _wait_for_disconnect(self) -> None:
        try:
            await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - whatever the bus' reader raised, the bus is lost
            self._lost = f"the message bus went away: {_reason(error)}"
        else:
            self._lost = "the connection to the message bus was closed"
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(BusUnavailable(self._lost))
        for watch in self._watches:
            watch._feed(None)


class Watch:
    """The fleet as it changes. Made by ``Client.watch``."""

    def __init__(self, client: Client, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._signals: asyncio.Queue[Message | None] = asyncio.Queue()
        self._snapshot_serial = 0
        self._mirror: Mirror | None = None
        #: The supervisor is on the bus again, and was not read yet (a wait for that may have been cancelled).
        self._unread = False

    @property
    def fleet(self) -> FleetStatus | None:
        """The newest state; None while the supervisor is not on the bus."""
        return self._mirror.fleet() if self._mirror is not None else None

    async def next(self) -> Sequence[Change]:
        """Wait for the next change, and apply it; raises ``BusUnavailable`` when the bus is gone."""
        while True:
            if self._unread:
                changes = await self._read_again()
                if changes:
                    return changes
            signal = await self._signals.get()
            if signal is None:
                raise BusUnavailable(self._client._lost or "the message bus went away")
            changes = self._apply(signal)
            if changes:
                return changes

    def _apply(self, signal: Message) -> Sequence[Change]:
        if signal.interface == _DBUS and signal.member == "NameOwnerChanged":
            return self._owner_changed(signal.body[2])
        if self._mirror is None:
            return ()
        if signal.interface == _PROPERTIES and signal.member == "PropertiesChanged":
            change = self._mirror.properties_changed(signal.path, signal.body[0], _unwrap(signal.body[1]))
            return (change,) if change is not None else ()
        if signal.interface == _OBJECT_MANAGER and signal.member == "InterfacesAdded":
            return self._mirror.interfaces_added(signal.body[0], _unwrap(signal.body[1]))
        if signal.interface == _OBJECT_MANAGER and signal.member == "InterfacesRemoved":
            return self._mirror.interfaces_removed(signal.body[0], signal.body[1])
        if signal.interface == names.MANAGER_INTERFACE and signal.member == "Failover":
            return (FailoverSeen(*signal.body),)
        return ()

    def _owner_changed(self, owner: str) -> Sequence[Change]:
        left = self._mirror is not None
        self._mirror = None
        self._unread = bool(owner)
        return (DaemonLeft(),) if left else ()

    async def _read_again(self) -> Sequence[Change]:
        try:
            await self._read(start_daemon=False)
        except DaemonAbsent:
            self._unread = False  # it left again at once; the signal of its return will come
        fleet = self.fleet
        return (DaemonReturned(fleet),) if fleet is not None else ()

    async def _read(self, start_daemon: bool) -> None:
        self._mirror = Mirror(await self._client._managed_objects(start_daemon, self._timeout, self))
        self._unread = False

    def _feed(self, signal: Message | None) -> None:
        self._signals.put_nowait(signal)

    def _on_reply(self, serial: int) -> None:
        """Whatever was signalled before the snapshot is in it: the bus keeps the order."""
        if serial == self._snapshot_serial:
            while not self._signals.empty():
                self._signals.get_nowait()


def _error(answer: Message) -> Exception:
    """The exception that an error reply stands for."""
    name, text = answer.error_name, str(answer.body[0]) if answer.body else ""
    if name.startswith(names.ERROR_PREFIX):
        code = name.removeprefix(names.ERROR_PREFIX)
        return ControlError(ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL, text)
    if name in _ABSENT:
        return DaemonAbsent(text, vanished=name.endswith((".NoReply", ".Disconnected")))
    if name.startswith(_ACTIVATION_FAILED):
        return DaemonAbsent(f"the bus could not start it: {text}", start_failed=True)
    return CallFailed(name, text)


def _unwrap(value: Any) -> Any:
    """``value`` without the Variants in it."""
    if isinstance(value, Variant):
        return _unwrap(value.value)
    if isinstance(value, Mapping):
        return {key: _unwrap(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    return value


def _retrieve(sent: asyncio.Future[None]) -> None:
    """A failed write shows as the loss of the bus; its own exception has no other reader."""
    if not sent.cancelled():
        sent.exception()


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
