"""The end of the port under TLS: what ends whole says its goodbye, what is cut does not, and nobody holds it up."""

import asyncio
import json

import pytest
from proxyrig import STREAM, chunk, event_stream_head, request_bytes, streaming
from tlsrig import FIRST

from supervisord.core.admission import Ending


async def begun(client, data, until):
    """Send a request, and read until its answer has begun."""
    await asyncio.to_thread(client.send, data)
    received = b""
    while until not in received:
        received += await asyncio.to_thread(client.socket.recv, 1000)


async def test_a_stream_that_ends_within_the_drain_is_whole_and_ends_with_a_goodbye(secure, blocking, gate):
    await secure.engine("a", streaming(gate))
    client = await blocking()
    await begun(client, request_bytes(STREAM), b"data: 1")
    await secure.proxy.stop_accepting()
    drained = asyncio.create_task(secure.proxy.drain(10))
    gate.set()
    await drained
    assert secure.admission.endings == [("a", Ending.COMPLETED)]
    await secure.proxy.stop()
    rest = await asyncio.to_thread(client.read_to_the_end)
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_stream_that_outlives_the_drain_gets_its_error_event_and_a_goodbye(secure, blocking, gate):
    await secure.engine("a", streaming(gate))
    client = await blocking()
    await begun(client, request_bytes(STREAM), b"data: 1")
    await secure.proxy.drain(0.01)
    rest = await asyncio.to_thread(client.read_to_the_end)
    event, _, end = rest.partition(b"data: ")[2].partition(b"\n\n")
    assert json.loads(event)["error"]["code"] == "router_shutting_down"
    assert end == b"\r\n0\r\n\r\n"
    assert secure.admission.endings == [("a", Ending.CLIENT_GONE)]


async def test_a_plain_answer_that_outlives_the_drain_is_cut_without_a_goodbye(secure, blocking):
    async def half(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n12345")
        await connection.closed()

    await secure.engine("a", half)
    client = await blocking()
    await begun(client, request_bytes(), b"12345")
    await secure.proxy.drain(0.01)
    with pytest.raises(OSError, match=r"EOF|reset by peer"):
        await asyncio.to_thread(client.read_to_the_end)
    assert secure.admission.endings == [("a", Ending.CLIENT_GONE)]


async def test_a_request_that_has_not_begun_when_the_drain_ends_is_503_with_a_goodbye(secure, blocking):
    async def silent(request, connection):
        await connection.closed()

    engine = await secure.engine("a", silent)
    client = await blocking()
    await asyncio.to_thread(client.send, request_bytes())
    await asyncio.wait_for(engine.arrived.wait(), 10)
    await secure.proxy.drain(0.01)
    head, _, body = (await asyncio.to_thread(client.read_to_the_end)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nConnection: close" in head
    assert json.loads(body)["error"]["code"] == "router_shutting_down"


async def test_a_client_that_was_let_in_and_has_not_shaken_hands_yet_is_answered(secure):
    await secure.engine("a")
    client = await secure.connect()
    await secure.proxy.stop_accepting()
    drained = asyncio.create_task(secure.proxy.drain(10))
    await client.writer.start_tls(FIRST.client(), server_hostname="localhost")
    await client.send(request_bytes())
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (200, "close")
    assert await client.closed() == b""
    await drained


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
async def test_a_client_that_does_not_shake_hands_does_not_hold_up_the_end(secure, monkeypatch, sent):
    monkeypatch.setattr("proxy.server.FIRST_QUESTION", 0.01)
    client = await secure.connect()
    await client.send(sent)
    await asyncio.wait_for(secure.proxy.drain(60), 5)
    await asyncio.wait_for(secure.proxy.stop(), 5)
    assert await client.closed() == b""


async def test_a_kept_connection_ends_with_the_answer_to_its_next_request_and_a_goodbye(secure, blocking, gate):
    await secure.engine("a", streaming(gate))
    stream, kept = await blocking(), await blocking()
    await begun(stream, request_bytes(STREAM), b"data: 1")
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    await begun(kept, health, b"200 OK")
    drained = asyncio.create_task(secure.proxy.drain(10))
    await asyncio.sleep(0)
    await asyncio.to_thread(kept.send, health)
    answer = await asyncio.to_thread(kept.read_to_the_end)
    assert b"\r\nConnection: close\r\n" in answer
    assert not drained.done()
    gate.set()
    await drained


async def test_a_stalled_client_cannot_hold_up_the_end(secure):
    async def flood(request, connection):
        await connection.send(event_stream_head())
        while True:
            await connection.send(chunk(b"x" * 65_000))

    await secure.engine("a", flood)
    client = await secure.connect(ssl=FIRST.client())
    await client.send(request_bytes(STREAM))
    client.writer.transport.pause_reading()
    await secure.until(lambda: secure.admission.open)
    await asyncio.wait_for(secure.proxy.drain(0.2), 10)
    assert secure.admission.endings == [("a", Ending.CLIENT_GONE)]
    await asyncio.wait_for(secure.proxy.stop(), 10)
    client.reset()
