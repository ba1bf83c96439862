"""When to publish changes: at once after quiet, at most every so often under load, never without a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeFeed:
    """Turns many cheap ``mark`` calls into few ``publish`` calls.

    The first mark after ``interval`` seconds of quiet publishes in the loop's next turn (so what one event changes is
    published together); those that follow share one publication per interval. No timer runs while nothing is marked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, publish: Callable[[], None], interval: float) -> None:
        self._loop = loop
        self._publish = publish
        self._interval = interval
        self._not_before = loop.time()
        self._handle: asyncio.Handle | None = None

    def mark(self) -> None:
        """Something changed."""
        if self._handle is not None:
            return
        if self._loop.time() >= self._not_before:
            self._handle = self._loop.call_soon(self.flush)
        else:
            self._handle = self._loop.call_at(self._not_before, self.flush)

    def flush(self) -> None:
        """Publish now what was marked; nothing was: do nothing."""
        if self._handle is None:
            return
        self.stop()
        self._not_before = self._loop.time() + self._interval
        self._publish()

    def stop(self) -> None:
        """Forget what was marked."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
