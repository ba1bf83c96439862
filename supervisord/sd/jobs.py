"""Who waits for which of systemd's jobs.

JobRemoved comes over another connection than the answer that names the job, and often before it: a unit that ends at
once is done when StartUnit has hardly answered. So results are kept for as long as a command is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from supervisord.core.readings import UnitStatus


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was queued for us."""

    path: str
    #: ``start``, ``stop`` or ``restart``.
    verb: str
    unit: str

    def result_seen_in(self, status: UnitStatus) -> str:
        """What the result must have been, where only the unit's status after it is known."""
        up = status.active_state in ("active", "reloading")
        down = status.active_state in ("inactive", "failed")
        if (self.verb == "stop" and down) or (self.verb != "stop" and up):
            return "done"
        return "failed" if status.result != "success" else "canceled"


class Jobs:
    """The jobs that are waited for."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Job, asyncio.Future[str]]]] = {}
        self._early: dict[str, str] = {}
        self._on_their_way = 0

    @contextlib.contextmanager
    def dispatching(self) -> Iterator[Callable[[Job], asyncio.Future[str]]]:
        """Around a command: gives the function that turns the answer, a job, into the future of its result."""
        self._on_their_way += 1
        try:
            yield self._expect
        finally:
            self._on_their_way -= 1
            if not self._on_their_way:
                self._early.clear()

    def removed(self, path: str, result: str) -> None:
        """A job has ended with ``done``, ``failed``, ``canceled``, ``timeout``, ``dependency``, ``skipped`` ..."""
        if self._on_their_way:
            self._early[path] = result
        for _, waiter in self._waiting.pop(path, ()):
            if not waiter.done():
                waiter.set_result(result)

    def fail(self, reason: str) -> None:
        """Nothing will be heard of any job again: whoever waits gets a ``ConnectionError``."""
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for _, waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(ConnectionError(reason))

    def waited_for(self) -> list[Job]:
        """The jobs that somebody waits for."""
        return [waiters[0][0] for waiters in self._waiting.values()]

    def _expect(self, job: Job) -> asyncio.Future[str]:
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if job.path in self._early:
            waiter.set_result(self._early[job.path])
            return waiter
        # A list: two starts of one unit are merged by systemd into one job.
        self._waiting.setdefault(job.path, []).append((job, waiter))
        waiter.add_done_callback(lambda _: self._forget(job, waiter))
        return waiter

    def _forget(self, job: Job, waiter: asyncio.Future[str]) -> None:
        """A waiter is through, perhaps because it was cancelled."""
        waiters = self._waiting.get(job.path, [])
        if (job, waiter) in waiters:
            waiters.remove((job, waiter))
            if not waiters:
                del self._waiting[job.path]
