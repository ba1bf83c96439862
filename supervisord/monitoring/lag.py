"""How late the event loop is: everything here shares it, so a loop that is late delays every client."""

from __future__ import annotations

import asyncio

from supervisord.core.histogram import Histogram

#: Seconds between two samples.
INTERVAL = 1.0
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class LoopLag:
    """Samples, while it is started, how much later than asked a timer runs."""

    def __init__(self) -> None:
        self.seconds = Histogram(BOUNDS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + INTERVAL
        self._timer = loop.call_at(due, self._sample, loop, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sample(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.seconds.observe(max(0.0, loop.time() - due))
        self.start()
