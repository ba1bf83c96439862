"""The real engine on loopback, with an API key and without its development routes: what a foreign unit may be like."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from supervisord.core.readings import EngineState, Probe
from supervisord.engine.owner import Ownership, owner_of
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import EngineError

pytestmark = pytest.mark.vllm
Real = Any  # conftest's RealEngine
LONG = 60.0


@pytest.fixture(scope="module")
def real(start_engine: Any) -> Real:
    return start_engine("tcp", "--api-key", "secret", VLLM_SERVER_DEV_MODE="0")


@pytest.fixture
async def engine(real: Real) -> AsyncIterator[VllmEngine]:
    """A client with the key; the engine is ready."""
    client = VllmEngine(real.endpoint, expected_names=["tiny"], api_key="secret")
    try:
        await real.until(client, EngineState.AWAKE)
        yield client
    finally:
        await client.close()


async def test_without_dev_mode_it_is_awake_and_cannot_sleep(real: Real, engine: VllmEngine) -> None:
    assert real.states == [EngineState.UNREACHABLE, EngineState.AWAKE]
    awake = Probe(EngineState.AWAKE, "", ("tiny", "tiny-alias"), 2048, kv_tokens=512 * 32, can_sleep=False)
    assert await engine.probe(LONG) == awake
    with pytest.raises(EngineError, match=r"404: Not Found \(an engine sleeps only with VLLM_SERVER_DEV_MODE=1\)$"):
        await engine.sleep(1, LONG)


async def test_without_the_key_its_state_is_known_and_its_names_are_not(real: Real, engine: VllmEngine) -> None:
    keyless = VllmEngine(real.endpoint, expected_names=["tiny"])
    probe = await keyless.probe(LONG)
    await keyless.close()
    assert (probe.state, probe.served_names) == (EngineState.AWAKE, ())
    assert "it wants an API key (401)" in probe.detail


async def test_its_port_belongs_to_its_own_processes(real: Real, engine: VllmEngine) -> None:
    assert (await owner_of(real.endpoint, real.processes)).ownership is Ownership.OURS
    assert (await owner_of(real.endpoint, lambda: {os.getpid()})).ownership is Ownership.FOREIGN


async def test_a_core_that_dies_takes_the_engine_with_it_and_the_exit_status_is_0(
    real: Real, engine: VllmEngine
) -> None:
    os.kill(real.core(), signal.SIGKILL)
    assert await asyncio.to_thread(real.process.wait, LONG) == 0
    assert (await engine.probe(LONG)).state is EngineState.UNREACHABLE
