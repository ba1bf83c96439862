"""The typed client of the supervisor's D-Bus interfaces: what vllmctl is built on, and any Python program may be.

It speaks raw messages and matches the replies itself: dbus-next's ``call()`` has no time limit and hangs when the bus
is gone. Every wait here ends with the reply, with its time limit, or with the loss of the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from supervisord.bus import names
from supervisord.bus.connection import Call, Connection, Variant
from supervisord.bus.errors import UNKNOWN_OBJECT, BusError, BusUnavailable, CallFailed
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
from supervisord.core.admission import Bid, Explanation

# After the modules above, one of which makes dbus-next importable on new Pythons.
from dbus_next.constants import MessageFlag, MessageType  # isort: skip
from dbus_next.message import Message  # isort: skip

_DBUS = "org.freedesktop.DBus"
_DBUS_PATH = "/org/freedesktop/DBus"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"

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


class Client:
    """One connection to the bus. Made by ``connect``."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._watches: list[Watch] = []
        self._lost: str | None = None
        link.receive = self._on_message
        link.lost.add_done_callback(self._on_lost)

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """A client of the bus at ``address`` (``unix:path=...``) for the block; raises ``BusUnavailable``."""
        link = await _Link.open(address, _refuse)
        assert isinstance(link, _Link)
        try:
            yield cls(link)
        finally:
            link.close()
            await link.lost

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

    async def explain_route(self, path: str, route: str, body: bytes, *, timeout: float | None = None) -> Explanation:
        """Ask the model at ``path`` where a request with this body would go now; raises as ``command``."""
        reply = await self._call(
            Message(
                destination=names.BUS_NAME,
                path=path,
                interface=names.MODEL_INTERFACE,
                member="ExplainRoute",
                signature="say",
                body=[route, body],
                flags=MessageFlag.NO_AUTOSTART,
            ),
            timeout,
        )
        replica, reason, bids = reply.body
        return Explanation(replica, reason, tuple(Bid(*bid) for bid in bids))

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
        )
        if watch is not None:
            watch._snapshot = message
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
        if self._lost is not None or not self._link.alive:
            raise BusUnavailable(self._lost or "the message bus went away")
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._link.post(message)
        self._replies[message.serial] = reply
        try:
            answer = await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            raise StillWorking(f"no answer within {timeout:g} s") from None
        finally:
            self._replies.pop(message.serial, None)
        if answer.message_type is MessageType.ERROR:
            raise _error(answer)
        return answer

    def _on_message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL:
            for watch in self._watches:
                watch._feed(message)
            return
        if message.message_type is MessageType.METHOD_RETURN:
            for watch in self._watches:
                watch._on_reply(message)
        reply = self._replies.pop(message.reply_serial, None)
        if reply is not None and not reply.done():
            reply.set_result(message)

    def _on_lost(self, lost: asyncio.Future[str]) -> None:
        self._lost = f"the message bus went away: {lost.result()}"
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(BusUnavailable(self._lost))
        for watch in self._watches:
            watch._feed(None)


class _Link(Connection):
    """The project's bus connection, with whatever is no call handed to the client."""

    receive: Callable[[Message], None] | None = None

    def post(self, message: Message) -> None:
        """Send a call; its serial is set when this returns."""
        self._send(message)

    def _on_message(self, message: Message, on_call: Callable[[Connection, Call], None]) -> bool:
        if message.message_type is not MessageType.METHOD_CALL and self.receive is not None:
            self.receive(message)
        return super()._on_message(message, on_call)


def _refuse(connection: Connection, call: Call) -> None:
    connection.reply_error(call, UNKNOWN_OBJECT, "this connection only asks")


class Watch:
    """The fleet as it changes. Made by ``Client.watch``."""

    def __init__(self, client: Client, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._signals: asyncio.Queue[Message | None] = asyncio.Queue()
        #: The call for everything, and who answered it: the only sender whose signals count.
        self._snapshot: Message | None = None
        self._owner = ""
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
        if signal.sender == _DBUS and signal.member == "NameOwnerChanged":
            return self._owner_changed(signal.body[2])
        if self._mirror is None or signal.sender != self._owner:
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

    def _on_reply(self, reply: Message) -> None:
        """Whatever was signalled before the snapshot is in it: the bus keeps the order."""
        if self._snapshot is not None and reply.reply_serial == self._snapshot.serial:
            self._owner = reply.sender
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
