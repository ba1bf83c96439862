"""A request that its policy holds: it waits, says why, and goes as soon as the policy is told that another is over."""

import asyncio
import logging

import pytest
from proxyrig import STREAM, answer_ok, streaming

from supervisord.core.admission import Choice, NotYet


class OneAtATime:
    """Holds everybody while one request is under way."""

    def __init__(self):
        self.under_way, self.waited, self.breaks = None, [], False

    def choose(self, facts, candidates):
        if self.breaks:
            raise RuntimeError("a defect")
        if self.under_way is not None:
            self.waited.append(facts)
            return NotYet("held for KV: no seat", 10.0)
        self.under_way = facts
        held = any(facts is other for other in self.waited)
        return Choice(candidates[0].name, "held 1.0s for KV, cold" if held else "cold")

    def forget(self, facts, replica):
        self.finished(facts, None)

    def first_byte(self, facts):
        pass

    def finished(self, facts, cached, tokens=None):
        if facts is self.under_way:
            self.under_way = None


@pytest.fixture
def policy(rig, monkeypatch):
    policy = OneAtATime()
    monkeypatch.setattr(rig.proxy._policies, "policy", lambda model, asked: policy)
    return policy


async def test_the_next_goes_as_soon_as_the_one_before_is_over(rig, policy, caplog):
    caplog.set_level(logging.INFO)
    go = asyncio.Event()

    async def answer(request, connection):
        await go.wait()
        await answer_ok(request, connection)

    engine = await rig.engine("a", answer)
    first = asyncio.create_task(rig.post())
    await engine.arrived.wait()
    second = asyncio.create_task(rig.post(headers="X-Request-Id: second\r\n"))
    await rig.until(lambda: rig.admission.waiting)
    assert len(engine.requests) == 1
    go.set()
    assert (await first).header("x-vllmctl-route") == "cold"
    answered = await second
    assert (answered.status, answered.header("x-vllmctl-route")) == (200, "held 1.0s for KV, cold")
    [said] = [
        record for record in caplog.records if "held for KV" in record.getMessage() and record.name == "proxy.relay"
    ]
    assert said.getMessage() == "request second is held for KV: no seat"
    assert said.fields == {"model": "m", "request_id": "second"}


async def test_a_client_that_leaves_lets_the_next_one_in(rig, policy):
    async def silent(request, connection):
        await asyncio.Event().wait()

    engine = await rig.engine("a", silent)
    first = asyncio.create_task(rig.post())
    await engine.arrived.wait()
    engine.behaviour = answer_ok
    second = asyncio.create_task(rig.post())
    await rig.until(lambda: rig.admission.waiting)
    await rig.clients[0].close()
    assert (await second).status == 200
    await asyncio.gather(first, return_exceptions=True)
    assert policy.under_way is None


async def test_a_policy_that_raises_when_it_is_asked_again_costs_its_request_a_500(rig, policy, caplog, gate):
    engine = await rig.engine("a", streaming(gate))
    first = asyncio.create_task(rig.post(STREAM))
    await engine.arrived.wait()
    second = asyncio.create_task(rig.post(headers="X-Request-Id: second\r\n"))
    await rig.until(lambda: rig.admission.waiting)
    policy.breaks = True
    gate.set()
    assert (await first).status == 200
    answered = await second
    assert (answered.status, answered.json()["error"]["code"]) == (500, "internal_error")
    [said] = [record for record in caplog.records if record.exc_info]
    assert said.getMessage() == "cannot answer request second"
    assert said.exc_info[0] is RuntimeError
