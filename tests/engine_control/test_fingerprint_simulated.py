"""The fingerprint against the simulator: the same through sleeps, load and restarts, and another over garbage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest

from supervisord.core.canary import Fingerprint, difference
from supervisord.core.readings import EngineState
from supervisord.engine.fingerprint import TOKENS
from supervisord.engine.vllm import VllmEngine
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

LONG = 30.0
WORDS = ["model", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "tiny", "--enable-sleep-mode"]
Start = Callable[[], AbstractAsyncContextManager[tuple[Simulator, VllmEngine]]]


@pytest.fixture(params=["generate", "pooling"])
def start(request: pytest.FixtureRequest) -> Start:
    """A fresh simulator, a thousand times faster than life, and its client."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Simulator, VllmEngine]]:
        words = [*WORDS, "--runner", request.param, "--sim-clock-factor", "0.001"]
        async with Simulator(parse(words, {"VLLM_SERVER_DEV_MODE": "1"})) as simulator:
            client = VllmEngine(simulator.endpoint, ["tiny"])
            try:
                yield simulator, client
            finally:
                await client.close()

    return run


async def taken(client: VllmEngine) -> Fingerprint:
    seen = await client.fingerprint(LONG)
    assert seen is not None
    return seen


async def wake_from_2(client: VllmEngine) -> None:
    await client.wake_up(["weights"], LONG)
    await client.reload_weights(LONG)
    await client.wake_up(["kv_cache"], LONG)
    await client.reset_prefix_cache(LONG)


async def test_it_is_the_same_through_sleeps_and_restarts(start: Start) -> None:
    async with start() as (_, client):
        first = await taken(client)
        assert not first.tokens or len(first.tokens) > 3 * TOKENS
        await client.sleep(1, LONG)
        await client.wake_up([], LONG)
        assert await taken(client) == first
        await client.sleep(2, LONG)
        await wake_from_2(client)
        assert await taken(client) == first
    async with start() as (_, client):
        assert await taken(client) == first


async def test_a_level_2_wake_without_a_reload_is_another_until_the_weights_are_loaded(start: Start) -> None:
    async with start() as (simulator, client):
        first = await taken(client)
        await client.sleep(2, LONG)
        await client.wake_up([], LONG)
        assert (await client.probe(LONG)).state is EngineState.AWAKE  # so it says
        assert difference(first, await taken(client))
        await client.reload_weights(LONG)
        assert difference(first, await taken(client)) == ""  # though the prefix cache still holds garbage
        simulator.faults.arm("garbage", "", None)
        assert difference(first, await taken(client))


async def test_it_is_the_same_under_load(start: Start) -> None:
    async with start() as (simulator, client):
        first = await taken(client)
        async with aiohttp.ClientSession(simulator.endpoint) as http:

            async def ask(number: int) -> None:
                body = {"prompt": f"{number} bottles", "input": f"{number}", "max_tokens": 50, "ignore_eos": True}
                route = "/v1/completions" if first.tokens else "/v1/embeddings"
                async with http.post(route, json=body) as response:
                    assert response.status == 200
                    await response.read()

            load = [asyncio.create_task(ask(number)) for number in range(50)]
            assert await asyncio.gather(*(taken(client) for _ in range(10))) == [first] * 10
            await asyncio.gather(*load)


async def test_a_hung_core_tells_how_far_it_came(start: Start) -> None:
    async with start() as (simulator, client):
        await taken(client)
        metrics = simulator.engine.metrics
        simulator.arm("hang", "", None)
        probe = await client.probe(0.2)
        assert probe.state is EngineState.HUNG
        assert probe.progress == metrics.prompt_tokens + metrics.generation_tokens > 0
        simulator.arm("hang", "", 0)
