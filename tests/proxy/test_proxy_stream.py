"""Bytes down: untouched, as they come, no further than the client reads; and what a broken end looks like."""

import asyncio
import contextlib
import json
import socket
import struct
from pathlib import Path

import pytest
from aiohttp import web
from proxyrig import PATIENCE, STREAM, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.engines.engine import EngineConnection
from supervisord.core.admission import Ending

EVENT = b'data: {"x": "\xc3\xa9"}\n\n'


@pytest.mark.usefixtures("heads_at_once")
async def test_every_chunk_arrives_when_it_is_sent_with_its_bytes_untouched(rig):
    go = asyncio.Semaphore(0)

    async def stream(request, connection):
        await connection.send(event_stream_head("X-Engine: 1\r\n"))
        for number in range(3):
            await go.acquire()
            await connection.send(chunk(EVENT * (number + 1)))
        await go.acquire()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    await rig.engine("a", stream)
    client = await rig.send(request_bytes(STREAM))
    head = await client.head()  # before any event
    assert head.status == 200
    assert head.header("content-type") == "text/event-stream; charset=utf-8"
    assert head.header("x-engine") == "1"
    assert head.header("x-vllmctl-replica") == "a"
    assert head.header("x-vllmctl-route") == "spread"
    for number in range(3):
        go.release()
        assert await client.chunk() == EVENT * (number + 1)
    go.release()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


async def test_a_real_server_upstream_streams_compressed_and_plain(rig):
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer k"
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"})
        await response.prepare(request)
        for _ in range(4):
            await response.write(b"\x1f\x8b not really")
        return response

    app = web.Application()
    app.router.add_post("/v1/embeddings", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    rig.admission.endpoints["a"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await web.SockSite(runner, listener).start()
    try:
        answer = await rig.post({"model": "m"}, "/v1/embeddings", "Authorization: Bearer k\r\n")
        assert answer.status == 200
        assert answer.body == b"\x1f\x8b not really" * 4
        assert answer.header("content-encoding") == "gzip"
    finally:
        await runner.cleanup()


async def _break_after(rig, sent: bytes, head: bytes | None = None) -> bytes:
    """What a client reads of a stream whose engine dies after ``sent``."""

    async def die(request, connection):
        await connection.send((head or event_stream_head()) + chunk(sent))
        await may_die.wait()
        connection.reset()
        raise ConnectionResetError

    may_die = asyncio.Event()
    await rig.engine("a", die)
    client = await rig.send(request_bytes(STREAM))
    await client.head()
    received = await client.chunk()
    may_die.set()
    while data := await client.chunk():
        received += data
    assert await client.closed() == b""  # the connection ends too
    return received


@pytest.mark.parametrize("sent", [EVENT, EVENT[:-1], EVENT[:9]])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(rig, sent):
    received = await _break_after(rig, sent)
    assert received.startswith(sent)
    assert b"[DONE]" not in received
    last = received.rstrip(b"\n").split(b"\n\n")[-1].lstrip()
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert error["type"] == "BadGatewayError"
    assert rig.admission.endings == [("a", Ending.STREAM_BROKEN)]
    assert rig.failovers == []


async def test_nothing_is_sent_to_another_replica_after_the_first_byte(rig):
    other = await rig.engine("b")
    await _break_after(rig, EVENT)  # replaces a, which is first in turn
    assert other.requests == []


@pytest.mark.parametrize(
    ("path", "shape"), [("/v1/messages", {"type", "error"}), ("/v1/responses", {"type", "error", "code", "message"})]
)
async def test_the_error_event_speaks_the_dialect_of_its_route(rig, path, shape):
    async def die(request, connection):
        await connection.send(event_stream_head() + chunk(EVENT))
        await arrived.wait()
        connection.reset()
        raise ConnectionResetError

    arrived = asyncio.Event()
    await rig.engine("a", die)
    client = await rig.send(request_bytes(STREAM, path))
    await client.head()
    assert await client.chunk() == EVENT
    arrived.set()
    name, data = (await client.chunk()).rstrip().split(b"\n")
    assert name == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert event["type"] == "error"
    assert shape <= set(event)
    assert await client.chunk() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2000000\r\n\r\n",  # not held
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n",
    ],
)
async def test_a_plain_answer_that_breaks_is_cut_so_that_the_client_sees_it(rig, head):
    async def die(request, connection):
        await connection.send(head + b"12345")
        await connection.close()
        raise ConnectionResetError

    await rig.engine("a", die)
    client = await rig.send(request_bytes(STREAM))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.response()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.STREAM_BROKEN)])


