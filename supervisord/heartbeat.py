"""What systemd hears of us: READY=1, STATUS=, the watchdog from the loop itself, more time while there is progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from supervisord.loop import Dispatcher
from supervisord.sd.notify import Notifier

#: At most one STATUS= in this time. Seconds.
STATUS_INTERVAL = 1.0
#: While starting or stopping goes on, more time is asked for this often, and this much. Seconds.
EXTEND_EVERY = 5.0
EXTEND_BY = 30.0


class Heartbeat:
    """Owns the timers of the watchdog and the status line; ``stop`` ends them."""

    def __init__(self, notifier: Notifier, dispatcher: Dispatcher, watchdog: float | None) -> None:
        """``watchdog``: seconds between two signs of life; None: systemd waits for none."""
        self._loop = asyncio.get_running_loop()
        self._notifier, self._dispatcher, self._interval = notifier, dispatcher, watchdog
        self._watchdog: asyncio.TimerHandle | None = None
        self._status: asyncio.TimerHandle | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._unsubscribe = self._dispatcher.subscribe(self._changed)
        if self._interval is not None:
            self._beat()

    def stop(self) -> None:
        self._unsubscribe()
        self._unsubscribe = lambda: None
        for timer in (self._watchdog, self._status):
            if timer is not None:
                timer.cancel()
        self._watchdog = self._status = None

    def ready(self) -> None:
        """The bus name is owned, the port accepts, the first reconciliation is done."""
        self._notifier.ready(self._dispatcher.view().status_line())

    async def while_starting(self, work: Awaitable[None]) -> None:
        """Ask for more time while ``work`` goes on."""
        await self._extending(work)

    async def while_stopping(self, work: Awaitable[None]) -> None:
        """Ask for more time while ``work`` goes on; streams move until their own limit."""
        await self._extending(work)

    async def _extending(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._notifier.extend_timeout(EXTEND_BY)
                await asyncio.wait([task], timeout=EXTEND_EVERY)
            task.result()
        finally:
            task.cancel()

    def _beat(self) -> None:
        assert self._interval is not None
        self._notifier.watchdog()
        self._watchdog = self._loop.call_later(self._interval, self._beat)

    def _changed(self) -> None:
        if self._status is None:
            self._status = self._loop.call_later(STATUS_INTERVAL, self._tell)

    def _tell(self) -> None:
        self._status = None
        self._notifier.status(self._dispatcher.view().status_line())
