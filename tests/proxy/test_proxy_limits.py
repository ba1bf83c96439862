"""Slow, stalled, crowded and greedy clients, and streams that break within a chunk."""

import asyncio
import json
import os
import socket

import pytest
from proxyrig import PATIENCE, STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.clients.connection import READ_AHEAD
from supervisord.core.admission import Ending

UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"{" * 100])
async def test_a_body_that_stops_is_408_and_the_connection_ends(rig, sent):
    rig.reconfigure(client_body_timeout=0.05)
    engine = await rig.engine()
    client = await rig.send(UPLOAD + sent)
    answer = await client.response()
    assert answer.status == 408
    assert answer.json()["error"]["code"] == "request_timeout"
    await client.closed()
    assert engine.requests == []


async def test_a_body_that_trickles_is_408_though_it_never_stops(rig):
    rig.reconfigure(client_body_timeout=0.2)
    await rig.engine()
    client = await rig.send(UPLOAD)

    async def trickle():
        while True:
            await client.send(b"x")
            await asyncio.sleep(0.005)

    trickling = asyncio.create_task(trickle())
    assert (await client.response()).status == 408
    trickling.cancel()
    await asyncio.wait([trickling])


async def test_a_slow_body_within_the_limits_arrives(rig):
    engine = await rig.engine()
    raw = request_bytes()
    client = await rig.connect()
    for at in range(len(raw)):
        await client.send(raw[at : at + 1])
    assert (await client.response()).status == 200
    assert engine.requests[0].body == raw.partition(b"\r\n\r\n")[2]


async def test_one_connection_too_many_is_503_and_the_others_go_on(rig):
    rig.reconfigure(max_connections=2)
    first, second = await rig.connect(), await rig.connect()
    for client in (first, second):
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.response()).status == 200
    third = await rig.connect()
    answer = await third.response()
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "too_many_connections"
    assert answer.header("retry-after") == "1"
    await third.close()
    await first.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await first.response()).status == 200


async def test_refused_clients_that_do_not_leave_are_held_up_to_a_number_and_take_nobodys_place(rig, monkeypatch):
    monkeypatch.setattr("proxy.clients.connection.LINGER", 60.0)
    rig.reconfigure(max_connections=2)
    server, left = rig.proxy._server, asyncio.Event()
    connections, lost = server.connections, server.lost
    first, second = await rig.connect(), await rig.connect()
    for client in (first, second):
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.response()).status == 200
    held = [await rig.connect() for _ in range(8)]
    for client in held:
        assert (await client.response()).status == 503
    assert len(connections) == 10
    for _ in range(20):
        await (await rig.connect()).closed()
    assert len(connections) == 10
    monkeypatch.setattr(server, "lost", lambda connection: (lost(connection), left.set()))
    await first.close()
    await asyncio.wait_for(left.wait(), PATIENCE)
    assert len(connections) == 9
    assert (await rig.get("/health")).status == 200
    for client in held:
        await client.close()


async def test_a_client_that_pipelines_without_end_is_not_read_without_end(rig):
    go = asyncio.Event()

    async def wait(request, connection):
        await go.wait()
        await connection.send(reply_bytes(b"{}"))

    await rig.engine("a", wait)
    client = await rig.connect()
    raw = request_bytes({**STREAM, "padding": "x" * 10_000})
    count = 40 * READ_AHEAD // len(raw)
    sending = asyncio.create_task(client.send(raw * count))
    await rig.until(lambda: rig.admission.open)
    connection = next(iter(rig.proxy._server.connections))
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(connection._buffer) <= READ_AHEAD + 256 * 1024  # and one read
    go.set()
    for _ in range(count):
        assert (await client.response()).status == 200
    await sending


async def test_a_client_that_leaves_while_it_pipelines_is_seen(rig):
    async def wait(request, connection):
        await connection.closed()

    engine = await rig.engine("a", wait)
    client = await rig.send(request_bytes() * 3)
    await asyncio.wait_for(engine.arrived.wait(), PATIENCE)
    client.reset()
    await asyncio.wait_for(engine.lost.wait(), PATIENCE)
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])
    assert len(rig.admission.admitted) == 1


