"""The D-Bus service: a thin skin over ``Control`` that real clients (busctl, GDBus, vllmctl) see as they expect to.

First its life on the bus, which may come and go; then the way out, changes to signals; then the way in, calls to
answers. Who asks always sees the newest state, and hears the signals that led there before the answer: what is not
yet published is published before a call is looked at and before it is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from supervisord.bus.calls import Calls, variant, variants
from supervisord.bus.connection import Call, Connection, clean_text
from supervisord.bus.errors import BusError, CallFailed, error_name
from supervisord.bus.feed import ChangeFeed
from supervisord.bus.interfaces import OBJECT_MANAGER, PROPERTIES, STANDARD, load_interfaces
from supervisord.bus.names import BUS_NAME, MANAGER_INTERFACE, ROOT_PATH
from supervisord.bus.objects import ManagerFacts, Tree, difference, tree_of
from supervisord.control import Control, ControlError, ErrorCode, Failover

log = logging.getLogger(__name__)

#: At most one publication of changes in this time, for in-flight counts change with every request. Seconds.
PUBLISH_INTERVAL = 0.1
#: After a lost bus: seconds between attempts to be back, doubled from the first to the last.
RETRY_MIN, RETRY_MAX = 0.1, 5.0


class BusService:
    """Our objects on one bus, from ``start`` to ``stop``; a bus lost in between is found again by itself."""

    def __init__(self, control: Control, facts: Callable[[], ManagerFacts], address: str) -> None:
        """``facts`` is asked at every publication, for a reload may change them; ``address`` is ``unix:path=...``."""
        self._control = control
        self._facts = facts
        self._address = address
        self._tree: Tree = {}
        self._interfaces = load_interfaces()
        self._methods = Calls(control, self._interfaces, lambda: self._tree)
        self._feed = ChangeFeed(asyncio.get_running_loop(), self._publish, PUBLISH_INTERVAL)
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._unsubscribe: list[Callable[[], None]] = []
        self._stopping = False
        self._owned, self._not_owned = asyncio.Event(), asyncio.Event()
        self._not_owned.set()

    # ---- life ----

    async def start(self) -> None:
        """Connect, export, own the name. Raises ``BusError`` (``NameTaken``, ...) and leaves nothing behind then."""
        self._unsubscribe = [
            self._control.subscribe(self._feed.mark),
            self._control.subscribe_failovers(self._on_failover),
        ]
        try:
            await self._connect()
        except BaseException:
            self._withdraw()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="bus service")

    async def wait_owned(self) -> None:
        """Returns when the name is ours (again)."""
        await self._owned.wait()

    async def wait_lost(self) -> None:
        """Returns when the name is not ours (any more): the bus went away, or we stopped."""
        await self._not_owned.wait()

    async def stop(self) -> None:
        """Answer every pending call with ShuttingDown, release the name, close. May be called again."""
        self._stopping = True
        self._withdraw()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        await asyncio.sleep(0)  # a task that is cancelled before its first step could not answer
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        if self._connection is not None and self._connection.alive:
            try:
                await self._connection.release_name(BUS_NAME)
            except BusError as error:
                log.debug("%s", error)
        self._disconnect()

    def _withdraw(self) -> None:
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []
        self._feed.stop()

    async def _connect(self) -> None:
        self._connection = await Connection.open(self._address, self._on_call)
        try:
            self._tree = tree_of(self._control.view(), self._facts())
            await self._connection.request_name(BUS_NAME)
        except BaseException:
            self._disconnect()
            raise
        self._not_owned.clear()
        self._owned.set()

    def _disconnect(self) -> None:
        self._owned.clear()
        self._not_owned.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _keep(self) -> None:
        """Be on the bus whenever there is one; the daemon does its work without it in the meantime."""
        while self._connection is not None:
            reason = await self._connection.lost
            self._disconnect()
            log.warning("the bus at %s is lost (%s); going on without it until it is back", self._address, reason)
            await self._reconnect()
            log.info("the bus at %s is back, and %s is ours again", self._address, BUS_NAME)

    async def _reconnect(self) -> None:
        said = ""
        for attempt in itertools.count():
            try:
                await self._connect()
                break
            except BusError as error:
                if str(error) != said:
                    log.warning("%s; trying again", error)
                said = str(error)
            except Exception:
                log.exception("cannot be on the bus by a defect of ours; trying again")
            await asyncio.sleep(min(RETRY_MIN * 2 ** min(attempt, 16), RETRY_MAX))

    # ---- the way out ----

    def _publish(self) -> None:
        """Tell everybody what differs from what they were told last."""
        connection = self._connection
        if connection is None:
            return  # whoever comes with a new bus asks for everything
        old, self._tree = self._tree, tree_of(self._control.view(), self._facts())
        what = difference(old, self._tree)
        # ObjectManager clients listen to the manager's own path only.
        for path in what.removed:
            connection.signal(ROOT_PATH, OBJECT_MANAGER, "InterfacesRemoved", "oas", [path, [old[path].interface]])
        for path in what.added:
            interface = self._interfaces[self._tree[path].interface]
            added = {interface.name: variants(interface, self._tree[path])}
            connection.signal(ROOT_PATH, OBJECT_MANAGER, "InterfacesAdded", "oa{sa{sv}}", [path, added])
        for path, values in what.changed.items():
            interface = self._interfaces[self._tree[path].interface]
            changed = {name: variant(interface.properties[name], value) for name, value in values.items()}
            connection.signal(path, PROPERTIES, "PropertiesChanged", "sa{sv}as", [interface.name, changed, []])

    def _on_failover(self, failover: Failover) -> None:
        if self._connection is not None:
            words = [clean_text(word) for word in (failover.model, failover.source, failover.target, failover.reason)]
            self._connection.signal(ROOT_PATH, MANAGER_INTERFACE, "Failover", "ssss", words)

    # ---- the way in ----

    def _on_call(self, connection: Connection, call: Call) -> None:
        if self._stopping:
            self._refuse(connection, call)
            return
        task = asyncio.create_task(self._answer(connection, call), name=f"bus call {call.member} {call.path}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, connection: Connection, call: Call) -> None:
        """Whatever becomes of the work, its caller gets one answer. A caller that left does not end the work."""
        try:
            signature, body = await self._do(call)
            connection.reply(call, signature, body)
        except CallFailed as error:
            connection.reply_error(call, error.error, error.text)
        except ControlError as error:
            connection.reply_error(call, error_name(error.code), str(error))
        except asyncio.CancelledError:
            self._refuse(connection, call)
            raise
        except Exception as error:
            log.exception("D-Bus call %s of %s failed by a defect of ours", call.member, call.path)
            text = f"cannot finish {call.member}: {type(error).__name__} inside vllm-supervisord, see its log"
            connection.reply_error(call, error_name(ErrorCode.INTERNAL), text)

    async def _do(self, call: Call) -> tuple[str, list[Any]]:
        """Do what ``call`` asks; returns the answer's signature and body."""
        self._feed.flush()
        interface, handler = self._methods.resolve(call)
        try:
            return interface.methods[call.member].gives, await handler(call)
        finally:
            if interface.name not in STANDARD:
                self._feed.mark()  # a reload may change the Manager's facts where the fleet does not
                self._feed.flush()

    def _refuse(self, connection: Connection, call: Call) -> None:
        text = f"cannot finish {call.member}: vllm-supervisord is shutting down"
        connection.reply_error(call, error_name(ErrorCode.SHUTTING_DOWN), text)
