"""The canary from end to end: real core, effects and state directory, and an engine that answers 200 and garbage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from supervised import supervised

from supervisord.core.actions import NoteKind
from supervisord.engine.vllm import VllmEngine
from supervisord.simulator.options import parse
from supervisord.simulator.server import Simulator

LONG = 30.0
Says = Callable[[], Awaitable[str]]


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    words = ["model", "--host", "127.0.0.1", "--port", "0", "--enable-sleep-mode", "--sim-clock-factor", "0.001"]
    async with Simulator(parse(words, {"VLLM_SERVER_DEV_MODE": "1"})) as simulator:
        yield simulator


@pytest.fixture
async def says(simulator: Simulator) -> AsyncIterator[Says]:
    """What a client is told by the engine."""
    async with aiohttp.ClientSession(simulator.endpoint) as http:

        async def ask() -> str:
            async with http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8}) as response:
                return str((await response.json())["choices"][0]["text"])

        yield ask


async def wake_without_its_weights(simulator: Simulator) -> None:
    """As a daemon did that was killed between the wake and the reload, or a person with curl."""
    engine = VllmEngine(simulator.endpoint)
    await engine.sleep(2, LONG)
    await engine.wake_up([], LONG)
    await engine.close()


@pytest.mark.parametrize("canary", [True, False])
async def test_garbage_is_found_though_the_journal_of_intents_was_lost(
    simulator: Simulator, says: Says, tmp_path: Path, canary: bool
) -> None:
    async with supervised(simulator.endpoint, tmp_path / "state", canary=canary) as daemon:
        await daemon.lease()
        whole = await says()
    await wake_without_its_weights(simulator)
    shutil.rmtree(tmp_path / "state" / "replicas")
    async with supervised(simulator.endpoint, tmp_path / "state", canary=canary) as daemon:
        await daemon.lease()
        failed = [note for note in daemon.notes if note.kind is NoteKind.CANARY_FAILED]
        if canary:
            assert await says() == whole
            assert len(failed) == 1
            assert daemon.unit.jobs == []  # the weights were loaded again, and nothing was restarted
        else:
            assert "GARBAGE" in await says()  # which is what it is for
            assert failed == []


@pytest.mark.parametrize("level", [1, 2])
async def test_a_good_wake_is_let_through_without_a_further_step(
    simulator: Simulator, says: Says, tmp_path: Path, level: int
) -> None:
    async with supervised(simulator.endpoint, tmp_path / "state", canary=True) as daemon:
        await daemon.lease()
        whole = await says()
        await daemon.sleep(level)
        await daemon.lease()
        assert await says() == whole
        assert not [note for note in daemon.notes if note.kind is NoteKind.CANARY_FAILED]
        assert simulator.engine.counters.reloads == level - 1


async def test_a_wake_that_brings_garbage_lets_nobody_in_before_it_is_put_right(
    simulator: Simulator, says: Says, tmp_path: Path
) -> None:
    async with supervised(simulator.endpoint, tmp_path / "state", canary=True) as daemon:
        await daemon.lease()
        whole = await says()
        await daemon.sleep(1)
        # As if the copy in host RAM had been lost.
        simulator.engine.state = replace(simulator.engine.state, whole=False)
        await daemon.lease()
        assert await says() == whole
        assert len([note for note in daemon.notes if note.kind is NoteKind.CANARY_FAILED]) == 1
        assert simulator.engine.counters.reloads == 1
        assert daemon.unit.jobs == []
