"""Whose fault a failure is: a request's that fails wherever it goes, an engine's that is busy, or one that is ill."""

from collections import Counter as Tally

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
    a, _ = engines
    await a.arm("reset-mid-stream", "0", count=None)  # looks are well all the time
    before = product.log().count("failover: a ->")
    answers = []
    while product.log().count("failover: a ->") == before:  # they take turns
        answers.append(await clients.ask("pair"))
    await a.arm("reset-mid-stream", count=0)
    await fleet.until(lambda: fleet["a"].health == "trial", "it is on trial")
    await a.arm("slow-headers", "0.5")  # so that the others come while one is on its way
    meanwhile = await clients.many(6, "pair")
    assert codes(answers + meanwhile) == {"whole": len(answers) + 6}
    assert Tally(answer.replica for answer in meanwhile) == {"a": 1, "b": 5}
    await fleet.until(lambda: fleet["a"].health == "ok", "a request succeeded there")


async def test_a_replica_that_fails_many_at_once_costs_nobody_an_answer(product, clients, fleet, engines):
    a, _ = engines
    async with clients.load("pair", 6) as load:
        await a.arm("reset-mid-stream", "0", count=None)
        await fleet.until(lambda: any(failover.source == "a" for failover in fleet.failovers), "a failure")
        await a.arm("reset-mid-stream", count=0)
        await fleet.until(lambda: fleet["a"].health == "ok", "a request succeeded there")
        await load.more(12)
    assert codes(load.answers) == {"whole": len(load.answers)}
    assert (await a.state())["garbage_answers"] == 0


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