async def test_a_cut_is_seen_by_an_http_1_0_client_too(rig):
    async def die(request, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"12345"))
        await may_die.wait()
        connection.reset()
        raise ConnectionResetError

    may_die = asyncio.Event()
    await rig.engine("a", die)
    client = await rig.send(request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    await client.head()
    assert await client.reader.readexactly(5) == b"12345"
    may_die.set()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(client.reader.read(), 10)


async def test_an_http_1_0_client_gets_no_chunks(rig):
    async def stream(request, connection):
        await connection.send(event_stream_head() + chunk(EVENT) + chunk(EVENT) + b"0\r\n\r\n")

    await rig.engine("a", stream)
    client = await rig.send(request_bytes(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head = await client.head()
    assert head.header("transfer-encoding") is None
    assert await client.closed() == EVENT * 2


# the client leaves


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("phase", ["before the head", "silent stream", "plain body"])
@pytest.mark.usefixtures("heads_at_once")
async def test_a_client_that_leaves_ends_the_engine_s_work_at_once(rig, phase, how):
    async def work(request, connection):
        if phase == "silent stream":
            await connection.send(event_stream_head())
        if phase == "plain body":
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n12345")
        await connection.closed()

    engine = await rig.engine("a", work)
    client = await rig.send(request_bytes(STREAM))
    if phase == "before the head":
        await asyncio.wait_for(engine.arrived.wait(), 10)
    else:
        await client.head()
    left = asyncio.get_running_loop().time()
    if how == "half-close":
        client.writer.write_eof()
    elif how == "reset":
        client.reset()
    else:
        client.writer.close()
    await asyncio.wait_for(engine.lost.wait(), 10)
    print(f"upstream closed {(asyncio.get_running_loop().time() - left) * 1000:.1f} ms after the client left")
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])


async def test_a_client_that_leaves_while_the_engine_does_not_read_leaves_no_connection_behind(rig):
    engine = await rig.engine("a")
    hang = asyncio.Event()

    async def never_read(reader, writer):
        writer.transport.pause_reading()
        await hang.wait()
        writer.transport.abort()

    server = await asyncio.start_server(never_read, "127.0.0.1", 0)
    rig.admission.endpoints["a"] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = await rig.send(request_bytes({**STREAM, "padding": "x" * 20_000_000}))
    await rig.until(lambda: rig.admission.open)
    client.reset()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # uvloop closes a turn later
    assert _port(server) not in _peers()
    hang.set()
    server.close()
    assert engine.requests == []


def _port(server):
    return server.sockets[0].getsockname()[1]


def _peers() -> list[object]:
    """The ports that this process has connections to."""
    ports: list[object] = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError, IndexError):
            sock = socket.socket(fileno=int(entry.name))
            try:
                ports.append(sock.getpeername()[1])
            finally:
                sock.detach()
    return ports


async def test_a_client_that_leaves_in_the_middle_of_its_request_reaches_nobody(rig):
    await rig.engine("a")
    client = await rig.send(request_bytes(STREAM)[:-10])
    await client.close()
    answer = await rig.get("/health")
    assert answer.status == 200
    assert rig.admission.admitted == []


# backpressure


async def test_a_client_that_does_not_read_stops_the_engine_and_bounds_our_memory(rig):
    sent = 0
    stalled = asyncio.Event()
    piece = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
    total = 2000  # 130 MB

    async def flood(request, connection):
        nonlocal sent
        connection.writer.transport.set_write_buffer_limits(0)
        connection.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        await connection.send(event_stream_head())
        for _ in range(total):
            connection.writer.write(piece)
            try:
                await asyncio.wait_for(connection.writer.drain(), 0.5)
            except TimeoutError:
                stalled.set()
                await connection.writer.drain()
            sent += len(piece)
        await connection.send(b"0\r\n\r\n")

    await rig.engine("a", flood)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", rig.port))
    await loop.sock_sendall(slow, request_bytes(STREAM))
    await asyncio.wait_for(stalled.wait(), 10)
    assert sent < 8_000_000  # two sockets' buffers and ours, of 130 MB
    received = 0
    while sent < total * len(piece):
        received += len(await asyncio.wait_for(loop.sock_recv(slow, 1 << 20), 10))
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data = await asyncio.wait_for(loop.sock_recv(slow, 1 << 20), 10)
        received += len(data)
    assert received > total * 65_000
    slow.close()
    await rig.until(lambda: rig.admission.endings == [("a", Ending.COMPLETED)])


