"""What the engine's control face really does, held against the real vLLM: a sleep and a wake from end to end.

The tests share one engine over a Unix socket and go through its life in order; the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.canary import Fingerprint, difference
from supervisord.core.readings import EngineState, Probe
from supervisord.engine.fingerprint import TOKENS
from supervisord.engine.memory import GpuMemory, host_memory
from supervisord.engine.owner import Ownership, owner_of
from supervisord.engine.vllm import VllmEngine
from supervisord.ports import EngineError

pytestmark = pytest.mark.vllm
Real = Any  # conftest's RealEngine
LONG = 60.0
#: It tells what its KV cache holds: 512 blocks of 32 tokens.
AWAKE = Probe(EngineState.AWAKE, "", ("tiny", "tiny-alias"), 2048, kv_tokens=512 * 32)
ASLEEP = Probe(EngineState.ASLEEP, "", ("tiny", "tiny-alias"), 2048)


@pytest.fixture(scope="module")
def real(start_engine: Any) -> Real:
    return start_engine("uds")


@pytest.fixture
async def engine(real: Real) -> AsyncIterator[VllmEngine]:
    """The client of the engine, which is ready and awake when a test gets it."""
    client = VllmEngine(real.endpoint, expected_names=["tiny"])
    try:
        await real.until(client, EngineState.AWAKE)
        yield client
    finally:
        await client.close()


async def complete(real: Real, **more: object) -> dict[str, Any]:
    """A short answer without chance in it."""
    body = {
        "model": "tiny",
        "prompt": "once upon a time",
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    async with real.http() as http, http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_while_loading_it_is_unreachable_and_then_awake(real: Real, engine: VllmEngine) -> None:
    assert real.states == [EngineState.UNREACHABLE, EngineState.AWAKE]
    assert await engine.probe(LONG) == AWAKE


async def test_its_socket_belongs_to_its_own_processes(real: Real, engine: VllmEngine) -> None:
    assert (await owner_of(real.endpoint, real.processes)).ownership is Ownership.OURS
    stranger = await owner_of(real.endpoint, lambda: {os.getpid()})
    assert stranger.ownership is Ownership.FOREIGN
    assert host_memory(real.processes()) > 300 * 1024 * 1024
    assert await GpuMemory(real.processes).read(LONG) is None  # there is no GPU under it


async def test_a_level_1_sleep_and_wake(real: Real, engine: VllmEngine) -> None:
    before = await complete(real)
    for _ in range(2):  # twice is answered alike
        await engine.sleep(1, LONG)
        assert await engine.probe(LONG) == ASLEEP
    for _ in range(2):
        await engine.wake_up([], LONG)
        assert await engine.probe(LONG) == AWAKE
    assert (await complete(real))["choices"] == before["choices"]


async def test_a_level_2_wake_is_done_only_with_its_last_part(real: Real, engine: VllmEngine) -> None:
    before = await complete(real)
    await engine.sleep(2, LONG)
    await engine.wake_up(["weights"], LONG)
    assert await engine.probe(LONG) == ASLEEP
    await engine.reload_weights(LONG)
    assert await engine.probe(LONG) == ASLEEP
    await engine.wake_up(["kv_cache"], LONG)
    await engine.reset_prefix_cache(LONG)
    assert await engine.probe(LONG) == AWAKE
    assert (await complete(real))["choices"] == before["choices"]


async def wake_from_2(engine: VllmEngine) -> None:
    await engine.wake_up(["weights"], LONG)
    await engine.reload_weights(LONG)
    await engine.wake_up(["kv_cache"], LONG)
    await engine.reset_prefix_cache(LONG)


async def fingerprint(engine: VllmEngine) -> Fingerprint:
    seen = await engine.fingerprint(LONG)
    assert seen is not None
    return seen


async def test_its_fingerprint_is_the_same_after_the_wakes_of_both_levels(real: Real, engine: VllmEngine) -> None:
    first = await fingerprint(engine)
    assert len(first.tokens) > 3 * TOKENS  # the prompt's too
    for _ in range(3):
        await engine.sleep(1, LONG)
        await engine.wake_up([], LONG)
        assert difference(first, await fingerprint(engine)) == ""
        await engine.sleep(2, LONG)
        await wake_from_2(engine)
        assert difference(first, await fingerprint(engine)) == ""


async def test_its_fingerprint_is_the_same_in_a_batch_with_others(real: Real, engine: VllmEngine) -> None:
    first = await fingerprint(engine)
    over = asyncio.Event()

    async def company(number: int) -> None:
        while not over.is_set():  # all the time that it takes
            await complete(real, prompt=f"{number} bottles of", max_tokens=300)

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(company(number))
        seen = [await fingerprint(engine) for _ in range(20)]
        over.set()
    assert [difference(first, one) for one in seen] == [""] * len(seen)
    noise = max(abs(a - b) for one in seen for a, b in zip(first.values, one.values, strict=True))
    print(f"log probabilities differed by {noise:.4f} at most")


async def test_its_fingerprint_with_other_weights_is_another(
    real: Real, engine: VllmEngine, engine_dir: Path, tmp_path: Path
) -> None:
    # A CPU keeps its weights in a level-2 sleep. Weights that are not the model's own it can be given all the same.
    make = [engine_dir / "venv/bin/python", Path(__file__).with_name("make_tiny_model.py"), tmp_path, "--seed", "1"]
    await asyncio.to_thread(subprocess.run, make, check=True, stdout=subprocess.DEVNULL)
    first = await fingerprint(engine)

    async def load(path: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        async with real.http() as http, http.post("/collective_rpc", json=body) as response:
            assert response.status == 200, await response.text()

    await load(tmp_path)
    assert difference(first, await fingerprint(engine))
    await load(engine_dir / "tiny")
    assert difference(first, await fingerprint(engine)) == ""


async def test_every_step_of_a_wake_may_be_repeated(real: Real, engine: VllmEngine) -> None:
    # A daemon that died in the middle begins anew; also on an engine that is awake and whole.
    before = await complete(real)
    await engine.sleep(2, LONG)
    for _ in range(2):
        for _ in range(2):
            await engine.wake_up(["weights"], LONG)
            await engine.reload_weights(LONG)
        await engine.wake_up(["kv_cache"], LONG)
        await engine.wake_up(["kv_cache"], LONG)
        await engine.reset_prefix_cache(LONG)
        assert await engine.probe(LONG) == AWAKE
    assert (await complete(real))["choices"] == before["choices"]


async def test_level_2_over_level_1_is_answered_and_not_done(real: Real, engine: VllmEngine) -> None:
    # Only the engine's own log of the first call shows it; so the caller wakes it first, and this test shows no error.
    await engine.sleep(1, LONG)
    await engine.sleep(2, LONG)
    await engine.wake_up([], LONG)  # all that a level-1 wake needs
    assert await engine.probe(LONG) == AWAKE


async def test_sleep_waits_for_a_running_request_and_cuts_nothing(real: Real, engine: VllmEngine) -> None:
    body = {"model": "tiny", "prompt": "tell", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with real.http() as http, http.post("/v1/completions", json=body) as response:
        chunks = [json.loads((await response.content.readuntil(b"\n\n"))[6:])]  # it runs
        sleeping = asyncio.create_task(engine.sleep(1, LONG))
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
    await sleeping
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert await engine.probe(LONG) == ASLEEP
    await engine.wake_up([], LONG)


async def test_a_request_to_a_sleeper_is_answered_after_the_wake(real: Real, engine: VllmEngine) -> None:
    await engine.sleep(1, LONG)
    request = asyncio.create_task(complete(real))
    # It is accepted: shown by a connection of it, and by no answer while others are answered.
    assert await engine.probe(LONG) == ASLEEP
    assert not request.done()
    await engine.wake_up([], LONG)
    assert (await request)["choices"][0]["finish_reason"] == "length"


async def test_a_refused_call_quotes_the_engine(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"^cannot sleep: POST /sleep\?level=9&mode=wait: 400: .*less than or equal"):
        await engine.sleep(9, LONG)


async def test_a_hung_core_is_hung_and_a_sleep_given_up_may_still_happen(real: Real, engine: VllmEngine) -> None:
    core = real.core()
    os.kill(core, signal.SIGSTOP)
    try:
        hung = await engine.probe(2.0)
        assert (hung.state, hung.served_names) == (EngineState.HUNG, AWAKE.served_names)
        assert hung.detail == "GET /is_sleeping: no answer in 2 s"
        assert hung.progress
        assert (await engine.probe(2.0)).progress == hung.progress  # it gets nowhere
        with pytest.raises(EngineError, match="no answer in 2 s"):
            await engine.sleep(1, 2.0)
    finally:
        os.kill(core, signal.SIGCONT)
    # The core had the call in its queue: giving up on it did not take it back.
    assert (await real.until(engine, EngineState.ASLEEP, LONG)) == ASLEEP
    await engine.wake_up([], LONG)


async def test_a_core_that_dies_with_a_call_in_its_queue_leaves_a_process_that_answers_nobody(
    real: Real, engine: VllmEngine
) -> None:
    core = real.core()
    os.kill(core, signal.SIGSTOP)
    assert (await engine.probe(2.0)).state is EngineState.HUNG  # given up by us, and still in the queue
    os.kill(core, signal.SIGKILL)
    await real.until(engine, EngineState.UNREACHABLE, LONG)
    # A core that dies idle takes the whole engine with it (test_vllm_tcp). Here the server has closed its socket and
    # waits for the call's answer for ever: to systemd the unit is up, so that unreachable must lead to a restart.
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(real.process.wait, 10)
