"""A small server that answers like vLLM's control face, over loopback and over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from supervisord.engine.vllm import VllmEngine

Answer = tuple[int, object]


@dataclass
class FakeVllm:
    """What it should answer, and what it was asked. ``level`` changes as vLLM's does, its quirks included."""

    level: int = 0
    asleep_parts: set[str] = field(default_factory=set)
    dev_mode: bool = True
    api_key: str = ""
    models: object = None
    headers: dict[str, str] = field(default_factory=dict)
    #: Path -> the answer instead of the usual one; a status of 0 cuts the connection.
    faults: dict[str, Answer] = field(default_factory=dict)
    #: Path -> the answer, by the body of the request.
    answers: dict[str, Callable[[dict[str, object]], Answer]] = field(default_factory=dict)
    #: Paths that are never answered.
    hangs: set[str] = field(default_factory=set)
    #: Paths that are never answered and make an hour pass on the loop's clock: nobody has to wait a timeout out.
    late: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    bodies: list[object] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    endpoint: str = ""
    stop: Callable[[], Awaitable[None]] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        self.connections.add(request.transport)
        if request.can_read_body:
            self.bodies.append(await request.json())
        loop = asyncio.get_running_loop()
        if request.path in self.late:
            now = loop.time
            loop.time = lambda: now() + 3600.0
        if request.path in self.hangs | self.late:
            await loop.create_future()
        if request.path in self.faults:
            status, body = self.faults[request.path]
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if isinstance(body, str):
                return web.Response(status=status, text=body)
            return web.json_response(body, status=status)
        if request.path in self.answers:
            status, body = self.answers[request.path](self.bodies[-1])
        else:
            status, body = self.usual(request)
        return web.json_response(body, status=status, headers=self.headers)

    def usual(self, request: web.Request) -> Answer:
        """vLLM's answer and its effect."""
        guarded = self.api_key and request.path.startswith("/v1/")
        if guarded and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        match request.method, request.path:
            case "GET", "/health":
                return 200, None
            case "GET", "/v1/models":
                return 200, self.models
        if not self.dev_mode:
            return 404, {"detail": "Not Found"}
        match request.method, request.path:
            case "GET", "/is_sleeping":
                return 200, {"is_sleeping": self.level > 0}
            case "POST", "/sleep":
                level = int(request.query.get("level", "1"))
                self.level = self.level or level  # level 1 -> 2 is answered and not done
                self.asleep_parts = {"weights", "kv_cache"}
                return 200, {"status": "sleeping", "level": level}
            case "POST", "/wake_up":
                self.asleep_parts -= set(request.query.getall("tags", sorted(self.asleep_parts)))
                if not self.asleep_parts:
                    self.level = 0
                return 200, {"status": "sleeping" if self.level else "awake"}
            case "POST", "/collective_rpc":
                return 200, {"results": [None]}
            case "POST", "/reset_prefix_cache":
                return 200, None
        return 404, {"detail": "Not Found"}


def row(name: str, **more: object) -> dict[str, object]:
    """One row of /v1/models."""
    return {"id": name, "object": "model", "root": "/models/x", "parent": None, "max_model_len": 2048, **more}


@pytest.fixture(params=["tcp", "uds"])
async def vllm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FakeVllm]:
    """The server, serving ``tiny`` and ``tiny-alias`` and an adapter of it."""
    fake = FakeVllm()
    rows = [row("tiny"), row("tiny-alias"), row("adapter", parent="tiny", max_model_len=None)]
    fake.models = {"object": "list", "data": rows}
    server = web.Server(fake.handle)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    if request.param == "tcp":
        site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        fake.endpoint = f"http://{host}:{port}"
    else:
        site = web.UnixSite(runner, str(tmp_path / "engine.sock"))
        await site.start()
        fake.endpoint = f"unix:{tmp_path / 'engine.sock'}"

    fake.stop = runner.cleanup
    yield fake
    await runner.cleanup()


@pytest.fixture
async def engine(vllm: FakeVllm) -> AsyncIterator[VllmEngine]:
    """The client of that server, which expects one of its names."""
    client = VllmEngine(vllm.endpoint, expected_names=["tiny", "other-name-of-it"])
    yield client
    await client.close()
