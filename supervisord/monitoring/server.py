"""What the status listener answers, with aiohttp: four routes, all of them from what is known already.

Nothing here asks an engine, wakes a model, keeps one awake, or causes traffic on a bus.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from supervisord.monitoring.collector import Sources, exposition

#: Seconds that an answer under way is given when the listener closes.
CLOSE_PATIENCE = 1.0


class StatusServer:
    """The answers on some listening sockets."""

    def __init__(self, sources: Sources, status: Callable[[], object], ready: Callable[[], str]) -> None:
        """``status``: what /status tells, for JSON. ``ready``: why no request is accepted now; empty: they are."""
        self._sources, self._status, self._why_not = sources, status, ready
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/status", self._tell_status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_PATIENCE)
        self._listeners: list[asyncio.Server] = []

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Answer on ``sockets``, which are closed with the server."""
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        for sock in sockets:
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            self._listeners.append(await create(self._runner.server, sock=sock))

    async def close(self) -> None:
        while self._listeners:
            self._listeners.pop().close()
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = await exposition(self._sources, ", ".join(request.headers.getall("Accept", [])))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        why_not = self._why_not()
        return web.Response(status=503 if why_not else 200, text=f"{why_not or 'ready'}\n")

    async def _tell_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status(), dumps=_dumps)


def _dumps(value: object) -> str:
    # As vllmctl --json prints it.
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
