"""An engine that hangs, under load and without: noticed, left out, restarted; one that is only slow to answer is not.

How long each takes is measured by tests/bench/bench_faults.py.
"""

import asyncio
import signal

import product as rig
import pytest
from product import Engine, codes, model, systemctl

#: Quick looks, and little patience.
SUPERVISOR = (
    rig.SUPERVISOR.replace('probe_timeout = "2s"', 'probe_timeout = "1s"')
    + 'suspect_interval = "100ms"\nhung_after = "1s"\nhung_idle_after = "1s"\n'
)
CONFIG = model("pair", "a", "b")


async def hangs(product, engine: Engine, how: str) -> None:
    """The engine core hangs and /health says 200; or the whole process stands still, and nothing answers."""
    if how == "its core":
        await engine.arm("hang", count=None)
    else:
        product.kill(engine.unit, signal.SIGSTOP)


@pytest.fixture
async def engines(product, clients, fleet):
    """Both replicas, ready."""
    systemctl("stop", "vllm@a.service", "vllm@b.service")  # a process that stands still is none to go on with
    await product.vllmctl("up", "pair")
    async with product.engine("a") as a, product.engine("b") as b:
        yield a, b


@pytest.mark.parametrize("how", ["its core", "the process"])
async def test_a_hung_engine_without_requests_is_left_out_and_its_unit_restarted(product, clients, fleet, engines, how):
    a, b = engines
    before = a.run(), b.run()
    await hangs(product, a, how)
    await fleet.until(lambda: fleet["a"].health == "suspect", "it is under suspicion")
    answers = await clients.many(10, "pair")
    assert codes(answers) == {"whole": 10}
    assert {answer.replica for answer in answers} == {"b"}
    await fleet.becomes("a", "starting")
    await fleet.becomes("a", "ready")
    assert (a.run() != before[0], b.run() != before[1]) == (True, False)
    assert "restarting vllm@a.service" in product.log()
    assert (await clients.ask("pair")).whole


@pytest.mark.parametrize("how", ["its core", "the process"])
async def test_requests_that_hang_with_their_engine_are_answered_by_another(product, clients, fleet, engines, how):
    a, b = engines
    before = b.run()
    async with clients.load("pair", 6, tokens=30) as load:
        await load.more(12)
        await hangs(product, a, how)
        await fleet.becomes("a", "starting")
        await fleet.becomes("a", "ready")
        await load.more(12)
    assert codes(load.answers) == {"whole": len(load.answers)}
    assert b.run() == before


async def test_a_stream_in_an_engine_that_hangs_ends_with_an_error_and_is_not_told_to_be_whole(
    product, clients, fleet, engines
):
    """The process goes on when its unit is stopped, gives its requests up with a 200, and says that this was all."""
    streams = [clients.stream("pair", tokens=3000) for _ in range(4)]
    under_way = [await stream.__aenter__() for stream in streams]
    await asyncio.gather(*(stream.first_token() for stream in under_way))
    product.kill("vllm@a.service", signal.SIGSTOP)
    await fleet.becomes("a", "starting")
    systemctl("stop", "vllm@b.service")  # as somebody does
    for stream in under_way:
        answer = await stream.rest()
        assert not answer.whole
        assert "[DONE]" not in answer.body
        assert '"abort"' not in answer.body
    for stream in streams:
        await stream.__aexit__(None, None, None)


async def test_a_busy_engine_that_misses_every_look_is_not_restarted(product, clients, fleet, engines):
    """Its steps are so long that no look is answered in time, but tokens come."""
    a, _ = engines
    before = a.run()
    await product.vllmctl("drain", "replica:b")
    await a.arm("slow-looks", str(1.5 / rig.CLOCK_FACTOR), count=None)
    async with clients.stream("pair", tokens=1000) as stream:  # about 10 s
        await stream.first_token()
        await fleet.until(lambda: fleet["a"].health == "suspect", "it is under suspicion")
        answer = await stream.rest()
    assert answer.whole
    await a.arm("slow-looks", count=0)
    await fleet.until(lambda: fleet["a"].health == "ok", "it is believed again")
    assert a.run() == before
    await product.vllmctl("up", "pair")
