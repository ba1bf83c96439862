"""The control face against the simulator: the same calls, and the faults that the real engine cannot be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisord.core.readings import EngineState, Probe
from supervisord.engine.memory import SimulatedMemory
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import EngineError
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

LONG = 30.0


@pytest.fixture(params=["tcp", "uds"])
async def simulator(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Simulator]:
    """A thousand times faster than life, with sleep that frees memory."""
    where = ["--uds", f"{tmp_path}/engine.sock"] if request.param == "uds" else ["--host", "127.0.0.1", "--port", "0"]
    words = ["model", *where, "--served-model-name", "tiny", "--enable-sleep-mode", "--max-model-len", "4096"]
    options = parse([*words, "--sim-clock-factor", "0.001"], {"VLLM_SERVER_DEV_MODE": "1"})
    async with Simulator(options) as simulator:
        yield simulator


@pytest.fixture
async def client(simulator: Simulator) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(simulator.endpoint, ["tiny"])
    yield engine
    await engine.close()


async def test_it_says_that_it_is_simulated(client: VllmEngine) -> None:
    assert await client.probe(LONG) == Probe(EngineState.AWAKE, "", ("tiny",), 4096, kv_tokens=4096, simulated=True)


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_falls_with_a_sleep_and_is_back_after_the_wake(client: VllmEngine, level: int) -> None:
    memory = SimulatedMemory(client)
    awake = await memory.read(LONG)
    assert awake
    await client.sleep(level, LONG)
    assert (await client.probe(LONG)).state is EngineState.ASLEEP
    asleep = await memory.read(LONG)
    assert asleep is not None
    assert asleep < awake / 2
    if level == 1:
        await client.wake_up([], LONG)
    else:
        await client.wake_up(["weights"], LONG)
        assert (await client.probe(LONG)).state is EngineState.ASLEEP
        await client.reload_weights(LONG)
        await client.wake_up(["kv_cache"], LONG)
        await client.reset_prefix_cache(LONG)
    assert (await client.probe(LONG)).state is EngineState.AWAKE
    assert await memory.read(LONG) == awake


async def test_a_sleep_that_frees_nothing_is_seen_in_the_memory(simulator: Simulator, client: VllmEngine) -> None:
    memory = SimulatedMemory(client)
    before = await memory.read(LONG)
    simulator.faults.arm("lie-sleep", "memory", None)
    await client.sleep(1, LONG)
    assert (await client.probe(LONG)).state is EngineState.ASLEEP
    assert await memory.read(LONG) == before


async def test_a_failed_wake_says_so(simulator: Simulator, client: VllmEngine) -> None:
    await client.sleep(2, LONG)
    simulator.faults.arm("wake-fails", "", 1)
    with pytest.raises(EngineError, match=r"^cannot wake up: POST /wake_up\?tags=weights: 500: "):
        await client.wake_up(["weights"], LONG)
    simulator.faults.arm("reload-fails", "", 1)
    await client.wake_up(["weights"], LONG)
    with pytest.raises(EngineError, match=r"^cannot reload the weights: POST /collective_rpc: 500: "):
        await client.reload_weights(LONG)


async def test_a_hang_is_found_though_health_is_fine(simulator: Simulator, client: VllmEngine) -> None:
    simulator.arm("hang", "", None)
    probe = await client.probe(2.0)
    assert probe.state is EngineState.HUNG
    assert probe.detail == "GET /is_sleeping: no answer in 2 s"
    simulator.arm("hang", "", 0)
    assert (await client.probe(LONG)).state is EngineState.AWAKE


async def test_a_dead_core_is_found_though_health_is_fine(simulator: Simulator, client: VllmEngine) -> None:
    simulator.faults.arm("lie-health", "", None)
    simulator.arm("die", "", 1)
    assert (await client.probe(LONG)).state is EngineState.BROKEN


async def test_an_engine_that_ended_is_unreachable(simulator: Simulator, client: VllmEngine) -> None:
    simulator.terminate()
    assert await asyncio.wait_for(simulator.ended, LONG) == 0
    await simulator.close()
    assert (await client.probe(LONG)).state is EngineState.UNREACHABLE