async def test_a_stalled_client_that_vanishes_returns_its_lease(rig):
    flooded = asyncio.Event()

    async def flood(request, connection):
        await connection.send(event_stream_head())
        for _ in range(100_000):
            connection.writer.write(chunk(b"x" * 65_000))
            try:
                await asyncio.wait_for(connection.writer.drain(), 0.5)
            except TimeoutError:
                flooded.set()
                await connection.writer.drain()

    engine = await rig.engine("a", flood)
    client = await rig.connect()
    linger = struct.pack("ii", 1, 0)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.writer.transport.pause_reading()
    await client.send(request_bytes(STREAM))
    await rig.until(lambda: rig.admission.open)
    await asyncio.wait_for(flooded.wait(), 10)
    client.reset()
    await asyncio.wait_for(engine.lost.wait(), 10)
    await rig.until(lambda: rig.admission.endings == [("a", Ending.CLIENT_GONE)])


async def test_many_streams_at_once_each_get_their_own_bytes(rig):
    async def echo(request, connection):
        word = json.loads(request.body)["word"].encode()
        await connection.send(event_stream_head())
        for _ in range(20):
            await connection.send(chunk(b"data: " + word + b"\n\n"))
        await connection.send(b"0\r\n\r\n")

    await rig.engine("a", echo)
    await rig.engine("b", echo)
    answers = await asyncio.gather(*(rig.post({**STREAM, "word": f"w{n}"}) for n in range(100)))
    assert [answer.body for answer in answers] == [f"data: w{n}\n\n".encode() * 20 for n in range(100)]
    assert sorted(rig.admission.endings) == [("a", Ending.COMPLETED)] * 50 + [("b", Ending.COMPLETED)] * 50


async def test_the_body_is_forwarded_byte_by_byte_as_it_was(rig):
    body = b' {"messages" :[ {"role":"user","content":"\\u00e9 \xc3\xa9"}],\n"model":\t"m" , "unknown":[1.0, 1e5]}\n'
    engine = await rig.engine("a")
    assert (await rig.post(body)).status == 200
    assert engine.requests[0].body == body


async def test_only_the_model_s_name_changes_where_the_engine_has_another(rig):
    engine = await rig.engine("a")
    rig.admission.served_names = ("org/real",)
    await rig.post(b'{"x": {"model": "alias"}, "model" : "al\\u0069as", "y": "\xc3\xa9"}')
    assert engine.requests[0].body == b'{"x": {"model": "alias"}, "model" : "org/real", "y": "\xc3\xa9"}'
    rig.admission.served_names = ()  # not known: as it is
    await rig.post(b'{"model": "alias"}')
    assert engine.requests[1].body == b'{"model": "alias"}'


async def test_a_request_without_a_model_goes_to_the_only_one(rig):
    engine = await rig.engine("a")
    rig.admission.served_names = ("org/real",)
    assert (await rig.post(b'{"prompt": "x"}', "/v1/completions")).status == 200
    assert engine.requests[0].body == b'{"prompt": "x"}'
    rig.admission.models = (*rig.admission.models, *rig.admission.models)
    answer = await rig.post(b'{"prompt": "x"}', "/v1/completions")
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "model"


async def test_an_answer_without_a_length_or_chunks_is_passed_on_to_its_end(rig):
    async def old(request, connection):
        await connection.send(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + b"x" * 100_000)
        await connection.close()
        raise ConnectionResetError

    await rig.engine("a", old)
    answer = await rig.post()
    assert answer.body == b"x" * 100_000


async def test_an_informational_answer_is_not_the_answer(rig):
    async def hints(request, connection):
        await connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + reply_bytes(b"{}"))

    await rig.engine("a", hints)
    assert (await rig.post()).status == 200


async def test_a_connection_whose_answer_came_before_all_of_the_request_was_sent_is_not_kept():
    connection = EngineConnection()

    class Full(asyncio.Transport):
        def writelines(self, pieces):
            connection.pause_writing()

        def write(self, data):
            pass

    connection.connection_made(Full())
    talk = connection.send(b"head", (b"piece", b"piece"), PATIENCE)
    connection.data_received(reply_bytes(b"", "413 Content Too Large"))
    assert talk.done
    connection.resume_writing()
    assert talk.sent
    assert connection.closed
    connection.connection_lost(None)


async def test_a_client_that_does_not_read_leaves_a_kept_connection_that_is_read(rig, tmp_path):
    async def answer(request, connection):  # all of it comes at once, before anybody takes it
        size = 120_000 if len(engine.requests) == 1 else 10
        await connection.send(event_stream_head() + chunk(b"data: " + b"x" * size + b"\n\n") + b"0\r\n\r\n")

    engine = await rig.engine("a", answer, path=str(tmp_path / "e"))
    rig.proxy._listeners[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # inherited
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", rig.port))
        await loop.sock_sendall(slow, request_bytes(STREAM))
        await rig.until(lambda: rig.admission.finished)
        assert rig.proxy.in_flight == 1  # until it is read
        assert (await rig.post(STREAM)).body == b"data: " + b"x" * 10 + b"\n\n"
    assert len(engine.connections) == 1
