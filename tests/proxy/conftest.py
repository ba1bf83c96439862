"""Makes ``proxyrig`` importable, and runs a proxy that must leave nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from proxy.credentials import Credentials
from proxy.server import PublicProxy
from supervisord.control import Failover
from supervisord.core.spec import ProxySpec

sys.path.insert(0, str(Path(__file__).parent))

from proxyrig import MODEL, PATIENCE, FakeAdmission, Rig, open_files
from tlsrig import FIRST, BlockingClient


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    """The daemon runs on uvloop; PROXY_TEST_LOOP=asyncio runs these tests on what it falls back to."""
    asked = os.environ.get("PROXY_TEST_LOOP", "uvloop")
    return {asked: {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}[asked]}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A proxy on a port of its own; at the end every lease is back, and nothing is left behind."""
    tasks_before, files_before = asyncio.all_tasks(), sockets_and_files()
    admission = FakeAdmission()
    failovers: list[Failover] = []
    spec = ProxySpec(connect_timeout=2.0, first_byte_timeout=PATIENCE)
    proxy = PublicProxy(admission, spec, [MODEL], failovers.append)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await proxy.start([listener])
    rig = Rig(admission, proxy, port, spec, failovers)
    try:
        yield rig
        for client in rig.clients:
            await client.close()
        await rig.until(lambda: not admission.open and not admission.waiting)
    finally:
        await proxy.drain(1.0)
        await proxy.stop()
        for engine in rig.engines.values():
            await engine.stop()
        for client in rig.clients:
            await client.close()
    async with asyncio.timeout(PATIENCE):
        while left := asyncio.all_tasks() - tasks_before - {asyncio.current_task()}:
            await asyncio.wait(left)
        while left_open := sockets_and_files() - files_before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # sockets are closed by the turns of the loop that follow
    assert not left_open
    assert not admission.open, "leases that never came back"
    assert not admission.waiting, "requests that still wait"


@pytest.fixture
def secure(rig: Rig) -> Rig:
    """The same, speaking TLS."""
    rig.proxy.guard(Credentials(tls=FIRST.server()))
    return rig


@pytest.fixture
async def blocking(secure: Rig) -> AsyncIterator[Callable[[], Awaitable[BlockingClient]]]:
    """Makes blocking clients of ``secure``; what they do is done in threads."""
    made: list[BlockingClient] = []

    async def connect() -> BlockingClient:
        made.append(await asyncio.to_thread(BlockingClient, secure.port))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def sockets_and_files() -> Counter[str]:
    """What a proxy opens, without what the loop opens for itself."""
    return Counter({name: n for name, n in open_files().items() if name == "socket:" or name.startswith("/tmp/")})


@pytest.fixture(autouse=True)
def no_open_files_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = open_files()
    yield
    # A loop of a test's own has files of its own, and comes and goes out of our sight: see rig.
    assert inspect.iscoroutinefunction(request.function) or not open_files() - before


@pytest.fixture
def gate() -> asyncio.Event:
    """Opens when a test says so: see ``proxyrig.streaming``."""
    return asyncio.Event()


@pytest.fixture
def heads_at_once(monkeypatch):
    """Heads of streams go out before their first event: for tests of what happens in between."""
    monkeypatch.setattr("proxy.relay.HEAD_HELD", 0.0)