@pytest.mark.parametrize("missing", [1, 60, 400, 60_000])
async def test_a_stream_that_breaks_within_a_chunk_is_told_within_it(rig, missing):
    async def die(request, connection):
        await connection.send(event_stream_head() + chunk(b"data: 1\n\n") + b"%x\r\ndata: 2" % (7 + missing))
        await may_die.wait()
        connection.reset()
        raise ConnectionResetError

    may_die = asyncio.Event()
    await rig.engine("a", die)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    may_die.set()
    received = b""
    while data := await client.chunk():
        received += data
    events = [event for event in received.strip().split(b"\n\n") if event.strip()]
    assert events[0] == b"data: 2"
    assert json.loads(events[1].strip().removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
    assert len(events) == 2
    assert await client.closed() == b""


async def test_a_stream_that_breaks_within_a_huge_chunk_is_cut(rig):
    async def die(request, connection):
        await connection.send(event_stream_head() + b"10000000\r\ndata: 2")
        await may_die.wait()
        connection.reset()
        raise ConnectionResetError

    may_die = asyncio.Event()
    await rig.engine("a", die)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    may_die.set()
    await client.closed()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.STREAM_BROKEN)])


@pytest.mark.parametrize(
    "damage",
    [b"zz\r\n", b"5\r\nhelloX", b"-1\r\n", b"5\nhello\r\n", b"0\r\nno field\r\n\r\n", b"5;" + b"x" * 300 + b"\r\n"],
)
async def test_chunks_of_an_engine_that_make_no_sense_break_the_stream(rig, damage):
    async def babble(request, connection):
        await connection.send(event_stream_head() + chunk(b"data: 1\n\n"))
        await read.wait()
        await connection.send(damage)
        await connection.closed()

    read = asyncio.Event()
    await rig.engine("a", babble)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    received = await client.chunk()
    read.set()
    while data := await client.chunk():
        received += data
    assert b"upstream_failed" in received
    assert b"[DONE]" not in received
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN)]


async def test_trailers_and_extensions_of_an_engine_go_no_further(rig):
    async def answer(request, connection):
        await connection.send(event_stream_head() + b"9;x=y\r\ndata: 1\n\n\r\n0;z\r\nX-Trailer: 1\r\n\r\n")

    engine = await rig.engine("a", answer)
    for _ in range(2):
        client = await rig.send(request_bytes(STREAM))
        await client.head()
        assert await client.reader.readexactly(19) == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"
    assert len(engine.connections) == 1


async def test_two_hundred_stalled_clients_and_a_flooding_engine_are_bounded_memory(rig):
    piece = chunk(b"data: " + b"x" * 16_000 + b"\n\n")

    async def flood(request, connection):
        await connection.send(event_stream_head())
        while True:
            await connection.send(piece)

    await rig.engine("a", flood)
    loop = asyncio.get_running_loop()
    before, slow = resident(), []
    for _ in range(200):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", rig.port))
        await loop.sock_sendall(sock, request_bytes(STREAM))
        slow.append(sock)
    await rig.until(lambda: len(rig.admission.open) == 200)
    held, quiet = 0, 0
    async with asyncio.timeout(3 * PATIENCE):
        while quiet < 50:  # until nothing moves any more
            now = sum(c.transport.get_write_buffer_size() for c in rig.proxy._server.connections)
            held, quiet = now, quiet + 1 if now == held else 0
            await asyncio.sleep(0.01)
    print(f"held for 200 stalled clients: {held / 1e6:.1f} MB; resident: +{(resident() - before) / 1e6:.1f} MB")
    assert all(connection.write_paused for connection in rig.proxy._server.connections)
    assert held < 200 * (64 * 1024 + 300_000)  # the limit, and one read above it
    for sock in slow:
        sock.close()
    await rig.until(lambda: not rig.admission.open)
    assert rig.admission.endings == [("a", Ending.CLIENT_GONE)] * 200


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_no_idle_time_at_all_closes_after_each_answer(rig):
    rig.reconfigure(keepalive=0.0)
    await rig.engine()
    client = await rig.send(request_bytes())
    assert (await client.response()).status == 200
    assert await client.closed() == b""
