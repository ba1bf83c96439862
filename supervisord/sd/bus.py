"""systemd's signals, over a connection that is made again whenever it is lost.

The only module of this package that knows dbus-next.

Signals are levels: each says that something is worth another look. What may have been missed, because the bus or the
manager went away or unit files were read again, is one call to the listener, ``look_again``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from supervisord.bus.address import NoSessionBus
from supervisord.bus.connection import Call, Connection
from supervisord.bus.errors import BusError, BusUnavailable, CallFailed

# After the module above, which makes dbus-next importable on new Pythons.
from dbus_next.constants import MessageFlag, MessageType  # isort: skip
from dbus_next.message import Message  # isort: skip

_log = logging.getLogger(__name__)

_SYSTEMD, _ROOT = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
_MANAGER, _UNIT, _PEER = f"{_SYSTEMD}.Manager", f"{_SYSTEMD}.Unit", "org.freedesktop.DBus.Peer"
_DBUS, _DBUS_ROOT = "org.freedesktop.DBus", "/org/freedesktop/DBus"
_PROPERTIES = "org.freedesktop.DBus.Properties"
#: Seconds for one answer. systemd answers nobody while it reloads.
_ANSWER_LIMIT = 25.0
#: Seconds without the bus or the manager before what waits for it is given up: a daemon-reexec takes about one, a bus
#: on a machine that is short of everything many.
_ABSENCE_LIMIT = 30.0
#: Seconds until the next attempt to connect: the first, and the longest.
_RETRY_FIRST, _RETRY_LONGEST = 0.1, 5.0

# Only what is needed: UnitNew and UnitRemoved would come in hundreds at each daemon-reload. A change of a unit is
# announced once per interface of its; the one that every unit has is enough, whatever property changed.
_RULES = (
    f"type='signal',sender='{_DBUS}',interface='{_DBUS}',member='NameOwnerChanged',arg0='{_SYSTEMD}'",
    f"type='signal',sender='{_SYSTEMD}',path='{_ROOT}',interface='{_MANAGER}',member='JobRemoved'",
    f"type='signal',sender='{_SYSTEMD}',path='{_ROOT}',interface='{_MANAGER}',member='Reloading'",
    f"type='signal',sender='{_SYSTEMD}',path='{_ROOT}',interface='{_MANAGER}',member='UnitFilesChanged'",
)


class Listener(Protocol):
    """Who is told; every call comes in the loop's thread and must not block."""

    def job_removed(self, job: str, result: str) -> None: ...

    def unit_changed(self, path: str) -> None: ...

    def look_again(self) -> None:
        """Anything may have changed unseen."""
        ...

    def manager_away(self) -> None:
        """The bus or the manager is gone; mostly for less than a second. ``look_again`` comes when it is back."""
        ...

    def manager_lost(self, reason: str) -> None:
        """It did not come back soon."""
        ...


