"""What a policy is told of a request while it is relayed: computed, and over, exactly once each."""

import asyncio

import pytest
from proxyrig import STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.policies.turns import Counter
from supervisord.core.admission import Choice

USAGE = b'"usage":{"prompt_tokens":100,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":25}}'


class Recorder:
    """Takes turns and writes down what it is told."""

    def __init__(self):
        self.turns, self.told, self.over = Counter(), [], []

    def choose(self, facts, candidates):
        name = self.turns.next(candidates).name
        self.told.append(f"chosen {name}")
        return Choice(name, "turn")

    def forget(self, facts, replica):
        self.told.append(f"failed {replica}")

    def first_byte(self, facts):
        self.told.append("first byte")

    def finished(self, facts, cached, tokens=None):
        if not any(facts is other for other in self.over):  # the first call counts
            self.over.append(facts)
            self.told.append(f"over {cached}")


@pytest.fixture
def policy(rig, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(rig.proxy._policies, "policy", lambda model, asked: recorder)
    return recorder


@pytest.mark.usefixtures("heads_at_once")
async def test_of_a_stream_the_first_event_counts_and_not_the_head(rig, policy):
    go = asyncio.Event()

    async def stream(request, connection):
        await connection.send(event_stream_head())
        await go.wait()
        await connection.send(chunk(b'data: {"x":1}\n\n'))
        await connection.send(chunk(b"data: {" + USAGE + b"}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    await rig.engine("a", stream)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert policy.told == ["chosen a"]
    go.set()
    while await client.chunk():
        pass
    await rig.until(lambda: not rig.admission.open)
    assert policy.told == ["chosen a", "first byte", "over 0.25"]


async def test_a_whole_answer_tells_its_cached_tokens(rig, policy):
    async def answer(request, connection):
        await connection.send(reply_bytes(b"{" + USAGE + b"}"))

    await rig.engine("a", answer)
    assert (await rig.post()).status == 200
    assert policy.told == ["chosen a", "first byte", "over 0.25"]


async def test_an_engines_refusal_took_no_computing(rig, policy):
    async def refuse(request, connection):
        await connection.send(reply_bytes(b"{}", "429 Too Many Requests"))

    await rig.engine("a", refuse)
    assert (await rig.post()).status == 429
    assert policy.told == ["chosen a", "over None"]


async def test_a_failed_try_is_told_and_the_request_is_over_once(rig, policy):
    async def die(request, connection):
        connection.reset()
        raise ConnectionResetError

    await rig.engine("a", die)
    await rig.engine("b")
    assert (await rig.post()).status == 200
    assert policy.told == ["chosen a", "failed a", "chosen b", "first byte", "over None"]


async def test_a_client_that_leaves_while_its_request_is_computed_or_waits_is_over_too(rig, policy):
    async def silent(request, connection):
        await asyncio.Event().wait()

    engine = await rig.engine("a", silent)
    client = await rig.send(request_bytes(STREAM))
    await engine.arrived.wait()
    await client.close()
    await rig.until(lambda: not rig.admission.open)
    rig.admission.asleep.add("a")
    client = await rig.send(request_bytes(STREAM))
    await rig.until(lambda: bool(rig.admission.waiting))
    await client.close()
    await rig.until(lambda: bool(rig.admission.abandoned))
    await rig.get("/health")
    assert policy.told == ["chosen a", "over None", "over None"]
