"""Makes ``proxyrig`` importable, and runs a proxy that must leave nothing behind."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from proxy.server import PublicProxy
from supervisord.control import Failover
from supervisord.core.spec import ProxySpec

sys.path.insert(0, str(Path(__file__).parent))

from proxyrig import MODEL, PATIENCE, FakeAdmission, Rig, open_files


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A proxy on a port of its own; at the end every lease is back, and nothing is left behind."""
    tasks_before = asyncio.all_tasks()
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
    assert not admission.open, "leases that never came back"
    assert not admission.waiting, "requests that still wait"


@pytest.fixture(autouse=True)
def no_open_files_left() -> Iterator[None]:
    before = open_files()
    yield
    assert not open_files() - before
