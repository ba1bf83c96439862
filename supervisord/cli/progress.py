"""Telling a waiting person how far it is: one line that is rewritten on a terminal, one line a change on a pipe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from supervisord.bus.client import DaemonAbsent, StillWorking, Watch
from supervisord.bus.errors import BusUnavailable
from supervisord.bus.snapshot import ReplicaChange, ReplicaStatus
from supervisord.cli.console import Console, printable
from supervisord.cli.tables import cut
from supervisord.cli.words import replica_words, span, state_words

#: Seconds between two rewrites of the line on a terminal, where only the time on it changed.
TICK = 0.2


class Progress:
    """What the replicas of an operation are doing, on stderr. ``follow`` runs beside the operation and is cancelled."""

    def __init__(
        self, console: Console, watch: Watch, replicas: set[str], clock: Callable[[], float], width: int | None
    ) -> None:
        self._console = console
        self._watch = watch
        self._replicas = replicas
        self._clock = clock
        self._width = width
        self._began = time.monotonic()
        self._shown = False

    async def follow(self) -> None:
        """Report changes until cancelled, or until the supervisor or the bus is gone (the operation says so itself)."""
        with suppress(BusUnavailable, DaemonAbsent, StillWorking):
            while True:
                try:
                    async with asyncio.timeout(TICK if self._console.live else None):
                        changes = await self._watch.next()
                except TimeoutError:
                    changes = ()
                if self._console.live:
                    self._rewrite()
                    continue
                for change in changes:
                    if isinstance(change, ReplicaChange) and change.after is not None:
                        self._line(change.before, change.after)

    def clear(self) -> None:
        """Take the rewritten line away; what follows starts at the left edge."""
        if self._shown:
            self._console.err.write("\r\x1b[K")
            self._console.err.flush()
            self._shown = False

    def _line(self, before: ReplicaStatus | None, after: ReplicaStatus) -> None:
        if after.name not in self._replicas:
            return
        if before is not None and (before.state, before.step) == (after.state, after.step):
            return
        step = f" ({after.step.replace('_', ' ')})" if after.step else ""
        seconds = span(time.monotonic() - self._began)
        self._console.note(printable(f"{after.name}: {state_words(after.state)}{step}, after {seconds}"))

    def _rewrite(self) -> None:
        fleet = self._watch.fleet
        if fleet is None or self._console.quiet:
            return
        now = self._clock()
        parts = [f"{each.name}: {replica_words(each, now)}" for each in fleet.replicas if each.name in self._replicas]
        line = cut(printable("; ".join(parts)), self._width)
        self._console.err.write(f"\r{line}\x1b[K")
        self._console.err.flush()
        self._shown = True
