"""A realtime session and the supervisor: it wakes the model, keeps it awake, and lets it sleep when it is over."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from supervised import Supervised, supervised
from websockets.asyncio.client import ClientConnection, connect

from proxy.server import PublicProxy
from supervisord.core.spec import IdleLadder, ModelSpec, ProxySpec, ReplicaSpec
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

PATIENCE = 20.0
#: Seconds without a request after which the replica sleeps.
IDLE = 0.2


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    words = ["m", "--host", "127.0.0.1", "--port", "0", "--enable-sleep-mode", "--sim-clock-factor", "0.001"]
    async with Simulator(parse(words, {"VLLM_SERVER_DEV_MODE": "1"})) as simulator:
        yield simulator


@pytest.fixture
async def daemon(simulator: Simulator, tmp_path: Path) -> AsyncIterator[Supervised]:
    idle = IdleLadder(sleep1=IDLE)
    async with supervised(simulator.endpoint, tmp_path / "state", canary=False, idle=idle) as daemon:
        yield daemon


@pytest.fixture
async def url(daemon: Supervised, simulator: Simulator) -> AsyncIterator[str]:
    """Where the session is."""
    models = [ModelSpec("m", (ReplicaSpec("r", "m", "engine.service", simulator.endpoint),))]
    proxy = PublicProxy(daemon.dispatcher, ProxySpec(), models, lambda failover: None)
    listener = socket.create_server(("127.0.0.1", 0))
    await proxy.start([listener])
    yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
    await proxy.stop()


async def asleep(simulator: Simulator) -> None:
    """Returns when the engine sleeps."""
    async with asyncio.timeout(PATIENCE):
        await simulator.engine.until(lambda: simulator.engine.state.is_sleeping)


async def told(session: ClientConnection) -> dict:
    return json.loads(await asyncio.wait_for(session.recv(), PATIENCE))


async def test_a_session_wakes_its_model_keeps_it_awake_and_lets_it_sleep(url: str, simulator: Simulator):
    await asleep(simulator)
    async with connect(url, proxy=None) as session:
        assert (await told(session))["type"] == "session.created"
        await session.send('{"type":"session.update","model":"m"}')
        await session.send('{"type":"x"}')
        assert (await told(session))["code"] == "unknown_event"
        assert not simulator.engine.state.is_sleeping
        slept = simulator.engine.counters.sleeps.total()
        loop = asyncio.get_running_loop()
        end = loop.time() + 5 * IDLE
        while loop.time() < end:
            await (await session.ping())  # which is no event, and nobody's activity
        assert simulator.engine.counters.sleeps.total() == slept
    await asleep(simulator)


async def test_a_session_that_was_greeted_and_has_said_nothing_keeps_nobody_awake(url: str, simulator: Simulator):
    await asleep(simulator)
    async with connect(url, proxy=None) as session:
        assert (await told(session))["type"] == "session.created"
        await (await session.ping())
        assert simulator.engine.state.is_sleeping
        assert not simulator.engine.counters.wakes
