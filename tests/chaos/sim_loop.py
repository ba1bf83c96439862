"""Virtual time: one scheduler, and event loops that are processes and can be killed between any two callbacks.

Each ``Process`` is an asyncio event loop without threads, sockets or a clock of its own. All of them run in turn on one
``Scheduler``: the callbacks that are ready in the order in which they became so, then time jumps to the next timer.
Killing a process drops every callback it still had: nothing of it runs again, no ``finally``, no cancellation. What it
had asked of the world goes on in the world.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any

#: What a callback costs, in virtual seconds. Without it a timer that a rounding error made fire too early would be set
#: to the same instant for ever; a real clock goes on too.
CALLBACK_TAKES = 1e-5
#: Seconds since the epoch at which every history begins.
EPOCH = 1_750_000_000.0


class Handle:
    """A callback to run; ``when`` is set for timers."""

    __slots__ = ("args", "callback", "context", "gone", "process", "when")

    def __init__(self, process: Process, callback: Callable[..., Any], args: tuple[Any, ...], context: Any) -> None:
        self.process, self.callback, self.args, self.context = process, callback, args, context
        self.gone = False
        self.when = 0.0

    def cancel(self) -> None:
        self.gone = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.gone


class Scheduler:
    """Owns the time and the order of things."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Callbacks that were run.
        self.count = 0
        self.stopped = False
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = 0

    def soon(self, handle: Handle) -> None:
        self._ready.append(handle)

    def at(self, when: float, handle: Handle) -> None:
        handle.when = when
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, handle))

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> None:
        """Run everything that is due up to ``until``; stop early when ``enough`` says so, or after ``stopped``."""
        ready, timers = self._ready, self._timers
        running: Process | None = None
        try:
            while not self.stopped:
                while timers and timers[0][0] <= self.now:
                    ready.append(heapq.heappop(timers)[2])
                if not ready:
                    if enough is not None and enough():
                        return
                    if not timers or timers[0][0] > until:
                        self.now = max(self.now, until)
                        return
                    self.now = timers[0][0]
                    continue
                handle = ready.popleft()
                process = handle.process
                if handle.gone or not process.alive:
                    continue
                if process is not running:
                    _set_running_loop(process)
                    running = process
                self.now += CALLBACK_TAKES
                self.count += 1
                process.run(handle)
        finally:
            _set_running_loop(None)


class Process(asyncio.AbstractEventLoop):
    """One process of the simulated machine. ``on_error`` hears of exceptions that nobody caught."""

    def __init__(self, scheduler: Scheduler, on_error: Callable[[str, BaseException | None], None]) -> None:
        self.alive = True
        #: The history is over; coroutines that never ended are being closed.
        self.buried = False
        self._scheduler = scheduler
        self._on_error = on_error
        self._fuse = -1
        self._burnt: Callable[[], None] = lambda: None
        #: Held until the end of the simulation, so that collecting a killed process's coroutines runs none of them.
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64

    # --- life ---

    def kill(self) -> None:
        """No callback of this process runs any more."""
        self.alive = False

    def kill_after(self, callbacks: int, then: Callable[[], None]) -> None:
        """Be killed after so many more callbacks; ``then`` is told (of the world's side)."""
        self._fuse, self._burnt = callbacks, then

    def spare(self) -> None:
        """Nobody will kill it any more."""
        self._fuse = -1

    def bury(self) -> None:
        """At the end of everything: close what never ended, quietly."""
        self.alive, self.buried = False, True
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False
                task.get_coro().close()
        self._tasks.clear()

    def run(self, handle: Handle) -> None:
        """Run one callback."""
        try:
            if handle.context is None:
                handle.callback(*handle.args)
            else:
                handle.context.run(handle.callback, *handle.args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            self._on_error("a callback raised", error)
        if self._fuse >= 0:
            self._fuse -= 1
            if self._fuse < 0 and self.alive:
                self.kill()
                self._burnt()

    # --- what asyncio asks of a loop ---

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(self, callback, *args, context=None):
        handle = Handle(self, callback, args, context)
        if self.alive:
            self._scheduler.soon(handle)
        return handle

    def call_at(self, when, callback, *args, context=None):
        handle = Handle(self, callback, args, context)
        if self.alive:
            self._scheduler.at(when, handle)
        return handle

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self._scheduler.now + delay, callback, *args, context=context)

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, **options):
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 2 * len(self._tasks) + 64
        return task

    def call_exception_handler(self, context):
        if self.alive:
            self._on_error(context.get("message", ""), context.get("exception"))

    def get_debug(self):
        return False

    def is_running(self):
        return True

    def is_closed(self):
        return not self.alive
