"""A plain answer reaches the client when it is whole: an engine killed between its head and its end costs no answer."""

import asyncio

import pytest
from proxyrig import STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.relay import MOST_HELD
from supervisord.core.admission import Ending

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def dies_after(sent: bytes):
    async def die(request, connection):
        await connection.send(sent)
        await connection.close()
        raise ConnectionResetError

    return die


@pytest.mark.parametrize("body", [b"", b"12345"])
async def test_an_engine_that_dies_within_a_plain_answer_costs_the_client_nothing(rig, body):
    await rig.engine("a", dies_after(HEAD % 100 + body))
    await rig.engine("b")
    answer = await rig.post()
    assert answer.status == 200
    assert answer.header("x-vllmctl-replica") == "b"
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN), ("b", Ending.COMPLETED)]
    assert [(f.source, f.target) for f in rig.failovers] == [("a", "b")]


async def test_where_nobody_else_can_answer_it_is_an_error_and_no_half_answer(rig):
    await rig.engine("a", dies_after(HEAD % 100 + b"12345"))
    answer = await rig.post()
    assert answer.status == 502
    assert answer.json()["error"]["code"] == "upstream_failed"


@pytest.mark.parametrize("length", [0, 1, MOST_HELD, MOST_HELD + 1])
async def test_an_answer_of_any_length_passes_untouched(rig, length):
    body = (bytes(range(251)) * (length // 251 + 1))[:length]

    async def answer(request, connection):
        await connection.send(reply_bytes(body))

    await rig.engine("a", answer)
    got = await rig.post()
    assert (got.status, got.header("content-length"), got.body) == (200, str(length), body)


async def test_a_longer_answer_is_not_kept_in_memory_and_not_sent_twice(rig):
    go = asyncio.Event()

    async def die(request, connection):
        await connection.send(HEAD % (MOST_HELD + 1) + b"12345")
        await go.wait()
        connection.reset()
        raise ConnectionResetError

    await rig.engine("a", die)
    other = await rig.engine("b")
    client = await rig.send(request_bytes())
    assert (await client.head()).status == 200
    assert await client.reader.readexactly(5) == b"12345"
    go.set()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.reader.readexactly(MOST_HELD)
    assert other.requests == []


async def test_a_client_that_leaves_ends_an_answer_that_is_held(rig):
    async def work(request, connection):
        await connection.send(HEAD % 100 + b"12345")
        await connection.closed()

    engine = await rig.engine("a", work)
    client = await rig.send(request_bytes())
    await asyncio.wait_for(engine.arrived.wait(), 10)
    client.reset()
    await asyncio.wait_for(engine.lost.wait(), 10)
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_stream_that_dies_before_its_first_event_costs_the_client_nothing(rig, ending):
    async def die(request, connection):
        await connection.send(event_stream_head())
        if ending == "close":
            await connection.close()
        else:
            connection.reset()
        raise ConnectionResetError

    async def stream(request, connection):
        await connection.send(event_stream_head() + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    await rig.engine("a", die)
    await rig.engine("b", stream)
    answer = await rig.post(STREAM)
    assert (answer.status, answer.header("x-vllmctl-replica")) == (200, "b")
    assert answer.body == b"data: [DONE]\n\n"
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN), ("b", Ending.COMPLETED)]


@pytest.mark.usefixtures("heads_at_once")
async def test_the_head_of_a_stream_is_not_held_for_ever(rig):
    go = asyncio.Event()

    async def stream(request, connection):
        await connection.send(event_stream_head())
        await go.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    await rig.engine("a", stream)
    client = await rig.send(request_bytes(STREAM))
    assert (await client.head()).status == 200
    go.set()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
