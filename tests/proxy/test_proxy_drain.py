"""The end of the port: what is in flight finishes, the rest is told, and a new configuration disturbs nobody."""

import asyncio
import json
import socket

import pytest
from proxyrig import CHAT, MODEL, STREAM, chunk, event_stream_head, reply_bytes, request_bytes, streaming

from supervisord.core.admission import Ending, RefusalCode, Refuse
from supervisord.core.spec import ModelSpec


async def test_drain_waits_for_what_is_in_flight(rig, gate):
    await rig.engine("a", streaming(gate))
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    drained = asyncio.create_task(rig.proxy.drain(10))
    await rig.get("/health")
    assert not drained.done()
    gate.set()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
    await drained
    assert rig.admission.endings == [("a", Ending.COMPLETED)]
    assert rig.proxy.in_flight == 0


async def test_drain_without_requests_is_done_at_once(rig):
    await asyncio.wait_for(rig.proxy.drain(60), 1)


async def test_a_client_that_was_let_in_and_has_not_asked_yet_is_answered(rig):
    await rig.engine("a")
    client = await rig.connect()
    await rig.proxy.stop_accepting()
    drained = asyncio.create_task(rig.proxy.drain(10))
    await client.send(request_bytes())
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (200, "close")
    await drained


async def test_a_client_that_asks_nothing_does_not_hold_up_the_drain(rig, monkeypatch):
    monkeypatch.setattr("proxy.server.FIRST_QUESTION", 0.01)
    client = await rig.connect()
    await asyncio.wait_for(rig.proxy.drain(60), 1)
    await rig.proxy.stop()
    assert await client.closed() == b""


async def test_a_stream_that_outlives_the_drain_gets_an_error_event(rig, gate):
    await rig.engine("a", streaming(gate))
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    await rig.proxy.drain(0.01)
    error = json.loads((await client.chunk()).removeprefix(b"data: "))["error"]
    assert error["code"] == "router_shutting_down"
    assert await client.chunk() == b""
    assert await client.closed() == b""
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]


async def test_a_plain_answer_that_outlives_the_drain_is_cut(rig):
    async def half(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n12345")
        await connection.closed()

    await rig.engine("a", half)
    client = await rig.send(request_bytes())
    await client.head()
    assert await client.reader.readexactly(5) == b"12345"
    await rig.proxy.drain(0.01)
    assert await client.closed() == b""
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]


async def test_what_has_not_begun_when_the_drain_ends_is_503(rig):
    async def silent(request, connection):
        await connection.closed()

    engine = await rig.engine("a", silent)
    waiting = await rig.send(request_bytes())
    await asyncio.wait_for(engine.arrived.wait(), 10)
    rig.admission.asleep.add("a")
    queued = await rig.send(request_bytes())
    await rig.until(lambda: rig.admission.waiting)
    uploading = await rig.send(request_bytes()[:-3])
    await rig.get("/health")
    await rig.proxy.drain(0.01)
    for client in (waiting, queued, uploading):
        answer = await client.response()
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "router_shutting_down"
        assert answer.header("retry-after") == "5"
        assert answer.header("connection") == "close"
        assert await client.closed() == b""
    assert rig.admission.abandoned == 1


async def test_a_stalled_client_cannot_hold_up_the_end(rig):
    async def flood(request, connection):
        await connection.send(event_stream_head())
        while True:
            await connection.send(chunk(b"x" * 65_000))

    await rig.engine("a", flood)
    slow = socket.socket()
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", rig.port))
    await loop.sock_sendall(slow, request_bytes(STREAM))
    await rig.until(lambda: rig.admission.open)
    await asyncio.wait_for(rig.proxy.drain(0.5), 10)
    assert rig.proxy.in_flight == 0
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]
    slow.close()


async def test_a_whole_answer_that_is_not_read_yet_is_not_cut_at_the_end(rig):
    body = b'{"text":"' + b"x" * 1_000_000 + b'"}'

    async def answer(request, connection):
        await connection.send(reply_bytes(body))

    await rig.engine("a", answer)
    listener = rig.proxy._listeners[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # its connections inherit it
    client = await rig.connect()
    client.writer.transport.pause_reading()
    await client.send(request_bytes())
    await rig.until(lambda: rig.admission.finished)
    assert rig.proxy.in_flight == 1  # until it is read
    await rig.proxy.drain(0.01)
    client.writer.transport.resume_reading()
    assert (await client.response()).body == body
    assert await client.closed() == b""


async def test_a_request_on_a_kept_connection_is_refused_and_the_connection_ends(rig, gate):
    await rig.engine("a", streaming(gate))
    stream, kept = await rig.send(request_bytes(STREAM)), await rig.connect()
    await stream.head()
    await kept.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await kept.response()
    rig.admission.refusal = Refuse(RefusalCode.ROUTER_SHUTTING_DOWN, "the router is shutting down", 2)
    drained = asyncio.create_task(rig.proxy.drain(10))
    await kept.send(request_bytes())
    answer = await kept.response()
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "router_shutting_down"
    assert answer.header("connection") == "close"
    assert await kept.closed() == b""
    gate.set()
    await drained


async def test_after_stop_accepting_nobody_gets_in_but_what_is_in_flight_goes_on(rig, gate):
    await rig.engine("a", streaming(gate))
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    await rig.proxy.stop_accepting()
    with pytest.raises(ConnectionRefusedError):
        await rig.connect()
    gate.set()
    assert await client.chunk() == b"data: 1\n\n"
    assert await client.chunk() == b"data: [DONE]\n\n"


async def test_a_socket_that_somebody_else_holds_too_keeps_connections_for_the_next_process(rig):
    held = socket.create_server(("127.0.0.1", 0))
    await rig.proxy.stop()
    await rig.proxy.start([held.dup()])
    await rig.proxy.stop_accepting()
    client = socket.create_connection(held.getsockname())
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    held.settimeout(10)
    accepted, _ = held.accept()  # the next process
    assert accepted.recv(3) == b"GET"
    for sock in (held, client, accepted):
        sock.close()


async def test_stop_without_drain_leaves_nothing(rig, gate):
    await rig.engine("a", streaming(gate))
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    await asyncio.wait_for(rig.proxy.stop(), 10)
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)]
    await client.closed()


async def test_a_new_configuration_changes_limits_and_routing_and_no_request_in_flight(rig, gate):
    await rig.engine("a", streaming(gate))
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    rig.reconfigure(max_body=10)
    assert (await rig.post()).status == 413
    rig.reconfigure(max_body=1_000_000)
    rig.proxy.reconfigure(rig.spec, [ModelSpec("m", MODEL.replicas, routing="roundrobin")])

    async def plain(request, connection):
        await connection.send(reply_bytes(b"{}"))

    rig.engines["a"].behaviour = plain
    assert (await rig.post(CHAT)).header("x-vllmctl-route") == "roundrobin"
    gate.set()
    assert await client.chunk() == b"data: 1\n\n"
    assert await client.chunk() == b"data: [DONE]\n\n"
