"""The status listener's life: opened at the start where one is wanted, moved by a reload, closed at the end.

It is for people and their tools, so it never stands in the way of those whom the daemon is for: an address that cannot
be listened on is an error in the journal, and in the answer to a reload, while the public port goes on. While nothing
listens, nothing is counted per request, and neither aiohttp's server nor prometheus_client is loaded.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from proxy.server import PublicProxy
from proxy.tally import RequestTally
from supervisord.bus.objects import ManagerFacts
from supervisord.core.spec import Config
from supervisord.core.view import FleetView
from supervisord.fleet_events import FleetEvents
from supervisord.listeners import ListenFailed, address_of, bound, unbind
from supervisord.monitoring.lag import LoopLag

if TYPE_CHECKING:
    from supervisord.monitoring.server import StatusServer

log = logging.getLogger(__name__)


class StatusPort:
    """Owns the listener and what is counted for it."""

    def __init__(self, view: Callable[[], FleetView], facts: Callable[[], ManagerFacts], events: FleetEvents) -> None:
        self._view, self._facts, self._events = view, facts, events
        self._requests, self._lag = RequestTally(), LoopLag()
        self._proxy: PublicProxy | None = None
        self._server: StatusServer | None = None
        self._handed_over = False
        #: What is listened on by the configuration's wish.
        self._listen: str | None = None

    async def open(self, given: Sequence[socket.socket], config: Config) -> None:
        """Listen on systemd's sockets, else on ``status_listen``, else nowhere."""
        self._requests.configure(config.models)
        if given:
            self._handed_over = True
            await self._serve(given)
        else:
            await self._move(config.proxy.status_listen)

    async def reconfigure(self, config: Config) -> Sequence[str]:
        """Take a new configuration; returns what an operator should know, one sentence each."""
        self._requests.configure(config.models)
        if self._handed_over or config.proxy.status_listen == self._listen:
            return ()
        return await self._move(config.proxy.status_listen)

    def feed(self, proxy: PublicProxy) -> None:
        """The public port accepts: its requests are counted while somebody can ask for them."""
        self._proxy = proxy
        self._count()

    async def close(self) -> None:
        self._lag.stop()
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._listen is not None:
            unbind(self._listen)
            self._listen = None
        self._count()

    async def _move(self, listen: str | None) -> Sequence[str]:
        await self.close()
        if listen is None:
            return ()
        try:
            sock = bound(listen)
        except ListenFailed as error:
            log.error("no status listener: %s", error)
            return (f"no status listener: {error}",)
        self._listen = listen
        await self._serve([sock])
        return ()

    async def _serve(self, sockets: Sequence[socket.socket]) -> None:
        from supervisord.monitoring.collector import Sources
        from supervisord.monitoring.server import StatusServer
        from supervisord.monitoring.status import status_of

        sources = Sources(self._view, self._events, self._requests, self._lag, self._load)
        self._server = StatusServer(sources, lambda: status_of(self._view(), self._facts()), self._not_ready)
        await self._server.start(sockets)
        self._lag.start()
        self._count()
        log.info("status listener on %s", ", ".join(address_of(sock) for sock in sockets))

    def _count(self) -> None:
        if self._proxy is not None:
            self._proxy.observer = self._requests if self._server is not None else None

    def _load(self) -> tuple[int, int]:
        return (self._proxy.connected, self._proxy.in_flight) if self._proxy is not None else (0, 0)

    def _not_ready(self) -> str:
        if self._proxy is None:
            return "starting"
        return "shutting down" if self._view().draining else ""
