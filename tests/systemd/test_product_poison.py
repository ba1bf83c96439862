"""Whose fault a failure is: a request's that fails wherever it goes, an engine's that is busy, or one that is ill."""

import asyncio

import pytest
from product import codes, model

CONFIG = model("pair", "a", "b")


@pytest.fixture
async def engines(product, clients, fleet):
    """Both replicas, ready and without faults."""
    await product.vllmctl("up", "pair")
    async with product.engine("a") as a, product.engine("b") as b:
        yield a, b


def demotions(product) -> int:
    return product.log().count("event=demoted")


async def test_a_request_that_fails_wherever_it_goes_blacks_out_nobody(product, clients, fleet, engines):
    """Twice, as a client does that tries again: each replica resets the connection without a byte."""
    runs = [engine.run() for engine in engines]
    for _ in range(2):
        for engine in engines:
            await engine.arm("reset-mid-stream", "0", count=None)
        poison = await clients.ask("pair", "Poison")
        assert poison.status == 502, poison
        assert poison.code == "upstream_failed"
        for engine in engines:
            await engine.arm("reset-mid-stream", count=0)
        # The last live replica is never ejected: others are answered at once.
        assert codes(await clients.many(20, "pair")) == {"whole": 20}
    await fleet.until(lambda: {r.health for r in fleet.now().replicas} == {"ok"}, "both are believed again")
    assert [engine.run() for engine in engines] == runs


async def test_a_replica_that_failed_gets_one_request_at_a_time_until_one_succeeds(product, clients, fleet, engines):
    a, b = engines
    await a.arm("reset-mid-stream", "0", count=3)  # looks are well all the time
    async with clients.load("pair", 6) as load:
        await fleet.until(lambda: fleet["a"].health == "trial", "it is on trial")
        await fleet.until(lambda: fleet["a"].health == "ok", "a request succeeded there")
        await load.more(12)
    assert codes(load.answers) == {"whole": len(load.answers)}
    # Of six clients at work all the time, only one at a time met it after the first failure.
    failed = [failover for failover in fleet.failovers if failover.source == "a"]
    assert len(failed) == 3
    assert (await asyncio.gather(a.state(), b.state()))[0]["garbage_answers"] == 0


@pytest.mark.parametrize("status", ["429", "503"])
async def test_an_engine_that_says_that_it_has_too_much_to_do_is_not_demoted(product, clients, fleet, engines, status):
    before = demotions(product)
    for engine in engines:
        await engine.arm(status, "7", count=3)
    answers = await clients.many(12, "pair")
    refused = [answer for answer in answers if not answer.whole]
    assert [answer.status for answer in refused] == [int(status)] * 6
    assert {answer.headers["Retry-After"] for answer in refused} == {"7"}
    assert {r.health for r in fleet.now().replicas} == {"ok"}
    assert (demotions(product), fleet.failovers) == (before, [])