class Signals:
    """Listens from ``open`` to ``close``."""

    def __init__(self, address: Callable[[], str], listener: Listener) -> None:
        """``address`` gives the bus' address anew for each connection, and may raise ``NoSessionBus``."""
        self._address, self._listener = address, listener
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        #: The unique name of the manager, empty while it has none.
        self._owner = ""
        self._owner_changed: asyncio.Future[None] | None = None
        self._present = asyncio.Event()
        self._paths: set[str] = set()
        self._giving_up: asyncio.TimerHandle | None = None
        #: Why there is no connection to the manager, while there is none.
        self.trouble = "no connection was made yet"

    def open(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="systemd signals")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._giving_up is not None:
            self._giving_up.cancel()

    async def present(self) -> None:
        """Wait until the manager is on the bus and sends us its signals; bounded by the caller."""
        await self._present.wait()

    async def watch(self, paths: Iterable[str]) -> None:
        """Tell changes of these units (object paths) and of no others. Active on return, where there is a manager."""
        before, self._paths = self._paths, set(paths)
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(BusError):  # the next connection is set up with all of them
                for path in sorted(before - self._paths):
                    await connection.drop_rule(_unit_rule(path))
                for path in sorted(self._paths - before):
                    await connection.add_rule(_unit_rule(path))

    async def flush(self) -> None:
        """Return when every signal that systemd has sent so far has been handled. Raises ``BusError``."""
        if self._connection is None:
            raise BusUnavailable(f"cannot ask systemd: {self.trouble}")
        await self._connection.call(_SYSTEMD, _ROOT, _PEER, "Ping")

    async def _run(self) -> None:
        delay = _RETRY_FIRST
        while True:
            try:
                connection = await _Connection.open(self._address(), _refuse)
                assert isinstance(connection, _Connection)
            except (BusUnavailable, NoSessionBus) as error:
                self._away(str(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RETRY_LONGEST)
                continue
            delay = _RETRY_FIRST
            try:
                await self._use(connection)
            except BusError as error:
                self._away(str(error))
            finally:
                self._connection = None
                connection.close()
            await asyncio.sleep(delay)

    async def _use(self, connection: _Connection) -> None:
        """Follow the manager through its comings and goings on one connection; ends with its loss, as an exception."""
        connection.on_signal = self._on_signal
        for rule in (*_RULES, *map(_unit_rule, sorted(self._paths))):
            await connection.add_rule(rule)
        self._connection = connection
        while not connection.lost.done():
            self._owner_changed = asyncio.get_running_loop().create_future()
            await self._subscribe(connection)
            await asyncio.wait((connection.lost, self._owner_changed), return_when=asyncio.FIRST_COMPLETED)
        raise BusUnavailable(f"the connection to the bus was lost: {connection.lost.result()}")

    async def _subscribe(self, connection: _Connection) -> None:
        """Ask the manager for its signals, if there is a manager."""
        try:
            [self._owner] = await connection.call(_DBUS, _DBUS_ROOT, _DBUS, "GetNameOwner", "s", [_SYSTEMD])
            await connection.call(_SYSTEMD, _ROOT, _MANAGER, "Subscribe")
        except CallFailed as failure:
            if failure.error != f"{_SYSTEMD}.AlreadySubscribed":  # it remembers subscribers over a daemon-reexec
                self._away(failure.text)
                return
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._present.set()
        self._listener.look_again()

    def _on_signal(self, message: Message) -> None:
        match message.member, message.body:
            case "NameOwnerChanged", [name, _, owner] if name == _SYSTEMD and message.sender == _DBUS:
                self._owner = owner
                self._away("the service manager has left the bus")
                if self._owner_changed is not None and not self._owner_changed.done():
                    self._owner_changed.set_result(None)
            case _ if message.sender != self._owner:
                pass  # sent to us directly, by somebody who is not systemd
            case "JobRemoved", [_, job, _, result]:
                self._listener.job_removed(job, result)
            case "PropertiesChanged", [_, _, _]:
                self._listener.unit_changed(message.path)
            case ("Reloading", [False]) | ("UnitFilesChanged", []):
                self._listener.look_again()

    def _away(self, reason: str) -> None:
        if reason != self.trouble:
            _log.warning("systemd cannot be reached: %s", reason)
        self.trouble = reason
        self._present.clear()
        self._listener.manager_away()
        if self._giving_up is None:
            self._give_up_later()

    def _give_up_later(self) -> None:
        self._giving_up = asyncio.get_running_loop().call_later(_ABSENCE_LIMIT, self._give_up)

    def _give_up(self) -> None:
        self._listener.manager_lost(self.trouble)
        self._give_up_later()  # a command that was on its way may have begun to wait since


class _Connection(Connection):
    """The project's bus connection, with calls to others and a receiver of signals."""

    on_signal: Callable[[Message], None] | None = None

    async def add_rule(self, rule: str) -> None:
        await self.call(_DBUS, _DBUS_ROOT, _DBUS, "AddMatch", "s", [rule])

    async def drop_rule(self, rule: str) -> None:
        await self.call(_DBUS, _DBUS_ROOT, _DBUS, "RemoveMatch", "s", [rule])

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
    ) -> list[Any]:
        """Call a method and return the values of its answer. Raises ``BusUnavailable`` and ``CallFailed``."""
        if not self.alive:
            raise BusUnavailable(f"cannot call {member} of {destination}: the connection is lost")
        flags = MessageFlag.NO_AUTOSTART
        message = Message(destination, path, interface, member, signature=signature, body=body or [], flags=flags)
        try:
            async with asyncio.timeout(_ANSWER_LIMIT):
                answer = await self._bus.call(message)
        except TimeoutError:
            raise BusUnavailable(f"cannot call {member} of {destination}: no answer in {_ANSWER_LIMIT:g} s") from None
        except (OSError, EOFError) as error:
            raise BusUnavailable(f"cannot call {member} of {destination}: {error}") from error
        assert answer is not None, "only calls that want no answer get none"
        if answer.message_type is MessageType.ERROR:
            raise CallFailed(str(answer.error_name), str(answer.body[0]) if answer.body else "")
        return list(answer.body)

    def _on_message(self, message: Message, on_call: Callable[[Connection, Call], None]) -> bool:
        if message.message_type is MessageType.SIGNAL and self.on_signal is not None:
            self.on_signal(message)
        return super()._on_message(message, on_call)


def _refuse(connection: Connection, call: Call) -> None:
    connection.reply_error(call, "org.freedesktop.DBus.Error.UnknownObject", "this connection only listens")


def _unit_rule(path: str) -> str:
    fixed = f"type='signal',sender='{_SYSTEMD}',interface='{_PROPERTIES}',member='PropertiesChanged'"
    return f"{fixed},path='{path}',arg0='{_UNIT}'"
